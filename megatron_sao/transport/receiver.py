"""The engine's side of a push: slices come in, whole HF tensors go out to a load function.

Owns: `TensorAssembler`, `WeightReceiver`. Invariants:
- a tensor is handed on once, when its last slice has arrived, and never before;
- an unexpected name, a slice that arrives twice or a shape that differs is an error; so is a tensor that is still
  incomplete at the end;
- rows that this kind of worker does not get are NaN in the tensor that is handed on, never zeros or old memory, so that
  a loader that takes them cannot go unseen;
- when loading fails in the middle, the remaining buckets are still received (and dropped), so that nobody hangs and the
  group stays in step; then every rank of the group hears of the failure;
- memory: two buffers of the largest bucket; beside them whole tensors that wait for slices (of one bucket's layers) and
  what the load function keeps: vLLM's the tensors of a module until it has all (rollout/engine_memory.py counts them).

No deadlock: every process waits for its messages in the order of the plan, first the message of a bucket, then its
relay; so the first one that is not over always has all its parties there. That a worker opens its next message before
it passes on the last one changes nothing, since to open one waits for nobody (see `sender.connect`).
Imports torch, neither vLLM nor Megatron.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_sao.errors import ConfigError, ProtocolError
from megatron_sao.transport.group import Transfer, WeightGroup
from megatron_sao.transport.handshake import Handshake
from megatron_sao.transport.message import MessageBuffer
from megatron_sao.transport.plan import WHOLE, Bucket, PushPlan, WireItem, first_lines
from megatron_sao.transport.sender import connect

NamedTensors = list[tuple[str, torch.Tensor]]


class TensorAssembler:
    """Puts the slices of one push together.

    Args:
        expected: HF name -> full shape of every tensor that must arrive.
        needed_rows: HF name -> how many of its rows come; absent = all.
    """

    def __init__(self, expected: Mapping[str, Sequence[int]], needed_rows: Mapping[str, int] | None = None):
        self._expected = {name: tuple(shape) for name, shape in expected.items()}
        self._needed_rows = needed_rows or {}
        self._complete: set[str] = set()
        self._partial: dict[str, torch.Tensor] = {}
        self._intervals: dict[str, list[tuple[int, int]]] = {}

    def add(self, item: WireItem, piece: torch.Tensor) -> torch.Tensor | None:
        """Take one slice; `piece` may be overwritten by the caller afterwards.

        Returns: the whole tensor if this slice was the last one missing, else None. Rows that do not come are NaN.
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
        num_rows = item.full_shape[item.dim]
        needed = self._needed_rows.get(item.name, num_rows)
        whole = self._partial.get(item.name)
        if whole is None:
            whole = self._partial[item.name] = piece.new_empty(item.full_shape)
            if needed < num_rows and whole.is_floating_point():
                whole.fill_(float("nan"))
        whole.narrow(item.dim, item.start, item.length).copy_(piece)
        if sum(e - s for s, e in seen) < needed:
            return None
        self._complete.add(item.name)
        return self._partial.pop(item.name)

    def missing(self) -> list[str]:
        """Names that have not arrived completely."""
        return sorted(self._expected.keys() - self._complete)


@dataclass(frozen=True)
class ReceiveStatistics:
    """What one push cost this worker."""

    arrival_s: float  # from the agreement to the arrival of the last byte
    load_s: float  # spent in putting tensors together and loading them, beside the arrival
    total_s: float  # from the agreement to the last loaded tensor
    num_bytes: int


@dataclass(frozen=True)
class Arrival:
    number: int
    bucket: Bucket
    is_first: bool  # the trainer sends it to this worker; else a peer passes it on
    relay: WeightGroup | None  # the workers that share it; None = nobody else
    relay_root: int  # rank of the first worker among them


class WeightReceiver:
    """Receives whole pushes into one engine worker.

    Args:
        group: the joined weight group: after the trainer ranks, the workers of each engine in turn.
        plan: what the trainer sends.
    Collective: every engine worker of the group makes one (they join the groups in which buckets are passed on).
    """

    def __init__(self, group: WeightGroup, plan: PushPlan):
        if group.rank < plan.num_trainer_ranks:
            raise ConfigError(f"rank {group.rank} is one of the {plan.num_trainer_ranks} trainer ranks of the plan")
        self._group = group
        self._handshake = Handshake(group, plan)
        self.kind = (group.rank - plan.num_trainer_ranks) % plan.engine.num_workers
        self._needed_rows = plan.needed_rows(self.kind)
        self._expected = {name: shape for name, shape in plan.expected.items() if name in self._needed_rows}
        self._arrivals = self._find_arrivals(plan)
        largest = max((arrival.bucket.num_bytes for arrival in self._arrivals), default=0)
        self._buffers = [MessageBuffer(largest, group.device) for _ in range(2)]
        self.statistics: ReceiveStatistics | None = None  # of the last push
        self._is_connected = False

    def _find_arrivals(self, plan: PushPlan) -> list[Arrival]:
        """What this worker gets, in the order of the plan. Collective: every worker of every engine."""
        worker = self._group.rank - plan.num_trainer_ranks
        return _arrivals(self._group, plan, worker, self._handshake.num_engines)

    def receive(
        self,
        policy_version: int,
        *,
        load: Callable[[NamedTensors], None],
        verify: Callable[[], None] = lambda: None,
        fault: str | None = None,
    ) -> None:
        """Receive one push and load it, bucket by bucket, while the next ones arrive.

        Args:
            load: takes the tensors that a bucket completed (full HF shape, wire dtype, on the group's device); they are
                its own. Called in this thread.
            verify: called when everything was loaded; raises if the model is not whole.
            fault: why this worker cannot take the push; the group is then told so and nothing is sent.
        Raises: ProtocolError when a rank refuses, is gone or late, when bytes changed on the way, or when a tensor is
            missing, unexpected or doubled; whatever `load` and `verify` raise. The weights are then mixed: only a whole
            push makes them right.
        Collective: every rank of the weight group takes part.
        """
        with self._group.push_limit():
            self._handshake.begin(policy_version, fault)
            num_bytes, failure = self._load_all(load, verify)
            fault = None if failure is None else str(failure) or repr(failure)
            try:
                self._handshake.end(policy_version, num_bytes, fault)
            except ProtocolError as refusal:
                raise refusal from failure

    def _load_all(
        self, load: Callable[[NamedTensors], None], verify: Callable[[], None]
    ) -> tuple[int, Exception | None]:
        """Returns: bytes taken, and what went wrong with them here. Raises: ProtocolError when the group broke."""
        started = time.monotonic()
        load_s = arrival_s = 0.0
        assembler = TensorAssembler(self._expected, self._needed_rows)
        failure: Exception | None = None
        num_bytes = 0
        free: queue.Queue[MessageBuffer] = queue.Queue()
        filled: queue.Queue[tuple[MessageBuffer, float] | Exception] = queue.Queue()
        for buffer in self._buffers:
            free.put(buffer)
        thread = threading.Thread(target=self._take_all, args=(free, filled), name="weight transfer", daemon=True)
        thread.start()
        for arrival in self._arrivals:
            taken = self._next(filled)
            if isinstance(taken, Exception):
                raise taken
            buffer, arrived = taken
            arrival_s = arrived - started
            num_bytes += arrival.bucket.num_bytes
            began = time.monotonic()
            complete: NamedTensors = []
            if failure is None:
                try:
                    buffer.check(arrival.bucket, arrival.number)
                    for item, piece in buffer.views(arrival.bucket):
                        whole = assembler.add(item, piece)
                        if whole is not None:
                            complete.append((item.name, whole))
                except Exception as error:  # also of no memory: the group must hear of it first
                    failure = error
            free.put(buffer)
            if failure is None and complete:
                try:
                    load(complete)
                except Exception as error:  # whatever a model's loader raises, as above
                    failure = error
            load_s += time.monotonic() - began
        thread.join()
        if failure is None:
            began = time.monotonic()
            try:
                _check_complete(assembler)
                verify()
            except Exception as error:  # as above
                failure = error
            load_s += time.monotonic() - began
        self.statistics = ReceiveStatistics(arrival_s, load_s, time.monotonic() - started, num_bytes)
        return num_bytes, failure

    def _next(self, filled: queue.Queue) -> tuple[MessageBuffer, float] | Exception:
        try:
            return filled.get(timeout=self._group.remaining_s() + 5)  # the other thread gives up first, with a reason
        except queue.Empty:
            self._group.close()
            return ProtocolError("the transfer thread of the push does not answer")

    def _take_all(self, free: queue.Queue, filled: queue.Queue) -> None:
        """The transfer thread: fills one buffer while the other one is read, and passes on what peers need."""
        try:
            if self._group.device.type == "cuda":
                torch.cuda.set_device(self._group.device)
            if not self._is_connected:
                for rank in dict.fromkeys(a.bucket.src_rank for a in self._arrivals if a.is_first):
                    connect(self._group, self._group.receive, rank)
                self._is_connected = True
            opened: tuple[MessageBuffer, Transfer] | None = None
            for arrival, following in zip(self._arrivals, [*self._arrivals[1:], None]):
                buffer, transfer = opened or (self._free_buffer(free), None)
                opened = None
                if arrival.is_first:
                    (transfer or self._open(arrival, buffer)).wait()
                if following is not None and following.is_first and not free.empty():
                    next_buffer = free.get()  # the next message arrives while this one is passed on
                    opened = next_buffer, self._open(following, next_buffer)
                if arrival.relay is not None:
                    arrival.relay.broadcast(buffer.message(arrival.bucket), arrival.relay_root)
                filled.put((buffer, time.monotonic()))
        except Exception as error:  # raised again in the thread that loads
            filled.put(error)

    def _open(self, arrival: Arrival, buffer: MessageBuffer) -> Transfer:
        return self._group.receive(buffer.message(arrival.bucket), arrival.bucket.src_rank, arrival.number)

    def _free_buffer(self, free: queue.Queue) -> MessageBuffer:
        try:
            return free.get(timeout=self._group.remaining_s())
        except queue.Empty:
            self._group.close()  # peers wait for what this worker should pass on
            raise ProtocolError(f"loading took longer than push.timeout_s = {self._group.timeout_s:g} for the whole "
                                "push; raise it, or give the engine more threads") from None


def _arrivals(group: WeightGroup, plan: PushPlan, worker: int, num_engines: int) -> list[Arrival]:
    """The buckets that one worker gets. Collective: every worker of every engine."""
    kind = worker % plan.engine.num_workers
    relays: dict[tuple[int, ...], tuple[list[int], WeightGroup | None]] = {}
    for kinds in sorted({bucket.kinds for bucket in plan.buckets if bucket.is_for(kind)}):  # everybody in one order
        peers = plan.workers_of(kinds, num_engines)
        ranks = [plan.num_trainer_ranks + peer for peer in peers]
        relays[kinds] = peers, group.subgroup(f"workers {' '.join(map(str, kinds)) or 'all'}", ranks)
    found = []
    for number, (bucket, first) in enumerate(zip(plan.buckets, plan.first_workers(num_engines), strict=True)):
        if bucket.is_for(kind):
            peers, relay = relays[bucket.kinds]
            found.append(Arrival(number, bucket, first == worker, relay, peers.index(first)))
    return found


def _check_complete(assembler: TensorAssembler) -> None:
    missing = assembler.missing()
    if missing:
        raise ProtocolError(f"{len(missing)} tensors did not arrive completely:\n{first_lines(missing)}")
