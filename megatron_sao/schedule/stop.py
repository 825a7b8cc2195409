"""The wish that a run save and end before its end: asked for once, never taken back."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from megatron_sao.records import StopWanted
from megatron_sao.schedule.race import first_of

log = logging.getLogger(__name__)


class StopWish:
    """Whether somebody wants the run to stop. Made and used inside one event loop."""

    def __init__(self) -> None:
        self.wanted: asyncio.Future[StopWanted] = asyncio.get_running_loop().create_future()

    @property
    def is_wanted(self) -> bool:
        """Whether it was asked for."""
        return self.wanted.done()

    def ask(self, reason: str) -> None:
        """Effect: from now on the run shall save and end. Only the first one's reason counts."""
        if not self.is_wanted:
            log.info("the run shall save and end: %s", reason)
            self.wanted.set_result(StopWanted(reason=reason))

    async def unless[T](self, work: Callable[[], Awaitable[T]]) -> T | StopWanted:
        """The result of `work`; not begun, or given up, when a stop is wanted."""
        return self.wanted.result() if self.is_wanted else await first_of(work(), self.wanted)
