"""The weight group: one process group of all trainer ranks (first) and all engine workers (after them).

Owns: `host_store`, `weight_group`, `WeightGroup`. Invariants:
- torch.distributed's default group is neither used nor touched: inside vLLM it belongs to vLLM, in the trainer to
  Megatron;
- each wait ends after `timeout_s`; a peer that died or stays away becomes a ProtocolError;
- a loopback host keeps every socket on the loopback interface.
Imports torch only: works where Megatron is absent (engine) and where vLLM is absent (trainer).
"""

import ipaddress
import re
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_sao.errors import ConfigError, ProtocolError

BACKENDS = ("gloo", "nccl")


class WeightGroup:
    """A joined group. `rank` counts over trainers and engine workers together; tensors must lie on `device`."""

    def __init__(self, backend: dist.Backend, rank: int, world_size: int, device: torch.device, timeout_s: float):
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout_s = timeout_s
        self._backend = backend

    def broadcast(self, tensor: torch.Tensor, src_rank: int) -> None:
        """Fill `tensor` on every rank with what `src_rank` holds.

        Collective: every rank of the weight group calls this with equally sized, contiguous tensors.
        Raises: ProtocolError when a peer is gone or does not come within `timeout_s`.
        """
        options = dist.BroadcastOptions()
        options.rootRank = src_rank
        options.rootTensor = 0
        self._run(lambda: self._backend.broadcast([tensor], options), f"a broadcast from rank {src_rank}")

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """One row of integers from every rank, in rank order.

        Collective: every rank of the weight group calls this with equally long rows.
        Raises: ProtocolError as `broadcast` does.
        """
        mine = torch.tensor(row, dtype=torch.int64, device=self.device)
        rows = [torch.zeros_like(mine) for _ in range(self.world_size)]
        self._run(lambda: self._backend.allgather([rows], [mine]), "the answers of all ranks")
        return torch.stack(rows).tolist()

    def close(self) -> None:
        """Leave the group; waiting peers get an error. Effect: closes the sockets."""
        backend, self._backend = self._backend, None
        if backend is not None and hasattr(backend, "shutdown"):
            backend.shutdown()

    def _run(self, start, what: str) -> None:
        if self._backend is None:
            raise ProtocolError("the weight group was closed; join a new one before the next push")
        started = time.monotonic()
        try:
            start().wait(timedelta(seconds=self.timeout_s))
            if self.device.type == "cuda":  # NCCL: wait() orders streams only, the bytes arrive later
                torch.cuda.current_stream(self.device).synchronize()
        except RuntimeError as error:
            raise ProtocolError(
                f"the weight group broke after {time.monotonic() - started:.1f} s while rank {self.rank} of "
                f"{self.world_size} waited for {what} (limit push.timeout_s = {self.timeout_s:g}): "
                f"{_reason(error)}. A trainer rank or an engine died or does not take part."
            ) from error


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
        make = _gloo if backend == "gloo" else _nccl
        joined = make(dist.PrefixStore("weights", store), host, rank, world_size, timeout, device)
        group = WeightGroup(joined, rank, world_size, device, timeout_s)
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
    else:  # honours GLOO_SOCKET_IFNAME
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def _nccl(store, host: str, rank: int, world_size: int, timeout: timedelta, device: torch.device):
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
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
