"""What every member of the weight group says before the first and after the last byte of a push.

Owns: `Handshake`. Invariants:
- all ranks judge the same rows of answers: either all of them go on or all raise, so that nobody waits for bytes that
  will not come, and a refused push leaves the group in step for the next one;
- where a rank dies or is late in the middle of an agreement there is no next one: whoever notices leaves the group, and
  those that went on before get an error at their next wait.
"""

from megatron_sao.errors import ConfigError, ProtocolError
from megatron_sao.transport.group import WeightGroup
from megatron_sao.transport.plan import PushPlan


class Handshake:
    """One rank's part in the agreements of all pushes.

    Args:
        group: trainer ranks first, then the workers of each engine in turn.
        plan: made for the number of trainer ranks and the engine layout of this group.
    """

    def __init__(self, group: WeightGroup, plan: PushPlan):
        num_workers = group.world_size - plan.num_trainer_ranks
        if num_workers <= 0 or num_workers % plan.engine.num_workers:
            raise ConfigError(
                f"a weight group of {group.world_size} does not hold the {plan.num_trainer_ranks} trainer ranks of the "
                f"plan and whole engines of {plan.engine.num_workers} workers ([engine])"
            )
        self.num_engines = num_workers // plan.engine.num_workers
        self.plan_hash = plan.hash  # once: of a large plan it takes a while
        self._group = group
        self._num_trainer_ranks = plan.num_trainer_ranks
        self._total_bytes = plan.num_bytes
        sent = [0] * plan.num_trainer_ranks
        for bucket in plan.buckets:
            sent[bucket.src_rank] += bucket.num_bytes
        taken = [plan.received_bytes(kind) for kind in range(plan.engine.num_workers)]
        self._bytes_by_rank = sent + taken * self.num_engines

    def begin(self, policy_version: int, fault: str | None) -> None:
        """Compare version, plan, its number of bytes and readiness.

        Args:
            fault: why this rank cannot take part; None = it can.
        Raises: ProtocolError on every rank if one has a fault or holds another version or plan.
        Collective: every rank of the weight group calls this.
        """
        self._compare(policy_version, self._total_bytes, [self._total_bytes] * self._group.world_size, fault)

    def end(self, policy_version: int, num_bytes: int, fault: str | None) -> None:
        """As `begin`, with what this rank has sent or taken: each must have moved what the plan says."""
        self._compare(policy_version, num_bytes, self._bytes_by_rank, fault)

    def _compare(self, policy_version: int, num_bytes: int, expected: list[int], fault: str | None) -> None:
        plan_number = int(self.plan_hash, 16)
        rows = self._group.gather([0 if fault is None else 1, policy_version, plan_number, num_bytes])
        problems = [] if fault is None else [fault]
        for rank, (is_faulty, version, plan, moved) in enumerate(rows):
            trainers = self._num_trainer_ranks
            who = f"trainer rank {rank}" if rank < trainers else f"engine worker {rank - trainers}"
            if is_faulty:
                if rank != self._group.rank:
                    problems.append(f"{who} refused (its own message and log say why)")
            elif version != policy_version:
                problems.append(f"{who} is at policy_version {version}")
            elif plan != plan_number:
                problems.append(f"{who} holds another push plan")
            elif moved != expected[rank]:
                problems.append(f"{who} counts {moved} bytes, the plan {expected[rank]}")
        if problems:
            raise ProtocolError(f"the push of policy_version {policy_version} was refused: " + "; ".join(problems))
