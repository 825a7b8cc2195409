"""What every member of the weight group says before the first and after the last byte of a push.

Owns: `agree`. Invariant: either all ranks of the group go on or all of them raise, so that nobody waits for bytes that
will not come, and a refused push leaves the group in step for the next one.
"""

from megatron_sao.errors import ProtocolError
from megatron_sao.transport.group import WeightGroup


def agree(
    group: WeightGroup, *, policy_version: int, plan_hash: str, num_trainer_ranks: int, fault: str | None
) -> None:
    """Compare version, plan and readiness over the whole group.

    Args:
        fault: why this rank cannot go on; None = it can.
    Raises: ProtocolError on every rank if one has a fault or holds another version or plan.
    Collective: every rank of the weight group calls this.
    """
    mine = [0 if fault is None else 1, policy_version, int(plan_hash, 16)]
    rows = group.gather(mine)
    problems = [] if fault is None else [fault]
    for rank, (is_faulty, version, plan) in enumerate(rows):
        if rank == group.rank:
            continue
        who = f"trainer rank {rank}" if rank < num_trainer_ranks else f"engine worker {rank - num_trainer_ranks}"
        if is_faulty:
            problems.append(f"{who} refused (its own message and log say why)")
        elif version != policy_version:
            problems.append(f"{who} is at policy_version {version}")
        elif plan != int(plan_hash, 16):
            problems.append(f"{who} holds another push plan")
    if problems:
        raise ProtocolError(f"the push of policy_version {policy_version} was refused: " + "; ".join(problems))
