"""The weight group: one process group of all trainer ranks (first) and all engine workers (after them).

Owns: `host_store`, `weight_group`, `WeightGroup`, `Transfer`. Invariants:
- torch.distributed's default group is neither used nor touched: inside vLLM it belongs to vLLM, in the trainer to
  Megatron;
- each wait ends after `timeout_s` (in a push: all of them together); a peer that died or stays away becomes a
  ProtocolError, and the rank that gets it leaves the group, so that those who wait for it get one too;
- a loopback host keeps every socket on the loopback interface;
- `close` may come from any thread, also while another one begins or waits for a message: that one gets an error.
Imports torch only: works where Megatron is absent (engine) and where vLLM is absent (trainer).
"""

import ipaddress
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_sao.errors import ConfigError, ProtocolError

BACKENDS = ("gloo", "nccl")


class Transfer:
    """A message on its way; `wait` before its tensor is used again."""

    def __init__(self, group: "WeightGroup", work: dist.Work, what: str):
        self._group, self._what = group, what
        self._work: dist.Work | None = work  # held here alone: gloo closes no socket while somebody holds one

    def wait(self) -> None:
        """Raises: ProtocolError when the peer is gone or late."""
        self._group._finish(self, self._what)


class WeightGroup:
    """A joined group. `rank` counts over trainers and engine workers together; tensors must lie on `device`."""

    def __init__(
        self,
        backend: dist.Backend,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        make: Callable[[str, int, int], dist.Backend],
    ):
        """Args: make: (name, rank, size) -> a communicator of some of these processes."""
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout_s = timeout_s
        self._backend: dist.Backend | None = backend  # None = closed
        self._make = make
        self._deadline: float | None = None
        self._lock = threading.Lock()  # of what follows, and of the change to closed
        self._open: set[Transfer] = set()
        self._subgroups: list[WeightGroup] = []
        self._parent: WeightGroup | None = None

    @contextmanager
    def push_limit(self) -> Iterator[None]:
        """Within it, all waits together (of this group and its subgroups) end after `timeout_s`."""
        self._set_deadline(time.monotonic() + self.timeout_s)
        try:
            yield
        finally:
            self._set_deadline(None)

    def remaining_s(self) -> float:
        """Seconds that a wait may still take; never 0, which gloo takes for no limit."""
        left = self.timeout_s if self._deadline is None else self._deadline - time.monotonic()
        return max(left, 0.01)

    def broadcast(self, tensor: torch.Tensor, src_rank: int) -> None:
        """Fill `tensor` on every rank with what `src_rank` holds.

        Collective: every rank of the group calls this with equally sized, contiguous tensors.
        Raises: ProtocolError when a peer is gone or does not come within the limit.
        """
        options = dist.BroadcastOptions()
        options.rootRank = src_rank
        options.rootTensor = 0
        self._start(lambda backend: backend.broadcast([tensor], options), f"a broadcast from rank {src_rank}").wait()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` on every rank by the sum over all.

        Collective: every rank of the group calls this with equally sized, contiguous tensors.
        Raises: ProtocolError as `broadcast` does.
        """
        self._start(lambda backend: backend.allreduce([tensor], dist.AllreduceOptions()), "a sum over all ranks").wait()

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """One row of integers from every rank, in rank order.

        Collective: every rank of the group calls this with equally long rows.
        Raises: ProtocolError as `broadcast` does.
        """
        mine = torch.tensor(row, dtype=torch.int64, device=self.device)
        rows = [torch.zeros_like(mine) for _ in range(self.world_size)]
        self._start(lambda backend: backend.allgather([rows], [mine]), "the answers of all ranks").wait()
        return torch.stack(rows).tolist()

    def send(self, tensor: torch.Tensor, dst_rank: int, tag: int) -> Transfer:
        """Begin to send a contiguous tensor; `dst_rank` calls `receive` with the same tag."""
        return self._start(lambda backend: self._alone(backend, lambda: backend.send([tensor], dst_rank, tag)),
                           f"message {tag} to rank {dst_rank}")

    def receive(self, tensor: torch.Tensor, src_rank: int, tag: int) -> Transfer:
        """Begin to receive into a contiguous tensor."""
        return self._start(lambda backend: self._alone(backend, lambda: backend.recv([tensor], src_rank, tag)),
                           f"message {tag} from rank {src_rank}")

    def subgroup(self, name: str, ranks: Sequence[int]) -> "WeightGroup | None":
        """A communicator of some ranks, which count from 0 in it; closed with this group.

        Returns: None for one rank alone: it has nobody to talk to.
        Collective: the given ranks call this with equal arguments.
        """
        if len(ranks) == 1:
            return None
        rank = list(ranks).index(self.rank)
        started = time.monotonic()
        try:
            backend = self._make(name, rank, len(ranks))
        except RuntimeError as error:
            raise ProtocolError(f"rank {self.rank} could not join the group {name} of ranks {list(ranks)} "
                                f"({time.monotonic() - started:.1f} s): {_reason(error)}") from error
        group = WeightGroup(backend, rank, len(ranks), self.device, self.timeout_s, self._make)
        group._parent = self
        with self._lock:
            self._subgroups.append(group)
            is_closed = self._backend is None
        if is_closed:
            group.close()
        group.gather([rank])  # as in weight_group
        return group

    def close(self) -> None:
        """Leave the group; waiting peers get an error. Effect: closes the sockets."""
        with self._lock:
            backend, self._backend = self._backend, None
            subgroups = list(self._subgroups)
            while self._open:
                self._open.pop()._work = None
        for group in subgroups:
            group.close()
        if backend is None:
            return
        if self.device.type == "cuda":
            backend.abort()  # not shutdown: that waits for a kernel whose peer may be gone
        elif hasattr(backend, "shutdown"):
            backend.shutdown()

    def _set_deadline(self, deadline: float | None) -> None:
        self._deadline = deadline
        for group in self._subgroups:
            group._set_deadline(deadline)

    def _alone(self, backend: dist.Backend, start: Callable[[], dist.Work]) -> dist.Work:
        """NCCL makes one more communicator for each pair of ranks unless a message is part of a (coalesced) batch."""
        if self.device.type != "cuda":
            return start()
        backend._start_coalescing()
        start()
        return backend._end_coalescing()

    def _start(self, start: Callable[[dist.Backend], dist.Work], what: str) -> Transfer:
        backend = self._backend
        if backend is None:
            raise ProtocolError("the weight group was closed; join a new one before the next push")
        try:
            transfer = Transfer(self, start(backend), what)
        except RuntimeError as error:
            raise self._broken(what, 0.0, error) from error
        with self._lock:
            if self._backend is not None:
                self._open.add(transfer)
                return transfer
        transfer._work = None
        raise ProtocolError(f"the weight group was closed as {what} began")

    def _finish(self, transfer: Transfer, what: str) -> None:
        started = time.monotonic()
        with self._lock:
            is_open, work = transfer in self._open, transfer._work
        if not is_open:
            raise ProtocolError(f"the weight group was closed before {what} was over")
        try:
            if self.device.type == "cuda":
                self._poll(work)
            else:
                work.wait(timedelta(seconds=self.remaining_s()))
        except RuntimeError as error:
            del work  # the error holds this frame, see Transfer
            raise self._broken(what, time.monotonic() - started, error) from error
        with self._lock:
            self._open.discard(transfer)
            transfer._work = None

    def _poll(self, work: dist.Work) -> None:
        """Wait for the bytes themselves. NCCL's own wait orders streams only, and its watchdog ends the process."""
        limit = time.monotonic() + self.remaining_s()
        while not work.is_completed():
            if time.monotonic() > limit:
                raise RuntimeError("timed out")
            time.sleep(0.0002)
        work.wait()

    def _broken(self, what: str, waited_s: float, error: RuntimeError) -> ProtocolError:
        """The error to raise. Effect: leaves the group, so that ranks that wait for this one hear of it at once."""
        root = self._parent or self
        root.close()
        return ProtocolError(
            f"the weight group broke after {waited_s:.1f} s while rank {root.rank} of {root.world_size} waited for "
            f"{what} (limit push.timeout_s = {self.timeout_s:g}): {_reason(error)}. A trainer rank or an engine died "
            "or does not take part."
        )


def host_store(host: str, *, port: int = 0, timeout_s: float) -> dist.TCPStore:
    """Open the meeting point of a weight group: trainer rank 0 does this and announces `host` and `store.port`.

    The socket is bound to `host` alone (a plain TCPStore listens on every interface) and before the number is
    announced, so that nobody can take the port in between.

    Args: port: 0 = any free one.
    Returns: the store of ONE group; a group that broke is replaced by a new group on a new store.
    Raises: ConfigError when host or port cannot be bound.
    Effect: holds the port until the store is garbage.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port} for the weight group: {error.strerror}; give an address of "
                          "this machine and a free port (0 = pick one)") from error
    bound_port = listener.getsockname()[1]
    return dist.TCPStore(host, bound_port, is_master=True, wait_for_workers=False, use_libuv=True,
                         timeout=timedelta(seconds=timeout_s), master_listen_fd=listener.detach())


def weight_group(
    host: str,
    port: int,
    rank: int,
    world_size: int,
    *,
    backend: str = "gloo",
    timeout_s: float,
    store: dist.TCPStore | None = None,
    device: torch.device | str | None = None,
) -> WeightGroup:
    """Join the weight group that meets at host:port.

    Args:
        rank: trainer ranks are 0 .. num_trainer_ranks - 1, engine workers follow.
        store: what `host_store` gave; on trainer rank 0 only.
        device: where the buffers lie; default: cpu for gloo, the current CUDA device for nccl.
    Returns: the group, once all `world_size` ranks have joined.
    Raises: ConfigError for a bad argument, ProtocolError when the others do not come within `timeout_s`.
    Collective: every rank of the weight group calls this.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"push.backend = {backend!r} is unknown; use {' or '.join(BACKENDS)}")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} does not exist in a weight group of {world_size}")
    timeout = timedelta(seconds=timeout_s)
    default_device = "cpu" if backend == "gloo" else f"cuda:{torch.cuda.current_device()}"
    device = torch.device(device or default_device)
    started = time.monotonic()
    try:
        if store is None:
            store = dist.TCPStore(host, port, is_master=False, timeout=timeout)

        def make(name: str, rank: int, size: int) -> dist.Backend:
            """Holds the store: on trainer rank 0 it must live as long as somebody may still come."""
            join = _gloo if backend == "gloo" else _nccl
            return join(dist.PrefixStore(name, store), host, rank, size, timeout, device)

        group = WeightGroup(make("weights", rank, world_size), rank, world_size, device, timeout_s, make)
        group.gather([rank])  # NCCL connects at its first collective only: do it here, where a failure is explained
    except (RuntimeError, ProtocolError) as error:  # torch's DistError family derives from RuntimeError
        raise ProtocolError(
            f"rank {rank} could not join the weight group of {world_size} at {host}:{port} "
            f"({time.monotonic() - started:.1f} s, limit push.timeout_s = {timeout_s:g}): {_reason(error)}"
        ) from error
    return group


def _gloo(store, host: str, rank: int, world_size: int, timeout: timedelta, device: torch.device):
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    if _is_loopback(host):
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    elif names := os.environ.get("GLOO_SOCKET_IFNAME"):  # which a group made by hand does not look at
        options._devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]
    else:
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def _nccl(store, host: str, rank: int, world_size: int, timeout: timedelta, device: torch.device):
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout  # of NCCL's watchdog, which ends the process: `_poll` gives up before
    torch.cuda.set_device(device)
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _reason(error: BaseException) -> str:
    """The first line of an error, without gloo's source positions and advice."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[\S*\.cc:\d+\] ", "", line).split(". This is typically caused")[0]
