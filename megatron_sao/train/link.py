"""The trainer's line to the scheduler: rank 0 speaks, every rank hears the answer, and a failure stops every rank."""

from collections.abc import Callable
from typing import Any

from megatron_sao.errors import ProtocolError, SaoError
from megatron_sao.parallel.exchange import ObjectGroup, world_rank
from megatron_sao.records import PushWanted, SchedulerMessage, StopWanted, TrainerMessage, decode, encode
from megatron_sao.transport.channel import TrainerChannel

MARGIN_S = 60.0  # the other ranks wait this much longer than rank 0 may


class StopAsked(Exception):
    """The scheduler wants the run to save and end here. Raised on every rank alike."""


class SchedulerLink:
    """Request and answer with the scheduler, as seen by all trainer ranks at once."""

    def __init__(self, address: str, longest_wait_s: float):
        """Collective: every rank of the world. Only rank 0 opens a connection.

        Args:
            address: "tcp://host:port" of the scheduler.
            longest_wait_s: bound of one answer, a batch included.
        """
        # A group of its own: waiting for a batch may take longer than any collective of the model is allowed to.
        self._group = ObjectGroup(longest_wait_s + MARGIN_S)
        self._channel = TrainerChannel(address, timeout_s=longest_wait_s) if world_rank() == 0 else None
        self.push_again: Callable[[], object] | None = None  # what to do when the scheduler wants a push first

    def request(self, message: TrainerMessage, expected: Any, timeout_s: float | None = None) -> Any:
        """Send `message` (rank 0's counts) and give every rank the answer.

        Args:
            expected: class of the answer, or several as A | B.
        Effect: when the scheduler wants weights pushed again before it can answer, does so.
        Raises: ProtocolError on every rank when the scheduler is gone, gave up, or answered something else; StopAsked
            when the answer is that the run shall end (only NeedBatch and EvalRequest are answered so).
        Collective: every rank of the world.
        """
        while isinstance(answer := self._ask(message, timeout_s), PushWanted) and self.push_again:
            self.push_again()
        if isinstance(answer, StopWanted):
            raise StopAsked(answer.reason)
        if not isinstance(answer, expected):
            names = getattr(expected, "__name__", expected)
            raise ProtocolError(
                f"the scheduler answered {type(answer).__name__} to {type(message).__name__}, not {names}"
            )
        return answer

    def first(self, fault: str) -> str:
        """The first rank's fault that is not empty, on every rank. Collective: every rank of the world."""
        return next(filter(None, self._group.gather(fault)), "")

    def close(self) -> None:
        """Effect: rank 0 closes its connection."""
        if self._channel is not None:
            self._channel.close()

    def _ask(self, message: TrainerMessage, timeout_s: float | None) -> SchedulerMessage:
        raw: bytes | str = b""
        if self._channel is not None:
            try:
                raw = encode(self._channel.request(message, timeout_s=timeout_s))
            except SaoError as error:
                raw = str(error)
        raw = self._group.broadcast(raw)
        if isinstance(raw, str):
            raise ProtocolError(raw)
        return decode(raw, SchedulerMessage)
