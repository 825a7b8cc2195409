"""The trainer's side of a push: each rank broadcasts the slices it owns, in the order of the plan.

Owns: `WeightSender`. Invariants:
- nothing is sent before every rank of the group has all its slices and agrees on version and plan;
- memory: one buffer of the largest bucket, whatever the size of the model.
Takes tensors by item, never a model. Imports torch only.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_sao.errors import ConfigError, SaoError
from megatron_sao.transport.group import WeightGroup
from megatron_sao.transport.handshake import agree
from megatron_sao.transport.plan import PushPlan, WireItem


@dataclass(frozen=True)
class PushStatistics:
    """What one push moved."""

    seconds: float
    num_bytes: int  # over all ranks
    num_buckets: int


class WeightSender:
    """Sends the weights of one trainer rank; the same object serves all pushes of a run.

    Args:
        group: the joined weight group; trainer ranks come first in it.
        plan: the same on every trainer rank and in every engine.
    """

    def __init__(self, group: WeightGroup, plan: PushPlan):
        if not group.rank < plan.num_trainer_ranks <= group.world_size:
            raise ConfigError(f"rank {group.rank} of a weight group of {group.world_size} cannot send a plan made for "
                              f"{plan.num_trainer_ranks} trainer ranks")
        self._group = group
        self._plan = plan
        self._plan_hash = plan.hash  # once: of a large plan it takes a while
        self._buffer = torch.empty(plan.max_bucket_bytes, dtype=torch.uint8, device=group.device)

    def send(self, view_of: Callable[[WireItem], torch.Tensor], policy_version: int) -> PushStatistics:
        """Send every slice this rank owns, and take part in the broadcasts of the others.

        Args:
            view_of: the local tensor of an item this rank owns: shape item.shape, any floating dtype (it is cast to
                item.dtype on the way), on any device. It must stay unchanged until `send` returns. A view costs
                nothing; a copy is held for the whole push.
            policy_version: the version these weights become; the engines were told the same number.
        Raises: ProtocolError when a rank or an engine refuses, is gone, or does not come within the timeout. After a
            refusal the group can carry the next push; after a death it cannot.
        Collective: every rank of the weight group takes part; the engines are inside `update_weights` meanwhile.
        """
        started = time.monotonic()
        views, fault = self._own_views(view_of)
        self._agree(policy_version, fault)
        for bucket in self._plan.buckets:
            buffer = self._buffer[: bucket.num_bytes]
            if bucket.src_rank == self._group.rank:
                for item, offset in zip(bucket.items, bucket.offsets, strict=True):
                    wire_view(buffer, item, offset).copy_(views[item])
            self._group.broadcast(buffer, bucket.src_rank)
        self._agree(policy_version, None)
        return PushStatistics(time.monotonic() - started, self._plan.num_bytes, len(self._plan.buckets))

    def _own_views(
        self, view_of: Callable[[WireItem], torch.Tensor]
    ) -> tuple[dict[WireItem, torch.Tensor], str | None]:
        """All tensors of this rank, or the reason why one of them cannot be sent."""
        views: dict[WireItem, torch.Tensor] = {}
        for bucket in self._plan.buckets:
            if bucket.src_rank != self._group.rank:
                continue
            for item in bucket.items:
                try:
                    view = view_of(item).detach()
                except (KeyError, IndexError, RuntimeError, SaoError) as error:
                    return {}, f"trainer rank {self._group.rank} has no tensor for {item.name}: {error!r}"
                fault = _view_fault(view, item)
                if fault:
                    return {}, f"trainer rank {self._group.rank}: {item.name} {fault}"
                views[item] = view
        return views, None

    def _agree(self, policy_version: int, fault: str | None) -> None:
        agree(self._group, policy_version=policy_version, plan_hash=self._plan_hash,
              num_trainer_ranks=self._plan.num_trainer_ranks, fault=fault)


def wire_view(buffer: torch.Tensor, item: WireItem, offset: int) -> torch.Tensor:
    """The place of one item in a bucket's buffer (uint8), as a tensor of its dtype and shape. A view, no copy."""
    return buffer[offset : offset + item.num_bytes].view(getattr(torch, item.dtype)).view(item.shape)


def _view_fault(view: torch.Tensor, item: WireItem) -> str | None:
    wire_dtype = getattr(torch, item.dtype)
    if tuple(view.shape) != item.shape:
        return f"has the local shape {tuple(view.shape)}, the plan says {item.shape}"
    if view.dtype != wire_dtype and not (view.is_floating_point() and wire_dtype.is_floating_point):
        return f"is {view.dtype}, which does not turn into {item.dtype} on the wire"
    if view.device.type == "meta":
        return "is on the meta device and holds no values"
    return None
