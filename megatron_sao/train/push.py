"""Pushes the policy's weights to every engine: announced to the scheduler, sent by the ranks that own them."""

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from megatron_sao.config import Config
from megatron_sao.convert.family import ModelShape
from megatron_sao.convert.slices import WeightSlice
from megatron_sao.errors import ProtocolError, TrainingError
from megatron_sao.models.weights import Exporter
from megatron_sao.parallel.exchange import broadcast_object, world_rank, world_size
from megatron_sao.records import (
    Ack,
    FormGroup,
    GroupOpen,
    Hello,
    PushDone,
    PushFailed,
    PushGo,
    PushRequest,
    PushSent,
    SchedulerMessage,
    Welcome,
)
from megatron_sao.train.link import SchedulerLink
from megatron_sao.transport.disk import make_sender
from megatron_sao.transport.engine_layout import WHOLE, engine_layout
from megatron_sao.transport.group import WeightGroup, host_store, weight_group
from megatron_sao.transport.plan import PushPlan, WireItem, encode_plan, make_plan
from megatron_sao.transport.sender import PushStatistics, WeightSender

MARGIN_S = 60.0


def longest_push_answer_s(config: Config) -> float:
    """How long one answer of the scheduler may take in a push: engines may have to answer, load and come back."""
    return 6 * config.push.timeout_s + config.engine.start_timeout_s + MARGIN_S


def wire_item(piece: WeightSlice) -> WireItem:
    """A slice as the wire names it."""
    if piece.is_whole:
        return WireItem(piece.hf_name, piece.dtype, piece.full_shape)
    return WireItem(piece.hf_name, piece.dtype, piece.full_shape, piece.dim, piece.start, piece.length)


def push_plan(
    slices_by_rank: Sequence[Sequence[WeightSlice]],
    shape: ModelShape,
    config: Config,
    names: Mapping[str, tuple[int, ...]],
    excluded: Sequence[str] = (),
) -> PushPlan:
    """The plan of a run's pushes, from what each rank gives.

    Args:
        names, excluded: as `Pusher` has them.
    Raises: ProtocolError, as `make_plan`.
    """
    plan = make_plan(
        [[wire_item(piece) for piece in pieces] for pieces in slices_by_rank],
        bucket_bytes=config.push.bucket_bytes,
        engine=engine_layout(config, shape),
        expected_shapes=names,
        excluded=excluded,
    )
    return msgspec.structs.replace(plan, folder=_push_folder(config))


def _push_folder(config: Config) -> str:
    """Where buckets travel through files; "" where they do not."""
    if config.push.transport == "network":
        return ""
    # Engines run elsewhere: a relative path would mean another folder there.
    return str(Path(config.push.folder or Path(config.run.folder, config.run.name, "push")).absolute())


class Pusher:
    """Owns the push plan, this rank's place in the weight group, and the policy version."""

    def __init__(
        self,
        exporter: Exporter,
        names: dict[str, tuple[int, ...]],
        config: Config,
        link: SchedulerLink,
        host: str,
        excluded: Sequence[str] = (),
        wake: Callable[[], None] = lambda: None,
    ):
        """Make the plan; no engine is contacted yet.

        Args:
            names: HF name -> shape of every tensor the engines expect; the plan must cover exactly these.
            host: address of trainer rank 0 that the engines can reach.
            excluded: HF names that the engines' folder holds and no push delivers.
            wake: brings the policy to the device; called before its weights are read.
        Collective: every rank of the world.
        """
        self._wake = wake
        self._exporter, self._config, self._link, self._host = exporter, config, link, host
        plan = push_plan(exporter.slices_by_rank, exporter.shape, config, names, excluded)
        if plan.folder:  # of this process alone: nobody else's files of the same version may lie there
            plan = msgspec.structs.replace(plan, folder=str(Path(plan.folder, broadcast_object(uuid.uuid4().hex[:12]))))
        self._plan = plan
        self._pieces: dict[str, list[WeightSlice]] = {}
        for piece in exporter.slices_by_rank[world_rank()]:
            self._pieces.setdefault(piece.hf_name, []).append(piece)
        self._policy_version = -1  # published last
        self._statistics = PushStatistics(0.0, 0.0, 0, 0, 0)  # of what was sent last
        self._store = None  # on rank 0: the meeting point of the weight group; closed when it is dropped
        self._group: WeightGroup | None = None
        self._sender: WeightSender | None = None  # None = in no weight group that could send

    def connect(self, policy_version: int) -> None:
        """Meet the engines, and bring those to `policy_version` that lack it. Collective: every rank of the world."""
        hello = Hello(
            policy_version=policy_version,
            num_trainer_ranks=world_size(),
            plan=encode_plan(self._plan),
            plan_hash=self._plan.hash,
        )
        self._link.push_again = lambda: self._publish(self._policy_version, is_due=False)
        self._link.request(hello, Welcome)
        self._publish(policy_version, is_due=False)

    def push(self, policy_version: int) -> dict[str, float]:
        """Publish the current weights as `policy_version`; engines keep their requests and continue under it.

        Returns: seconds of pause, transfer, load and resume as the scheduler saw them, and the trainer's own.
        Raises: ProtocolError when no engine could be brought to the version; TrainingError, before any engine is
            paused, when a weight is not finite or cannot be read.
        Collective: every rank of the world.
        """
        started = time.monotonic()
        metrics = self._publish(policy_version, is_due=True)
        return {
            **metrics,
            "push/send_s": self._statistics.seconds,
            "push/total_s": time.monotonic() - started,
            "push/bytes": float(self._statistics.num_bytes),
        }

    def _publish(self, policy_version: int, *, is_due: bool) -> dict[str, float]:
        """Do what the scheduler asks for until every engine that answers serves the version; it bounds the attempts.

        Args: is_due: whether engines are sure to lack the version.
        """
        self._policy_version = policy_version
        while True:
            if is_due and self._sender is not None:
                self._wake()
                fault = self._sender.prepare(self._view, policy_version)  # engines go on sampling meanwhile
                if fault := self._link.first(fault or ""):
                    self._sender.discard()  # this rank may have written a file
                    raise TrainingError(f"the weights of policy_version {policy_version} are not pushed: {fault}")
            ask = PushRequest(policy_version=policy_version, has_group=self._sender is not None)
            answer = self._ask(ask, FormGroup | PushGo | PushDone)
            match answer:
                case FormGroup():
                    is_due = answer.is_push_due
                    answer = self._form_group(policy_version, answer.num_workers)
                case PushGo():
                    answer = self._send(policy_version)
            if isinstance(answer, PushDone):
                if self._sender is not None:
                    self._sender.discard()
                return answer.metrics
            if isinstance(answer, PushFailed):
                self._leave_group()

    def _form_group(self, policy_version: int, num_workers: int) -> Ack | PushFailed:
        """Open a new weight group and wait in it until the engines have come."""
        self._leave_group()
        limits = self._config.push
        self._store = host_store(self._host, timeout_s=limits.timeout_s) if world_rank() == 0 else None
        port = broadcast_object(self._store.port if self._store else 0)

        joining = _Joining(self._host, port, world_rank(), world_size() + num_workers, limits.backend, limits.timeout_s)
        opened = GroupOpen(policy_version=policy_version, master_address=self._host, master_port=port)
        answer = self._ask(opened, Ack | PushFailed)
        if isinstance(answer, Ack):
            self._group, fault = joining.result()
            if not self._link.first(fault):
                self._sender = make_sender(self._group, self._plan)
        return answer

    def _send(self, policy_version: int) -> PushDone | Ack | PushFailed:
        """Send all buckets and hear what the engines say."""
        fault = ""
        self._wake()
        try:
            self._statistics = self._sender.send(self._view, policy_version)
        except ProtocolError as error:
            fault = str(error)
            self._leave_group()  # wakes those that still wait for this rank
        fault = self._link.first(fault)
        return self._ask(PushSent(policy_version=policy_version, fault=fault), PushDone | Ack | PushFailed)

    def _leave_group(self) -> None:
        """Effect: whoever still waits in the group, or to join it, gets an error soon."""
        if self._sender is not None:
            self._sender.discard()
        if self._group is not None:
            self._group.close()
        self._group = self._sender = self._store = None

    def _view(self, item: WireItem) -> Tensor:
        """The rows of a wire item, which the plan may have cut out of a slice that this rank owns."""
        for piece in self._pieces.get(item.name, ()):
            if piece.is_whole or item.dim == piece.dim and 0 <= item.start - piece.start < piece.length:
                view = self._exporter.view(piece)
                if item.dim == WHOLE:
                    return view
                return view.narrow(item.dim, item.start - (0 if piece.is_whole else piece.start), item.length)
        raise KeyError(f"{item.name}: this rank does not own {item}")

    def _ask(self, message: PushRequest | GroupOpen | PushSent, expected: object) -> SchedulerMessage:
        return self._link.request(message, expected, timeout_s=longest_push_answer_s(self._config))


class _Joining:
    """This rank joins a weight group in a thread: it waits for the engines, which the message sent meanwhile calls."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, backend: str, timeout_s: float):
        self._timeout_s = timeout_s
        self._group: WeightGroup | None = None
        self._fault = f"trainer rank {rank} did not join the weight group within push.timeout_s = {timeout_s:g}"
        # A new thread would be on the first GPU, whatever this one is on.
        device = None if backend == "gloo" else f"cuda:{torch.cuda.current_device()}"
        join = partial(self._join, host, port, rank, world_size, backend, device)
        self._thread = threading.Thread(target=join, daemon=True)
        self._thread.start()

    def result(self) -> tuple[WeightGroup | None, str]:
        """The group, or None and why not."""
        self._thread.join(self._timeout_s)
        return self._group, "" if self._group else self._fault

    def _join(self, host: str, port: int, rank: int, world_size: int, backend: str, device: str | None) -> None:
        try:
            # As a client of the store on every rank: closing the store must wake this thread, too.
            self._group = weight_group(
                host, port, rank, world_size, backend=backend, timeout_s=self._timeout_s, device=device
            )
        except Exception as error:  # noqa: BLE001  reported by `result`, in the caller's thread
            self._fault = str(error)
