"""The engine's side of a push: slices come in, whole HF tensors go out to a load function.

Owns: `TensorAssembler`, `WeightReceiver`. Invariants:
- a tensor is handed on once, when its last slice has arrived, and never before;
- an unexpected name, a slice that arrives twice or a shape that differs is an error; so is a tensor that is still
  incomplete at the end;
- when loading fails in the middle, the remaining buckets are still received (and dropped), so that the trainers do not
  hang and the group stays in step; then every rank of the group hears of the failure.
Imports torch, neither vLLM nor Megatron.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from megatron_sao.errors import ProtocolError
from megatron_sao.transport.group import WeightGroup
from megatron_sao.transport.handshake import agree
from megatron_sao.transport.plan import WHOLE, PushPlan, WireItem, first_lines
from megatron_sao.transport.sender import wire_view

NamedTensors = list[tuple[str, torch.Tensor]]


class TensorAssembler:
    """Puts the slices of one push together.

    Args:
        expected: HF name -> full shape of every tensor that must arrive.
    """

    def __init__(self, expected: Mapping[str, Sequence[int]]):
        self._expected = {name: tuple(shape) for name, shape in expected.items()}
        self._complete: set[str] = set()
        self._partial: dict[str, torch.Tensor] = {}
        self._intervals: dict[str, list[tuple[int, int]]] = {}

    def add(self, item: WireItem, piece: torch.Tensor) -> torch.Tensor | None:
        """Take one slice; `piece` may be overwritten by the caller afterwards.

        Returns: the whole tensor if this slice was the last one missing, else None.
        Raises: ProtocolError for a name nobody expects, another shape, or rows that have come before.
        """
        if item.name not in self._expected:
            raise ProtocolError(f"unexpected tensor {item.name} in the push")
        if item.full_shape != self._expected[item.name] or tuple(piece.shape) != item.shape:
            raise ProtocolError(f"{item.name} arrived as {tuple(piece.shape)} of {item.full_shape}, expected is "
                                f"{item.shape} of {self._expected[item.name]}")
        start, end = item.interval
        seen = self._intervals.setdefault(item.name, [])
        if item.name in self._complete or any(start < e and s < end for s, e in seen):
            raise ProtocolError(f"{item.name}: rows [{start}, {end}) arrived twice")
        seen.append((start, end))
        if item.dim == WHOLE:
            self._complete.add(item.name)
            return piece.clone()
        whole = self._partial.get(item.name)
        if whole is None:
            whole = self._partial[item.name] = piece.new_empty(item.full_shape)
        whole.narrow(item.dim, item.start, item.length).copy_(piece)
        if sum(e - s for s, e in seen) < item.full_shape[item.dim]:
            return None
        self._complete.add(item.name)
        return self._partial.pop(item.name)

    def missing(self) -> list[str]:
        """Names that have not arrived completely."""
        return sorted(self._expected.keys() - self._complete)


class WeightReceiver:
    """Receives whole pushes into one engine worker.

    Args:
        group: the joined weight group.
        plan: what the trainer sends.
    """

    def __init__(self, group: WeightGroup, plan: PushPlan):
        self._group = group
        self._plan = plan
        self._plan_hash = plan.hash
        self._expected = plan.expected
        self._buffer = torch.empty(plan.max_bucket_bytes, dtype=torch.uint8, device=group.device)

    def receive(
        self,
        policy_version: int,
        *,
        load: Callable[[NamedTensors], None],
        verify: Callable[[], None] = lambda: None,
        fault: str | None = None,
    ) -> None:
        """Receive one push and load it, bucket by bucket.

        Args:
            load: takes the tensors that a bucket completed (full HF shape, wire dtype, on the group's device); they are
                its own.
            verify: called when everything was loaded; raises if the model is not whole.
            fault: why this worker cannot take the push; the group is then told so and nothing is sent.
        Raises: ProtocolError when a rank refuses, is gone or late, or when a tensor is missing, unexpected or doubled;
            whatever `load` and `verify` raise. The weights are then mixed: only a whole push makes them right.
        Collective: every rank of the weight group takes part.
        """
        self._agree(policy_version, fault)
        assembler = TensorAssembler(self._expected)
        failure: Exception | None = None
        for bucket in self._plan.buckets:
            buffer = self._buffer[: bucket.num_bytes]
            self._group.broadcast(buffer, bucket.src_rank)
            if failure is not None:
                continue
            try:
                complete: NamedTensors = []
                for item, offset in zip(bucket.items, bucket.offsets, strict=True):
                    whole = assembler.add(item, wire_view(buffer, item, offset))
                    if whole is not None:
                        complete.append((item.name, whole))
                if complete:
                    load(complete)
            except Exception as error:  # whatever a model's loader raises: the group must hear of it, then it is raised
                failure = error
        if failure is None:
            try:
                _check_complete(assembler)
                verify()
            except Exception as error:  # as above
                failure = error
        try:
            self._agree(policy_version, None if failure is None else str(failure))
        except ProtocolError as refusal:
            raise refusal from failure

    def _agree(self, policy_version: int, fault: str | None) -> None:
        agree(self._group, policy_version=policy_version, plan_hash=self._plan_hash,
              num_trainer_ranks=self._plan.num_trainer_ranks, fault=fault)


def _check_complete(assembler: TensorAssembler) -> None:
    missing = assembler.missing()
    if missing:
        raise ProtocolError(f"{len(missing)} tensors did not arrive completely:\n{first_lines(missing)}")
