"""One publication of new weights to every engine, from pause to resume.

Invariants:
- running requests are kept, never aborted: they wait through the push and go on under the new weights;
- the version is published last, after every engine received every tensor, and is read back;
- engines are resumed whatever happened (`end`), and no step of it waits without a bound.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from megatron_sao.errors import EngineError, ProtocolError
from megatron_sao.rollout.engine_pool import EnginePool


class Push:
    """The scheduler's side of one push: `open`, then `close` once the trainer has sent everything, `end` always."""

    def __init__(
        self,
        engines: EnginePool,
        *,
        policy_version: int,
        plan_hash: str,
        timeout_s: float,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Args:
            engines: every engine that serves.
            policy_version: the version being published.
            plan_hash: names the bucket plan the engines got at the start.
            timeout_s: longest wait for each part of the push.
            on_failure: called when receiving fails while the trainer is still sending.
        """
        self._engines = engines
        self.policy_version = policy_version
        self._info = {"policy_version": policy_version, "plan_hash": plan_hash}
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._loading: asyncio.Task[None] | None = None
        self._go_s = 0.0
        self._metrics: dict[str, float] = {}

    async def open(self) -> None:
        """Pause every engine and make it receive. Effect: engines wait for buckets when this returns."""
        began_s = time.monotonic()
        await self._bounded(self._engines.pause(), "pause")
        self._metrics["push/pause_s"] = time.monotonic() - began_s
        await self._bounded(self._engines.start_weight_update(), "start_weight_update")
        self._loading = asyncio.create_task(self._engines.update_weights(self._info))
        self._loading.add_done_callback(self._report_failure)
        self._go_s = time.monotonic()

    async def close(self) -> None:
        """All buckets are out: wait until they are loaded, publish the version and read it back."""
        sent_s = time.monotonic()
        self._metrics["push/transfer_s"] = sent_s - self._go_s
        await self._bounded(asyncio.shield(self._loading), "update_weights")
        await self._bounded(self._engines.finish_weight_update(self.policy_version), "finish_weight_update")
        held = await self._bounded(self._engines.weight_versions(), "weight_info")
        if any(version != self.policy_version for version in held):
            raise ProtocolError(f"version {self.policy_version} was published, but the engines report {held}")
        self._metrics["push/load_s"] = time.monotonic() - sent_s

    async def end(self) -> dict[str, float]:
        """Stop receiving, if it still does, and let requests go on. Returns push/* in seconds."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        began_s = time.monotonic()
        await self._bounded(self._engines.resume(), "resume")
        self._metrics["push/resume_s"] = time.monotonic() - began_s
        return self._metrics

    async def _bounded[T](self, call: Awaitable[T], what: str) -> T:
        try:
            return await asyncio.wait_for(call, self._timeout_s)
        except TimeoutError as error:
            raise EngineError(
                f"push of version {self.policy_version}: {what} took longer than push.timeout_s = {self._timeout_s:.0f}"
            ) from error

    def _report_failure(self, loading: asyncio.Task) -> None:
        if not loading.cancelled() and loading.exception() is not None:
            self._on_failure(loading.exception())
