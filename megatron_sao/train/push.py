"""Pushes the policy's weights to every engine: announced to the scheduler, sent by the ranks that own them."""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from megatron_sao.config import Config
from megatron_sao.convert.family import ModelShape
from megatron_sao.convert.slices import WeightSlice
from megatron_sao.errors import ProtocolError
from megatron_sao.models.weights import Exporter
from megatron_sao.parallel.exchange import broadcast_object, world_rank, world_size
from megatron_sao.records import Hello, PushDone, PushGo, PushRequest, PushSent, Welcome
from megatron_sao.train.link import SchedulerLink
from megatron_sao.transport.disk import make_sender
from megatron_sao.transport.engine_layout import WHOLE, EngineLayout
from megatron_sao.transport.group import WeightGroup, host_store, weight_group
from megatron_sao.transport.plan import PushPlan, WireItem, encode_plan, make_plan
from megatron_sao.transport.sender import WeightSender


def wire_item(piece: WeightSlice) -> WireItem:
    """A slice as the wire names it."""
    if piece.is_whole:
        return WireItem(piece.hf_name, piece.dtype, piece.full_shape)
    return WireItem(piece.hf_name, piece.dtype, piece.full_shape, piece.dim, piece.start, piece.length)


def engine_layout(config: Config, shape: ModelShape) -> EngineLayout:
    """How the workers of one engine share the policy."""
    return EngineLayout(
        num_workers=config.engine.tensor_parallel,
        num_kv_heads=0 if shape.mla else shape.num_kv_groups,
        num_experts=shape.num_experts,
    )


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
    ):
        """Make the plan; no engine is contacted yet.

        Args:
            names: HF name -> shape of every tensor the engines expect; the plan must cover exactly these.
            host: address of trainer rank 0 that the engines can reach.
            excluded: HF names that the engines' folder holds and no push delivers.
        Collective: every rank of the world.
        """
        self._exporter, self._config, self._link, self._host = exporter, config, link, host
        self._plan = push_plan(exporter.slices_by_rank, exporter.shape, config, names, excluded)
        self._pieces: dict[str, list[WeightSlice]] = {}
        for piece in exporter.slices_by_rank[world_rank()]:
            self._pieces.setdefault(piece.hf_name, []).append(piece)
        self._sender: WeightSender | None = None

    def connect(self, policy_version: int) -> Welcome:
        """Meet the engines in the weight group. Collective: every rank of the world; the engines join meanwhile."""
        rank, num_ranks, limits = world_rank(), world_size(), self._config.push
        store = host_store(self._host, timeout_s=limits.timeout_s) if rank == 0 else None
        port = broadcast_object(store.port if store else 0)
        num_workers = self._config.engine.count * self._config.engine.tensor_parallel
        joined: list[WeightGroup | Exception] = []

        def join() -> None:  # in a thread: it blocks until the engines come, which the Hello below asks them to do
            try:
                group = weight_group(
                    self._host,
                    port,
                    rank,
                    num_ranks + num_workers,
                    backend=limits.backend,
                    timeout_s=limits.timeout_s,
                    store=store,
                )
                joined.append(group)
            except Exception as error:  # noqa: BLE001  raised again below, in the caller's thread
                joined.append(error)

        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        hello = Hello(
            policy_version=policy_version,
            num_trainer_ranks=num_ranks,
            master_address=self._host,
            master_port=port,
            plan=encode_plan(self._plan),
            plan_hash=self._plan.hash,
        )
        welcome = self._link.request(hello, Welcome, timeout_s=limits.timeout_s + 30)
        thread.join(limits.timeout_s)
        if not joined or isinstance(joined[0], Exception):
            reason = joined[0] if joined else "timeout"
            raise ProtocolError(f"trainer rank {rank} did not join the weight group: {reason}")
        self._sender = make_sender(joined[0], self._plan)
        return welcome

    def push(self, policy_version: int) -> dict[str, float]:
        """Publish the current weights as `policy_version`; engines keep their requests and continue under it.

        Returns: seconds of pause, transfer, load and resume as the scheduler saw them, and the trainer's own.
        Raises: ProtocolError when an engine lacks a tensor, got one twice or died; the version is then not published.
        Collective: every rank of the world.
        """
        if self._sender is None:
            raise ProtocolError("push before connect: call Pusher.connect once first")
        started = time.monotonic()
        limit = self._config.push.timeout_s
        self._sender.prepare(self._view, policy_version)  # before the engines are asked to pause
        self._link.request(PushRequest(policy_version=policy_version), PushGo, timeout_s=limit)
        statistics = self._sender.send(self._view, policy_version)
        done = self._link.request(PushSent(policy_version=policy_version), PushDone, timeout_s=limit)
        return {
            **done.metrics,
            "push/send_s": statistics.seconds,
            "push/total_s": time.monotonic() - started,
            "push/bytes": float(statistics.num_bytes),
        }

    def _view(self, item: WireItem) -> torch.Tensor:
        """The rows of a wire item, which the plan may have cut out of a slice that this rank owns."""
        for piece in self._pieces.get(item.name, ()):
            if piece.is_whole or item.dim == piece.dim and 0 <= item.start - piece.start < piece.length:
                view = self._exporter.view(piece)
                if item.dim == WHOLE:
                    return view
                return view.narrow(item.dim, item.start - (0 if piece.is_whole else piece.start), item.length)
        raise KeyError(f"{item.name}: this rank does not own {item}")
