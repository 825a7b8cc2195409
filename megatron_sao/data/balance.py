"""Which trajectories go to which data-parallel rank and micro-batch. Pure: every rank computes the same plan."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Estimated work on a trajectory of T tokens: per_token * T + per_pair * T^2 (unit: multiply-adds, or any).

    The first part are the matrices that every token passes, the second is attention, in which each token meets all
    tokens before it. Packed trajectories do not attend to each other, so the cost of a rank is the sum over its own.
    """

    per_token: float = 1.0
    per_pair: float = 0.0

    def of(self, length: int) -> float:
        """Of one trajectory of `length` tokens."""
        return self.per_token * length + self.per_pair * length**2


def micro_batches(
    lengths: Sequence[int], num_ranks: int, budget_tokens: int, *, cost: Cost = Cost(), multiple: int = 1
) -> list[list[list[int]]]:
    """Trajectory numbers by rank and micro-batch.

    Longest first, each to the rank with the lowest cost so far; then each rank's list is cut into micro-batches of at
    most `budget_tokens` (a longer trajectory stands alone): memory is a matter of tokens, time one of cost. Every rank
    gets the same number of micro-batches, as the pipeline schedule needs: the last ones of a rank may be empty
    (fillers, which weigh nothing).

    Args:
        lengths: tokens of each trajectory.
        multiple: the number of micro-batches is filled up to a multiple of it.
    Returns: plan[rank][micro_batch] = list of trajectory numbers, each number exactly once.
    """
    loads = [0.0] * num_ranks
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        rank = min(range(num_ranks), key=lambda r: (loads[r], r))
        shares[rank].append(number)
        loads[rank] += cost.of(lengths[number])
    plan = [_cut(share, lengths, budget_tokens) for share in shares]
    most = -(-max(len(parts) for parts in plan) // multiple) * multiple
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
