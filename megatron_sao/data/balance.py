"""Which trajectories go to which data-parallel rank and micro-batch. Pure: every rank computes the same plan."""

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], num_ranks: int, budget_tokens: int) -> list[list[list[int]]]:
    """Trajectory numbers by rank and micro-batch.

    Longest first, each to the rank with the fewest tokens so far; then each rank's list is cut into micro-batches of
    at most `budget_tokens` (a longer trajectory stands alone). Every rank gets the same number of micro-batches, as
    the pipeline schedule needs: the last ones of a rank may be empty (fillers, which weigh nothing).

    Args:
        lengths: tokens of each trajectory.
    Returns: plan[rank][micro_batch] = list of trajectory numbers, each number exactly once.
    """
    loads = [0] * num_ranks
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        rank = min(range(num_ranks), key=lambda r: (loads[r], r))
        shares[rank].append(number)
        loads[rank] += lengths[number]
    plan = [_cut(share, lengths, budget_tokens) for share in shares]
    most = max(len(parts) for parts in plan)
    return [parts + [[] for _ in range(most - len(parts))] for parts in plan]


def _cut(share: list[int], lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    parts: list[list[int]] = []
    used = 0
    for number in share:
        if not parts or used + lengths[number] > budget_tokens:
            parts.append([])
            used = 0
        parts[-1].append(number)
        used += lengths[number]
    return parts or [[]]
