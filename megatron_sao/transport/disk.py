"""The fall-back carrier of a push: the same messages through files on a disk that trainer and engines share.

Owns: `make_sender`, `make_receiver`, `DiskSender`, `DiskReceiver`. The plan says which carrier: its `folder` is set.
Each trainer rank writes its buckets one after the other into a file of its own, FOLDER/version-V/rank-R, before the
engines are paused; each worker reads the buckets that it loads. The weight group carries the agreements alone, so
everything else is as over the network: version and plan, checksum of each bucket, bytes, names, poison.
Invariants:
- a file has its name only when it is whole, and no worker opens one before every rank has said that its own is;
- files go when the push is over, however it ended.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from typing import IO

import torch

from megatron_sao.errors import ProtocolError
from megatron_sao.transport.group import WeightGroup
from megatron_sao.transport.message import TRAILER_BYTES, MessageBuffer
from megatron_sao.transport.plan import Bucket, PushPlan, WireItem
from megatron_sao.transport.receiver import Arrival, NamedTensors, WeightReceiver
from megatron_sao.transport.sender import Prepared, PushStatistics, WeightSender


def make_sender(group: WeightGroup, plan: PushPlan) -> WeightSender:
    """The trainer's end of the carrier that the plan names."""
    return DiskSender(group, plan) if plan.folder else WeightSender(group, plan)


def make_receiver(group: WeightGroup, plan: PushPlan) -> WeightReceiver:
    """The engine's end of the carrier that the plan names. Collective: as `WeightReceiver`."""
    return DiskReceiver(group, plan) if plan.folder else WeightReceiver(group, plan)


class DiskSender(WeightSender):
    """Writes what one trainer rank owns. Arguments as `WeightSender`."""

    def __init__(self, group: WeightGroup, plan: PushPlan):
        super().__init__(group, plan)
        self._folder = Path(plan.folder)
        self._written: Path | None = None  # also what is being written

    def prepare(self, view_of: Callable[[WireItem], torch.Tensor], policy_version: int) -> str | None:
        """Write this rank's file; engines go on serving meanwhile. Arguments and result as `WeightSender.prepare`."""
        views, fault = self._own_views(view_of)
        if fault is None:
            path = file_of(self._folder, policy_version, self._group.rank)
            try:
                self._write(path, views)
            except OSError as error:
                fault = f"trainer rank {self._group.rank} cannot write {path}: {error.strerror} (push.folder)"
        self._prepared = Prepared(policy_version, views, fault)
        return fault

    def discard(self) -> None:
        """Effect: what was prepared and not sent is forgotten, and its file removed."""
        super().discard()
        self._remove()

    def send(self, view_of: Callable[[WireItem], torch.Tensor], policy_version: int) -> PushStatistics:
        """Let the engines read. Arguments and errors as `WeightSender.send`. Effect: the file is gone afterwards."""
        try:
            return super().send(view_of, policy_version)
        finally:
            self._remove()

    def _send_buckets(self, views: dict[WireItem, torch.Tensor]) -> int:
        return sum(bucket.num_bytes for _, bucket, _ in self._own)

    def _write(self, path: Path, views: dict[WireItem, torch.Tensor]) -> None:
        self._remove()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._written = partial = path.with_name(path.name + ".partial")
        buffer = self._slots[0].buffer
        try:
            with partial.open("wb") as file:
                for number, bucket, _ in self._own:
                    for item, place in buffer.views(bucket):
                        place.copy_(views[item])
                    buffer.seal(bucket, number)
                    file.write(memoryview(buffer.message(bucket).cpu().numpy()))
        except OSError:
            partial.unlink(missing_ok=True)  # at once: the disk may be full. Others may be about to use the folder
            raise
        partial.rename(path)
        self._written = path

    def _remove(self) -> None:
        if self._written is not None:
            self._written.unlink(missing_ok=True)
            try:
                self._written.parent.rmdir()
            except OSError:
                pass  # other ranks' files are still there
            self._written = None


class DiskReceiver(WeightReceiver):
    """Reads what one worker loads. Arguments as `WeightReceiver`."""

    def __init__(self, group: WeightGroup, plan: PushPlan):
        super().__init__(group, plan)
        self._folder = Path(plan.folder)
        self._offsets = message_offsets(plan.buckets)
        self._policy_version = -1  # of the push in progress

    def receive(self, policy_version: int, **how) -> None:
        """As `WeightReceiver.receive`."""
        self._policy_version = policy_version
        super().receive(policy_version, **how)

    def _find_arrivals(self, plan: PushPlan) -> list[Arrival]:
        return [
            Arrival(number, bucket, is_first=False, relay=None, relay_root=0)
            for number, bucket in enumerate(plan.buckets)
            if bucket.is_for(self.kind)
        ]

    def _load_all(
        self, load: Callable[[NamedTensors], None], verify: Callable[[], None]
    ) -> tuple[int, Exception | None]:
        try:
            return super()._load_all(load, verify)
        except ProtocolError as error:  # what cannot be read breaks no group: the others hear of it at the end
            return 0, error

    def _take_all(self, free: Queue, filled: Queue) -> None:
        """The transfer thread: reads into one buffer while the other one is loaded."""
        try:
            with ExitStack() as opened:
                files: dict[int, IO[bytes]] = {}
                for arrival in self._arrivals:
                    rank = arrival.bucket.src_rank
                    if rank not in files:
                        path = file_of(self._folder, self._policy_version, rank)
                        files[rank] = opened.enter_context(path.open("rb"))
                    buffer = self._free_buffer(free)
                    _read(files[rank], self._offsets[arrival.number], buffer.message(arrival.bucket))
                    filled.put((buffer, time.monotonic()))
        except OSError as error:
            filled.put(ProtocolError(f"an engine worker cannot read {error.filename}: {error.strerror}; push.folder"
                                     " must lie on a disk that trainer and engines share"))
        except Exception as error:  # raised again in the thread that loads
            filled.put(error)


def file_of(folder: Path, policy_version: int, rank: int) -> Path:
    """Where a trainer rank puts what it owns of a version."""
    return folder / f"version-{policy_version}" / f"rank-{rank:05d}"


def message_offsets(buckets: Iterable[Bucket]) -> list[int]:
    """For each bucket, where its message begins in the file of its rank."""
    ends: dict[int, int] = {}
    offsets = []
    for bucket in buckets:
        offsets.append(ends.get(bucket.src_rank, 0))
        ends[bucket.src_rank] = offsets[-1] + bucket.num_bytes + TRAILER_BYTES
    return offsets


def _read(file: IO[bytes], offset: int, message: torch.Tensor) -> None:
    file.seek(offset)
    host = message if message.device.type == "cpu" else torch.empty_like(message, device="cpu")
    num_read = file.readinto(host.numpy())
    if num_read < len(host):
        raise ProtocolError(f"{file.name} ends after {offset + num_read} bytes; {len(host) - num_read} lack")
    if host is not message:
        message.copy_(host)
