"""Typed records between trainer rank 0 and the scheduler, over one ZeroMQ connection.

Owns: both ends of the connection and the knowledge whether the other end is alive. Invariants:
- the trainer asks, the scheduler answers; each message gets exactly one answer, and an answer carries its number;
- one trainer per scheduler: the first one that says Hello. Anybody else gets Abort;
- nobody waits for a dead process. ZeroMQ's own I/O threads exchange heartbeats, so a trainer that computes for
  minutes stays alive in the scheduler's eyes, while a killed, stopped or unreachable one is noticed within
  HEARTBEAT_TIMEOUT_S. A lost connection is final: requests may have been lost with it, and a restart from a
  checkpoint is the way back.
No torch.
"""

import asyncio
import time

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message, recv_monitor_message

from megatron_sao.errors import ConfigError, ProtocolError
from megatron_sao.records import Abort, Goodbye, Hello, SchedulerMessage, TrainerMessage, decode, encode

HEARTBEAT_INTERVAL_S = 2.0
HEARTBEAT_TIMEOUT_S = 10.0


class TrainerLost(ProtocolError):
    """The trainer's process ended, or stopped answering."""


class TrainerChannel:
    """The trainer's end. Synchronous; used by trainer rank 0 alone and by one thread."""

    def __init__(self, address: str, *, timeout_s: float, connect_timeout_s: float = 60.0) -> None:
        """Args:
            address: "tcp://host:port" of the scheduler.
            timeout_s: longest wait for one answer, unless `request` is told another.
            connect_timeout_s: longest wait for the scheduler to be there at the first request.
        """
        self._address = address
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        _set_liveness(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._is_connected = False
        self._is_lost = False
        self._number = 0

    def request(self, message: TrainerMessage, *, timeout_s: float | None = None) -> SchedulerMessage:
        """Send one message and wait for its answer.

        Args:
            message: what to ask.
            timeout_s: longest wait for this answer; None = the channel's.

        Returns:
            The scheduler's answer, never an Abort.

        Raises:
            ProtocolError: the scheduler answered Abort (its reason is the message), died, was never there,
                did not answer in time, or answered something out of turn.
        """
        name = type(message).__name__
        self._wait_until_connected()
        self._number += 1
        self._socket.send_multipart([str(self._number).encode(), encode(message)])
        raw = self._wait_for_frames(name, self._timeout_s if timeout_s is None else timeout_s)
        answer = _decode(raw, SchedulerMessage, "scheduler")
        if isinstance(answer, Abort):
            raise ProtocolError(answer.reason)
        return answer

    def close(self) -> None:
        """Effect: closes the connection; messages not yet sent are given up."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    def _wait_until_connected(self) -> None:
        deadline = time.monotonic() + self._connect_timeout_s
        while not self._is_connected and not self._is_lost:
            if time.monotonic() > deadline:
                raise ProtocolError(
                    f"no scheduler answers at {self._address} after {self._connect_timeout_s:.0f} s; "
                    "is it running, and is this its address?"
                )
            self._monitor.poll(200)
            self._read_events()
        self._read_events()
        self._refuse_lost("is gone")

    def _wait_for_frames(self, name: str, timeout_s: float) -> bytes:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise ProtocolError(
                    f"the scheduler at {self._address} is alive but did not answer {name} within {timeout_s:.0f} s"
                )
            ready = dict(poller.poll(min(remaining_s, 1.0) * 1000))
            if self._socket in ready:  # before the events: an answer that arrived just before the end still counts
                number, raw = self._socket.recv_multipart()
                if int(number) != self._number:
                    raise ProtocolError(
                        f"the scheduler answered message {int(number)} while message {self._number} ({name}) waits"
                    )
                return raw
            if self._monitor in ready:
                self._read_events()
                if self._is_lost and not self._socket.poll(0):
                    self._refuse_lost(f"went away before it answered {name}")

    def _read_events(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self._is_connected |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            # Before the first handshake ZeroMQ may try and fail as often as it likes: the scheduler may start later.
            self._is_lost |= self._is_connected and event == zmq.EVENT_DISCONNECTED

    def _refuse_lost(self, what: str) -> None:
        if self._is_lost:
            raise ProtocolError(f"the scheduler at {self._address} {what}; its own log says why")


class SchedulerChannel:
    """The scheduler's end. Made and used inside one running event loop."""

    def __init__(self, host: str, port: int) -> None:
        """Args:
            host: address to listen on.
            port: port to listen on; 0 = any free one, see `address`.

        Raises:
            ConfigError: the address cannot be used (a port in use).
        """
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an answer to a peer that is gone raises, is not swallowed
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        _set_liveness(self._socket)
        try:
            self._socket.bind(tcp_address(host, port) if port else tcp_address(host, "*"))
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            self._context.term()
            raise ConfigError(
                f"the scheduler cannot listen on {host}:{port}: {error.strerror}; "
                "set schedule.port to a free port, or to 0 to let it choose"
            ) from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._trainer: bytes | None = None  # ZeroMQ identity of the one trainer
        self._trainer_fd: int | None = None
        self._closed_fds: set[int] = set()
        self._number: bytes | None = None  # of the message that waits for its answer
        self._inbox: asyncio.Queue[TrainerMessage | Exception] = asyncio.Queue()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # fails when the trainer dies
        self.lost.add_done_callback(_mark_retrieved)
        self._pump = asyncio.create_task(self._pump_forever())

    @property
    def is_asked(self) -> bool:
        """Whether a message of the trainer waits for its answer."""
        return self._number is not None

    async def receive(self) -> TrainerMessage:
        """The next message of the trainer. Does not watch `lost`: the caller races the two.

        Raises:
            ProtocolError: it was malformed, came before Hello, or before the last one was answered.
        """
        message = await self._inbox.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def answer(self, message: SchedulerMessage) -> None:
        """Answer the message received last. Raises ProtocolError when there is none, TrainerLost."""
        if self._number is None:
            raise ProtocolError(f"{type(message).__name__} answers nothing: no message of the trainer is open")
        number, self._number = self._number, None
        try:
            await self._socket.send_multipart([self._trainer, number, encode(message)])
        except zmq.ZMQError as error:
            raise TrainerLost(f"the trainer went away before it got {type(message).__name__}") from error

    async def close(self) -> None:
        """Effect: stops listening; answers already given still have two seconds to leave."""
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=2000)
        self._context.term()

    async def _pump_forever(self) -> None:
        poller = zmq.asyncio.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        try:
            while True:
                await poller.poll()
                # Events first: a descriptor seen as open here belongs to the peer whose message is read next.
                while await self._monitor.poll(0):
                    self._read_event(parse_monitor_message(await self._monitor.recv_multipart()))
                if await self._socket.poll(0):
                    await self._read_message(await self._socket.recv_multipart(copy=False))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a fault of this module must not become silence
            self._inbox.put_nowait(ProtocolError(f"the scheduler's channel failed: {error!r}"))

    def _read_event(self, event: dict) -> None:
        if event["event"] == zmq.EVENT_ACCEPTED:
            self._closed_fds.discard(event["value"])
            return
        self._closed_fds.add(event["value"])
        self._notice_loss()

    def _notice_loss(self) -> None:
        if self._trainer_fd in self._closed_fds and not self.lost.done():
            self.lost.set_exception(TrainerLost("the trainer went away: its process ended or stopped answering"))

    async def _read_message(self, frames: list[zmq.Frame]) -> None:
        identity, parts = frames[0].bytes, [frame.bytes for frame in frames[1:]]
        if self._trainer is not None and identity != self._trainer:
            await self._turn_away(identity, parts, "this scheduler already serves another trainer")
            return
        if len(parts) != 2:
            await self._turn_away(identity, parts, f"a message of {len(parts)} frames is not of this protocol")
            return
        number, raw = parts
        try:
            message = _decode(raw, TrainerMessage, "trainer")
        except ProtocolError as error:
            await self._turn_away(identity, parts, str(error))
            if self._trainer is not None:
                self._inbox.put_nowait(error)
            return
        if self._trainer is None:
            if not isinstance(message, Hello | Goodbye):
                await self._turn_away(identity, parts, f"{type(message).__name__} came before Hello")
                return
            self._trainer, self._trainer_fd = identity, frames[0].get(zmq.SRCFD)
            self._notice_loss()
        if self._number is not None:
            self._inbox.put_nowait(ProtocolError(f"{type(message).__name__} came before the last answer was given"))
            return
        self._number = number
        self._inbox.put_nowait(message)

    async def _turn_away(self, identity: bytes, parts: list[bytes], reason: str) -> None:
        try:
            await self._socket.send_multipart([identity, parts[0] if parts else b"0", encode(Abort(reason=reason))])
        except zmq.ZMQError:
            pass  # it has left already


def tcp_address(host: str, port: int | str) -> str:
    """ "tcp://host:port"; an IPv6 host gets its brackets, once."""
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"tcp://{host}:{port}"


def _set_liveness(socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_INTERVAL_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_TIMEOUT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TTL, int(HEARTBEAT_TIMEOUT_S * 1000))
    socket.setsockopt(zmq.SNDHWM, 0)  # one message is open at a time: there is nothing to hold back
    socket.setsockopt(zmq.RCVHWM, 0)


def _decode(raw: bytes, kind: type, sender: str) -> msgspec.Struct:
    try:
        return decode(raw, kind)
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise ProtocolError(
            f"the {sender} sent a message that does not fit the records of this version: {error}; "
            "do both processes run the same code?"
        ) from error


def _mark_retrieved(future: asyncio.Future) -> None:
    if not future.cancelled():
        future.exception()
