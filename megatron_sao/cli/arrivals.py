"""The engines of a run as they arrive: named on the command line, or registered in the run folder, now or later."""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_sao.cli.run_folder import engine_file, registered_url
from megatron_sao.config import Config
from megatron_sao.errors import EngineError
from megatron_sao.rollout.engine_client import EngineClient
from megatron_sao.rollout.engine_pool import EnginePool

LOOK_EVERY_S = 0.2
LATE_LOOK_EVERY_S = 2.0

log = logging.getLogger(__name__)


class RunEngines:
    """The pool of a run, and who is still missing in it. Made and used inside one event loop."""

    def __init__(self, config: Config, run_folder: Path, urls: Sequence[str]) -> None:
        """Args:
            run_folder: where engines register, each with its number.
            urls: addresses of all engines; empty = they register.
        """
        self._engine, self._push = config.engine, config.push
        self._run_folder = run_folder
        self._pushes_s = 2 * self._push.attempts * self._push.timeout_s  # that a request may have to wait through
        self._unregistered = [] if urls else list(range(self._engine.count))
        self._late: asyncio.Task[None] | None = None
        start_timeout_s = self._engine.start_timeout_s
        self.pool = EnginePool(
            [self._client(url) for url in urls],
            wait_timeout_s=start_timeout_s + self._pushes_s,
            return_timeout_s=start_timeout_s,
        )

    async def wait(self) -> None:
        """Return when all engines answer, or after engine.start_timeout_s when some do: the others may join later.

        Raises: EngineError when none answers by then.
        """
        deadline = time.monotonic() + self._engine.start_timeout_s
        while True:
            self._look()
            answering = await self.pool.answering()
            absent = [f"the engine at {engine.url}" for engine in self.pool.engines if engine.url not in answering]
            absent += [f"engine {n} (no {engine_file(self._run_folder, n)})" for n in self._unregistered]
            if not absent:
                return
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(LOOK_EVERY_S)
        if not answering:
            raise EngineError(f"no answer from {', '.join(absent)}; its log is in the run folder")
        log.warning("the run begins without %s", ", ".join(absent))
        self._late = asyncio.create_task(self._look_for_late_ones())

    async def close(self) -> None:
        """Effect: closes all connections."""
        if self._late:
            self._late.cancel()
        await self.pool.close()

    def _client(self, url: str) -> EngineClient:
        timeout_s = self._engine.request_timeout_s + self._pushes_s
        return EngineClient(url, request_timeout_s=timeout_s, push_timeout_s=self._push.timeout_s)

    def _look(self) -> None:
        for number in list(self._unregistered):
            if url := registered_url(self._run_folder, number):
                log.info("engine %d is at %s", number, url)
                self._unregistered.remove(number)
                self.pool.add(self._client(url))

    async def _look_for_late_ones(self) -> None:
        while self._unregistered:
            await asyncio.sleep(LATE_LOOK_EVERY_S)
            self._look()
