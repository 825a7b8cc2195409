"""Several engines behind one `generate`, and the steps of a weight push on all of them.

Owns: which engine may serve. Invariants:
- an engine serves new requests only while it is not fenced; it is fenced from the moment a weight update starts until
  that update has finished on it, and when an update has failed on it, until a whole later update has finished;
- a version is published (finish_weight_update) only after every engine has received everything;
- a step is tried on all engines before the first failure is reported, so that no engine is left out by a neighbour's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_sao.errors import EngineError, ProtocolError
from megatron_sao.rollout.engine_client import EngineClient, Sample


@dataclass
class _Slot:
    engine: EngineClient
    num_running: int = 0
    fenced_because: str = ""  # "" = serves
    is_updated: bool = False  # all weights of the current update have arrived


class EnginePool:
    """All engines of a run.

    Args:
        engines: at least one.
        wait_timeout_s: how long a request waits while every engine is fenced (a push) before it fails.
    """

    def __init__(self, engines: Sequence[EngineClient], *, wait_timeout_s: float = 120.0) -> None:
        if not engines:
            raise EngineError("no rollout engine was given; engine.count must be at least 1")
        self._slots = [_Slot(engine) for engine in engines]
        self._wait_timeout_s = wait_timeout_s
        self._serving = asyncio.Condition()

    @property
    def engines(self) -> list[EngineClient]:
        """The clients, in the order in which they were given."""
        return [slot.engine for slot in self._slots]

    @property
    def num_running(self) -> int:
        """Requests that are with an engine now."""
        return sum(slot.num_running for slot in self._slots)

    @property
    def fenced(self) -> dict[str, str]:
        """url -> reason of the engines that take no new requests."""
        return {slot.engine.url: slot.fenced_because for slot in self._slots if slot.fenced_because}

    def set_unnamed_version(self, policy_version: int) -> None:
        """Effect: says which policy_version the weights have that the engines were started with."""
        for slot in self._slots:
            slot.engine.unnamed_version = policy_version

    async def generate(self, token_ids: list[int], **settings: Any) -> Sample:
        """One sample from the engine with the fewest running requests; arguments as EngineClient.generate.

        Raises:
            EngineError: the engine failed, or all were fenced for `wait_timeout_s`.
        """
        slot = await self._free_slot()
        try:
            return await slot.engine.generate(token_ids, **settings)
        finally:
            slot.num_running -= 1

    async def _free_slot(self) -> _Slot:
        """Effect: counts a running request on the slot that it returns."""
        async with self._serving:
            try:
                await asyncio.wait_for(self._serving.wait_for(self._some_serve), self._wait_timeout_s)
            except asyncio.TimeoutError as error:
                raise EngineError(f"no engine took a request for {self._wait_timeout_s:g} s: {self.fenced}") from error
            slot = min((s for s in self._slots if not s.fenced_because), key=lambda s: s.num_running)
            slot.num_running += 1
            return slot

    def _some_serve(self) -> bool:
        return any(not slot.fenced_because for slot in self._slots)

    async def close(self) -> None:
        """Effect: closes all clients."""
        await asyncio.gather(*(slot.engine.close() for slot in self._slots))

    async def check_health(self) -> None:
        """Raises EngineError naming the engines that do not answer."""
        healthy = await asyncio.gather(*(slot.engine.is_healthy() for slot in self._slots))
        dead = [slot.engine.url for slot, is_healthy in zip(self._slots, healthy) if not is_healthy]
        if dead:
            raise EngineError(f"no answer from the engine at {', '.join(dead)}; its log is in the run folder")

    async def world_sizes(self) -> list[int]:
        """Workers of each engine, in the order of `engines`."""
        return await asyncio.gather(*(slot.engine.world_size() for slot in self._slots))

    async def weight_versions(self) -> list[int]:
        """The published policy_version of each engine, in the order of `engines`."""
        return await asyncio.gather(*(slot.engine.weight_version() for slot in self._slots))

    async def init_weight_transfer(self, init_infos: Sequence[dict[str, Any]]) -> None:
        """Effect: all engines join the weight group, each with its own info (rank_offset differs)."""
        info_of = {slot.engine.url: info for slot, info in zip(self._slots, init_infos, strict=True)}
        await self._on_all("join the weight group", lambda engine: engine.init_weight_transfer(info_of[engine.url]))

    async def pause(self) -> None:
        """Effect: running requests freeze on every engine."""
        await self._on_all("pause", lambda engine: engine.pause())

    async def resume(self) -> None:
        """Effect: requests go on, on every engine that is not fenced: weights in the middle of an update never run."""
        await self._on_all("resume", lambda engine: engine.resume(), [s for s in self._slots if not s.fenced_because])

    async def start_weight_update(self) -> None:
        """Effect: fences every engine and opens one update on each."""
        for slot in self._slots:
            slot.fenced_because, slot.is_updated = "a weight update is running", False
        await self._on_all("start a weight update", lambda engine: engine.start_weight_update(), fence=True)

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """Effect: every engine receives the whole push (the trainer broadcasts meanwhile)."""
        failed = await self._try_all(lambda engine: engine.update_weights(update_info), self._slots)
        for slot in self._slots:
            slot.is_updated = slot.engine.url not in failed
        self._report("receive weights", failed, fence=True)

    async def finish_weight_update(self, policy_version: int) -> None:
        """Effect: publishes `policy_version` on every engine and lifts its fence.

        Raises:
            ProtocolError: some engine has not received everything; then no engine publishes, all stay fenced, and
                the push must be repeated from start_weight_update.
            EngineError: an engine refused to finish; it stays fenced.
        """
        missing = [slot.engine.url for slot in self._slots if not slot.is_updated]
        if missing:
            raise ProtocolError(f"policy_version {policy_version} is not published: the engine at {', '.join(missing)} "
                                "has not received all weights; the whole push must be sent again")
        failed = await self._try_all(lambda engine: engine.finish_weight_update(policy_version), self._slots)
        async with self._serving:
            for slot in self._slots:
                slot.is_updated = False
                if slot.engine.url not in failed:
                    slot.fenced_because = ""
            self._serving.notify_all()
        self._report(f"publish policy_version {policy_version}", failed, fence=True)

    async def shutdown_weight_transfer(self) -> None:
        """Effect: all engines leave the weight group."""
        await self._on_all("leave the weight group", lambda engine: engine.shutdown_weight_transfer())

    async def _on_all(
        self, what: str, operation: Callable[[EngineClient], Awaitable[None]], slots: list[_Slot] | None = None,
        fence: bool = False,
    ) -> None:
        self._report(what, await self._try_all(operation, self._slots if slots is None else slots), fence)

    async def _try_all(
        self, operation: Callable[[EngineClient], Awaitable[None]], slots: list[_Slot]
    ) -> dict[str, BaseException]:
        """Runs the operation on all slots at once, waits for all, and returns url -> error of the failed ones."""
        results = await asyncio.gather(*(operation(slot.engine) for slot in slots), return_exceptions=True)
        return {s.engine.url: result for s, result in zip(slots, results) if isinstance(result, BaseException)}

    def _report(self, what: str, failed: dict[str, BaseException], fence: bool) -> None:
        if not failed:
            return
        if fence:
            for slot in self._slots:
                if slot.engine.url in failed:
                    slot.fenced_because = f"it failed to {what}"
        reasons = "; ".join(str(error) for error in failed.values())
        raise EngineError(f"{len(failed)} of {len(self._slots)} engines failed to {what}: {reasons}")
