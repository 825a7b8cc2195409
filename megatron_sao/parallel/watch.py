"""Notices, within a stated time and whatever this rank is doing, that another rank or its host is gone.

A rank that waits in a collective for a peer that vanished without a word (a cut cable, a host without power) hears
nothing: gloo and NCCL wait for their timeout, and then do not say who is missing. So each rank holds one connection to
rank 0 on which nothing travels but a greeting and a farewell, and a thread listens to it. The kernels of the two hosts
probe it (TCP keepalive), however busy the processes are. Invariants:
- a host that is silent for `lost_after_s` cannot be reached; a connection that closes without a farewell is a rank that
  ended before its time; either one is a loss, and the loss of one rank is the loss of all: rank 0 tells the others;
- after a farewell nothing that happens to the other end is a loss.
It watches whether hosts and processes live, not whether they make progress: that is what the timeouts of collectives
are for.
"""

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from megatron_sao.errors import ProtocolError

_NUM_PROBES = 4
_MAX_GREETING_BYTES = 4096
_FAREWELL = "farewell"
_LOSS = "loss"


class PeerWatch:
    """The connections of this rank. `close` it when the run is over."""

    def __init__(
        self, host: str, *, join_timeout_s: float, lost_after_s: float, on_loss: Callable[[str], None]
    ) -> None:
        """Meet the other ranks of the torchrun world. Collective: every rank of the world, before anything else.

        Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun sets.

        Args:
            host: address of rank 0 that all ranks can reach; the others' does not matter.
            join_timeout_s: time until all ranks have come.
            lost_after_s: silence of a host after which it counts as gone; at least 6.
            on_loss: called once, in a thread of the watch, with what a person shall read; should end the process.
        Raises: ProtocolError when a rank does not come.
        """
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._lost_after_s, self._on_loss = lost_after_s, on_loss
        self._hosts: dict[int, str] = {self._rank: socket.gethostname()}
        self._peers: dict[int, _Peer] = {}  # by rank; without those that said farewell
        self._is_closed = False
        if self._size == 1:
            return
        if self._rank == 0:
            self._welcome_all(host, join_timeout_s)
        else:
            self._greet_rank_0(join_timeout_s)
        threading.Thread(target=self._listen, name="peer-watch", daemon=True).start()

    def close(self, fault: str = "") -> None:
        """Say farewell; `fault` = why this rank ends before the run is over, which the others then hear."""
        self._is_closed = True
        for peer in list(self._peers.values()):
            peer.send({_LOSS: f"{self._name(self._rank)} failed: {fault}"} if fault else {_FAREWELL: True})

    # ---- meeting ------------------------------------------------------------------------------------------------

    def _welcome_all(self, host: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=self._size) as server:
            store = _open_store(timeout_s)
            store.set("address", json.dumps(server.getsockname()[:2]))
            while len(self._peers) < self._size - 1:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    self._greet(server.accept()[0])
                except TimeoutError:
                    missing = ", ".join(str(rank) for rank in range(1, self._size) if rank not in self._peers)
                    raise ProtocolError(
                        f"rank {missing} of the trainer has not come within parallel.join_timeout_s ="
                        f" {timeout_s:.0f} s; its log says why"
                    ) from None

    def _greet_rank_0(self, timeout_s: float) -> None:
        try:
            address, port = json.loads(_open_store(timeout_s).get("address"))
            self._greet(socket.create_connection((address, port), timeout=timeout_s))
            if not self._peers:
                raise ConnectionError(f"{address}:{port} closed the connection")
        except (dist.DistError, OSError) as error:
            raise ProtocolError(
                f"rank 0 of the trainer cannot be reached within parallel.join_timeout_s = {timeout_s:.0f} s; its log"
                f" says why ({str(error).splitlines()[0]})"
            ) from error

    def _greet(self, connection: socket.socket) -> None:
        """Exchange names. Effect: the peer is watched from now on, if it is one of ours."""
        peer = _Peer(connection, self._lost_after_s)
        peer.send({"rank": self._rank, "host": self._hosts[self._rank]})
        if greeting := peer.greeting():
            self._hosts[greeting["rank"]] = greeting["host"]
            self._peers[greeting["rank"]] = peer

    # ---- watching -----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer.connection, selectors.EVENT_READ, rank)
            while self._peers:
                for key, _ in selector.select():
                    loss, has_left = self._hear(key.data)
                    if loss and not self._is_closed:
                        for peer in self._peers.values():
                            peer.send({_LOSS: loss})
                        self._on_loss(loss)
                        return
                    if loss or has_left:
                        selector.unregister(key.fileobj)
                        del self._peers[key.data]

    def _hear(self, rank: int) -> tuple[str, bool]:
        """(what is lost and why, or "" when nothing is; whether the rank said farewell)"""
        name = self._name(rank)
        try:
            messages = self._peers[rank].receive()
        except ConnectionResetError:
            messages = None
        except OSError as error:
            return (
                f"{name} cannot be reached from {self._name(self._rank)}: no answer for {self._lost_after_s:.0f} s"
                f" (parallel.lost_after_s; {error.strerror}); is that host up, and the network between the two?"
            ), False
        if messages is None:
            return f"{name} ended before the run was over; its own log says why", False
        said = {key: value for message in messages for key, value in message.items()}
        return said.get(_LOSS, ""), _FAREWELL in said

    def _name(self, rank: int) -> str:
        return f"rank {rank} of the trainer (host {self._hosts[rank]})"


class _Peer:
    """One connection, on which either side says JSON objects, a line each."""

    def __init__(self, connection: socket.socket, lost_after_s: float):
        self.connection = connection
        self._begun = b""  # of a line
        connection.settimeout(lost_after_s)
        interval_s = max(1, int(lost_after_s / (_NUM_PROBES + 2)))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2 * interval_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(lost_after_s * 1000))

    def send(self, message: dict) -> None:
        """Effect: sends it, or nothing when the other end is gone: whoever receives notices."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict] | None:
        """What has arrived as a whole; None when the other end is closed. Raises: OSError."""
        received = self.connection.recv(65536)
        *lines, self._begun = (self._begun + received).split(b"\n")
        return [json.loads(line) for line in lines] if received else None

    def greeting(self) -> dict | None:
        """The other's name; None when it is none of ours. What it said next is still there for `receive`."""
        line = b""
        try:
            while not line.endswith(b"\n"):
                received = self.connection.recv(1)
                if not received or len(line) == _MAX_GREETING_BYTES:
                    return None
                line += received
            message = json.loads(line)
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) and {"rank", "host"} <= message.keys() else None


def is_broken_collective(error: BaseException) -> bool:
    """Whether a collective failed because of another rank or the network, as gloo, NCCL and the store report it."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def _open_store(timeout_s: float) -> dist.Store:
    """The store in which ranks find each other: torchrun's, on host 0."""
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    return dist.PrefixStore("peer-watch", store)
