"""The trainer's side of a push: each rank sends the slices it owns, in the order of the plan.

Owns: `WeightSender`. Invariants:
- nothing is sent before every rank of the group has all its slices and agrees on version and plan;
- a bucket goes once, to one worker, which passes it on to its peers in the other engines; no rank gets another's;
- memory: two buffers of the largest bucket, whatever the size of the model: one is filled while the other is sent.
Takes tensors by item, never a model. Imports torch only.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_sao.errors import ConfigError, SaoError
from megatron_sao.transport.group import Transfer, WeightGroup
from megatron_sao.transport.handshake import Handshake
from megatron_sao.transport.message import MessageBuffer
from megatron_sao.transport.plan import Bucket, PushPlan, WireItem


CONNECT_TAG = 2**30  # no number of a bucket


@dataclass(frozen=True)
class PushStatistics:
    """What one push moved."""

    seconds: float  # of this rank, from the agreement before the first byte to the one after the last
    sending_s: float  # until this rank's last byte was out
    num_bytes: int  # that all ranks sent
    sent_bytes: int  # that this rank sent
    num_buckets: int  # of all ranks


@dataclass(frozen=True)
class Prepared:
    """What `send` begins with."""

    policy_version: int
    views: dict[WireItem, torch.Tensor]
    fault: str | None  # why there is nothing to send


@dataclass
class _Slot:
    buffer: MessageBuffer
    transfer: Transfer | None = None


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
        self._handshake = Handshake(group, plan)
        self._num_bytes, self._num_buckets = plan.num_bytes, len(plan.buckets)
        workers = plan.first_workers(self._handshake.num_engines)
        self._own: list[tuple[int, Bucket, int]] = [  # number, bucket, rank of the worker that gets it
            (number, bucket, plan.num_trainer_ranks + workers[number])
            for number, bucket in enumerate(plan.buckets) if bucket.src_rank == group.rank
        ]
        largest = max((bucket.num_bytes for _, bucket, _ in self._own), default=0)
        self._slots = [_Slot(MessageBuffer(largest, group.device)) for _ in range(2)]
        self._prepared: Prepared | None = None
        self._is_connected = False

    def prepare(self, view_of: Callable[[WireItem], torch.Tensor], policy_version: int) -> str | None:
        """Look at every slice this rank owns and fill the first buffers, so that `send` begins with a full one.

        Not needed, but what it does costs no pause when it is done before the engines are asked to stop. No collective.

        Args: as in `send`, which uses what was prepared for the same version only.
        Returns: why this rank cannot send, which `send` would tell the whole group; None = it can.
        """
        views, fault = self._own_views(view_of)
        self._prepared = Prepared(policy_version, views, fault)
        if fault is None:
            for slot, (number, bucket, _) in zip(self._slots, self._own):
                _fill(slot, number, bucket, views)
        return fault

    def discard(self) -> None:
        """Effect: what was prepared and not sent is forgotten."""
        self._prepared = None

    def send(self, view_of: Callable[[WireItem], torch.Tensor], policy_version: int) -> PushStatistics:
        """Send every slice this rank owns.

        Args:
            view_of: the local tensor of an item this rank owns: shape item.shape, any floating dtype (it is cast to
                item.dtype on the way), on any device. It must stay unchanged from `prepare` until `send` returns. A
                view costs nothing; a copy is held for the whole push.
            policy_version: the version these weights become; the engines were told the same number.
        Raises: ProtocolError when a rank or an engine refuses, is gone, or does not come within the timeout. After a
            refusal the group can carry the next push; after a death it is closed.
        Collective: every rank of the weight group takes part; the engines are inside `update_weights` meanwhile.
        """
        if self._prepared is None or self._prepared.policy_version != policy_version:
            self.prepare(view_of, policy_version)
        prepared, self._prepared = self._prepared, None
        started = time.monotonic()
        with self._group.push_limit():
            self._handshake.begin(policy_version, prepared.fault)
            sent_bytes = self._send_buckets(prepared.views)
            sending_s = time.monotonic() - started
            self._handshake.end(policy_version, sent_bytes, None)
        seconds = time.monotonic() - started
        return PushStatistics(seconds, sending_s, self._num_bytes, sent_bytes, self._num_buckets)

    def _send_buckets(self, views: dict[WireItem, torch.Tensor]) -> int:
        """Returns: number of bytes."""
        if not self._is_connected:
            for worker in dict.fromkeys(worker for _, _, worker in self._own):
                connect(self._group, self._group.send, worker)
            self._is_connected = True
        sent_bytes = 0
        for turn, (number, bucket, worker) in enumerate(self._own):
            slot = self._slots[turn % 2]
            if turn >= 2:  # the first two were filled by `prepare`
                slot.transfer.wait()
                _fill(slot, number, bucket, views)
            slot.transfer = self._group.send(slot.buffer.message(bucket), worker, number)
            sent_bytes += bucket.num_bytes
        for slot in self._slots:
            if slot.transfer is not None:
                slot.transfer.wait()
                slot.transfer = None
        return sent_bytes

    def _own_views(
        self, view_of: Callable[[WireItem], torch.Tensor]
    ) -> tuple[dict[WireItem, torch.Tensor], str | None]:
        """All tensors of this rank, or the reason why one of them cannot be sent."""
        views: dict[WireItem, torch.Tensor] = {}
        for _, bucket, _ in self._own:
            for item in bucket.items:
                if item in views:  # it goes to several kinds
                    continue
                try:
                    view = view_of(item).detach()
                except (KeyError, IndexError, RuntimeError, SaoError) as error:
                    return {}, f"trainer rank {self._group.rank} has no tensor for {item.name}: {error!r}"
                fault = _view_fault(view, item)
                if fault:
                    return {}, f"trainer rank {self._group.rank}: {item.name} {fault}"
                views[item] = view
        return views, None


def connect(group: WeightGroup, operation: Callable[[torch.Tensor, int, int], Transfer], peer: int) -> None:
    """Exchange one byte with a peer before the first bucket, on both sides in the order of the plan.

    NCCL connects two ranks at their first message, and then whoever begins waits for the other one; a worker that opens
    a message early would wait while others wait for it. After this, to begin a message waits for nobody.

    Args: operation: `send` or `receive` of the group.
    """
    operation(torch.zeros(1, dtype=torch.uint8, device=group.device), peer, CONNECT_TAG).wait()


def _fill(slot: _Slot, number: int, bucket: Bucket, views: dict[WireItem, torch.Tensor]) -> None:
    for item, place in slot.buffer.views(bucket):
        place.copy_(views[item])
    slot.buffer.seal(bucket, number)


def _view_fault(view: torch.Tensor, item: WireItem) -> str | None:
    wire_dtype = getattr(torch, item.dtype)
    if tuple(view.shape) != item.shape:
        return f"has the local shape {tuple(view.shape)}, the plan says {item.shape}"
    if view.dtype != wire_dtype and not (view.is_floating_point() and wire_dtype.is_floating_point):
        return f"is {view.dtype}, which does not turn into {item.dtype} on the wire"
    if view.device.type == "meta":
        return "is on the meta device and holds no values"
    if view.is_floating_point() and view.dtype.itemsize > 1 and not view.sum().isfinite() and not view.isfinite().all():
        return "holds a number that is not finite"
    return None


def holds_nan(tensor: torch.Tensor) -> bool:
    """Whether a floating tensor holds NaN. Cheap: a sum shows it, unless infinities meet in it."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        return False
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())
