"""The wish that a run save and end before its end: asked for once, never taken back."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from megatron_sao.errors import EngineError
from megatron_sao.records import StopWanted
from megatron_sao.rollout.engine_client import RequestRefused
from megatron_sao.schedule.race import first_of

log = logging.getLogger(__name__)


class StopWish:
    """Whether somebody wants the run to stop. Made and used inside one event loop.

    Args:
        heard_within_s: whoever ends a job tells all its processes, and engines on other hosts may end so much earlier
            than this process hears of it.
    """

    def __init__(self, heard_within_s: float = 2.0) -> None:
        self._heard_within_s = heard_within_s
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

    async def excuses(self, error: BaseException) -> bool:
        """Whether this is no failure, because the run shall stop. For one of the engines: or is told so in a moment."""
        if isinstance(error, EngineError) and not isinstance(error, RequestRefused):
            await asyncio.wait({self.wanted}, timeout=self._heard_within_s)
        return self.is_wanted

    async def unless[T](self, work: Callable[[], Awaitable[T]]) -> T | StopWanted:
        """The result of `work`; not begun, or given up, when a stop is wanted."""
        if self.is_wanted:
            return self.wanted.result()
        try:
            return await first_of(work(), self.wanted)
        except EngineError as error:
            if await self.excuses(error):
                return self.wanted.result()
            raise
