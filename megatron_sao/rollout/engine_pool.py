"""Several engines behind one `generate`, and the steps of a weight push on those of them that take part in it.

Owns: which engine may serve. Each engine is in one of three states:

    serves   answers, and holds weights that are whole and of the version that it claims
    fenced   answers, but gets no requests: a push is under way on it, has failed on it, or has not reached it yet
    out      does not answer in time; what it was working on is asked of others

Invariants:
- an engine is fenced from the moment a weight update starts on it until a whole update has finished on it, and resumed
  only then: half-updated weights never run, whoever started the update and whatever became of him;
- a version is published (finish_weight_update) only after every engine of the push has received everything;
- a request is lost only when no engine serves for `wait_timeout_s`: one whose engine fails is asked again of another;
- a step is tried on all engines of the push before the first failure is reported.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_sao.errors import EngineError, ProtocolError, SaoError
from megatron_sao.rollout.engine_client import EngineClient, RequestRefused, Sample

MAX_FAILURES = 5  # of one request, each on an engine that was then taken out
PROBE_TIMEOUT_S = 5.0  # for an engine that is out: mostly nobody is there
PROBE_INTERVAL_S = 1.0  # between two looks when no engine answers

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Slot:
    engine: EngineClient
    fenced_because: str = "it has not been asked for its weights yet"  # "" = serves
    answers: bool = False
    version: int = -1  # what it published last, as far as is known
    has_our_push: bool = False  # its last published version came from this pool; else from who knows where
    num_workers: int = 0
    is_joined: bool = False  # in the weight group, as far as is known
    num_failures_alone: int = 0  # pushes to this engine alone that failed, since it last served
    is_updated: bool = False  # all weights of the current update have arrived
    requests: set[asyncio.Future] = field(default_factory=set)  # with the engine now


class EnginePool:
    """All engines of a run. None serves before the first `survey`.

    Args:
        engines: those whose addresses are known; they themselves may come and go, and more may be added.
        wait_timeout_s: how long a request waits while no engine serves before it fails.
        return_timeout_s: how long an engine may take to come back when none answers.
    """

    def __init__(
        self, engines: Sequence[EngineClient], *, wait_timeout_s: float = 120.0, return_timeout_s: float = 120.0
    ) -> None:
        self._slots = [_Slot(engine) for engine in engines]
        self._members: list[_Slot] = []  # of the weight group, in the order of their ranks
        self._wait_timeout_s = wait_timeout_s
        self._return_timeout_s = return_timeout_s
        self._changed = asyncio.Condition()  # some engine began or ceased to serve
        self.num_reissued = 0  # requests that were asked again of another engine
        self.num_taken_out = 0  # times that an engine ceased to answer

    @property
    def engines(self) -> list[EngineClient]:
        """The clients, in the order in which they were given."""
        return [slot.engine for slot in self._slots]

    @property
    def num_running(self) -> int:
        """Requests that are with an engine now."""
        return sum(len(slot.requests) for slot in self._slots)

    @property
    def num_serving(self) -> int:
        """Engines that take requests."""
        return sum(not slot.fenced_because for slot in self._slots)

    @property
    def fenced(self) -> dict[str, str]:
        """url -> reason of the engines that take no new requests, those that are out included."""
        return {slot.engine.url: slot.fenced_because for slot in self._slots if slot.fenced_because}

    def add(self, engine: EngineClient) -> None:
        """Effect: one more engine, which the next push takes in."""
        self._slots.append(_Slot(engine))

    async def close(self) -> None:
        """Effect: closes all clients."""
        await asyncio.gather(*(slot.engine.close() for slot in self._slots))

    # ---- requests ----------------------------------------------------------------------------------------------

    async def generate(self, token_ids: list[int], **settings: Any) -> Sample:
        """One sample from the engine with the fewest running requests; arguments as EngineClient.generate.

        Raises:
            RequestRefused: the request is at fault, not an engine.
            EngineError: no engine served for `wait_timeout_s`, or `MAX_FAILURES` engines failed at this one request:
                then it is the request that takes engines out.
        """
        num_failures = 0
        while True:
            slot = await self._free_slot()
            version = slot.version
            request = asyncio.ensure_future(slot.engine.generate(token_ids, **settings))
            slot.requests.add(request)
            fault = ""
            try:
                sample = await request
                if sample.version_spans[0].policy_version >= version:
                    return sample
                fault = f"it holds older weights than version {version}: it was started again"
            except RequestRefused:
                raise
            except EngineError as error:
                fault = str(error)
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling():
                    raise
                # Otherwise the engine was taken out, which cancels what runs there.
            finally:
                slot.requests.discard(request)
            self.num_reissued += 1
            if fault and not slot.fenced_because:
                await self._take_out(slot, fault)
            num_failures += bool(fault)
            if num_failures == MAX_FAILURES:
                raise EngineError(
                    f"{num_failures} engines failed one after the other at the same request of {len(token_ids)} tokens;"
                    f" the last said: {fault} (a generation may take engine.request_timeout_s)"
                )

    async def _free_slot(self) -> _Slot:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self.num_serving), self._wait_timeout_s)
            except asyncio.TimeoutError as error:
                reasons = self._reasons()
                raise EngineError(f"no engine took a request for {self._wait_timeout_s:g} s: {reasons}") from error
            return min((slot for slot in self._slots if not slot.fenced_because), key=lambda slot: len(slot.requests))

    # ---- who serves --------------------------------------------------------------------------------------------

    async def answering(self) -> list[str]:
        """The urls of the engines that say that they are well, now."""
        are_healthy = await asyncio.gather(*(slot.engine.is_healthy() for slot in self._slots))
        return [slot.engine.url for slot, is_healthy in zip(self._slots, are_healthy) if is_healthy]

    async def survey(self, policy_version: int, *, ask_absent: bool = True) -> None:
        """Ask every engine what it holds; wait until at least one answers.

        Args: ask_absent: False = those that are out are asked only if no other answers; asking costs time.
        Effect: those that do not answer are out. One that was out or fenced serves (again) if its weights are whole and
        those of `policy_version`, which this pool pushed or the engine started with; one that was started again is
        fenced.
        Raises: EngineError when none answers for `return_timeout_s`.
        """
        deadline = asyncio.get_running_loop().time() + self._return_timeout_s
        while True:
            asked = [slot for slot in self._slots if slot.answers or ask_absent]
            await asyncio.gather(*(self._ask(slot, policy_version) for slot in asked))
            ask_absent = True
            if any(slot.answers for slot in self._slots):
                return
            if asyncio.get_running_loop().time() > deadline:
                raise EngineError(f"no engine answers, and none came back within engine.start_timeout_s = "
                                  f"{self._return_timeout_s:g}: {self._reasons()}")
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def all_fenced(self, policy_version: int) -> None:
        """Return when no engine serves but one answers, which lacks `policy_version`. Raises: as `survey`."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.num_serving)
            await self.survey(policy_version)
            if not self.num_serving:
                return

    def serves(self, policy_version: int) -> bool:
        """Whether some engine takes requests with these weights."""
        return any(not slot.fenced_because and slot.version == policy_version for slot in self._slots)

    async def give_up_on(self, engines: Sequence[EngineClient]) -> None:
        """Effect: these engines are out until a later push reaches them."""
        for slot in self._slots:
            if slot.engine in engines:
                await self._take_out(slot, slot.fenced_because or f"no push reached it at version {slot.version}")

    async def _ask(self, slot: _Slot, policy_version: int) -> None:
        engine = slot.engine
        limit_s = None if slot.answers else PROBE_TIMEOUT_S
        try:
            # The answer to is_paused comes from the process that computes, behind whatever that is busy with.
            is_paused = await engine.is_paused(limit_s)
            version = await engine.weight_version(limit_s)
            slot.num_workers = await engine.world_size(limit_s)
        except SaoError as error:
            if slot.answers or not slot.fenced_because:
                await self._take_out(slot, str(error))
            else:
                slot.fenced_because = str(error)
            return
        slot.answers = True
        if not slot.fenced_because and version != slot.version:
            await self._take_out(slot, f"it reports version {version}, not {slot.version}: it was started again")
            slot.answers = True
        elif slot.fenced_because and not is_paused and version == policy_version:
            # Weights in the middle of an update are those of a paused engine. An equal number says nothing of weights
            # that another run, or another attempt of this one, has pushed; version 0 is what an engine starts with.
            if slot.has_our_push or version == 0:
                await self._admit([slot], policy_version)
            else:
                slot.fenced_because = f"its version {version} was pushed before this run began"
        slot.version = version

    async def _admit(self, slots: Sequence[_Slot], policy_version: int) -> None:
        async with self._changed:
            for slot in slots:
                slot.fenced_because, slot.version, slot.num_failures_alone = "", policy_version, 0
            self._changed.notify_all()

    async def _take_out(self, slot: _Slot, reason: str) -> None:
        """Effect: the engine gets no requests, and those that it has are asked again of others."""
        log.warning("the engine at %s is taken out: %s", slot.engine.url, reason)
        self.num_taken_out += 1
        slot.answers = slot.is_joined = False
        async with self._changed:
            slot.fenced_because = reason
            self._changed.notify_all()
        for request in list(slot.requests):
            request.cancel()

    def _reasons(self) -> str:
        return "; ".join(f"{url}: {reason}" for url, reason in self.fenced.items())

    # ---- one push ----------------------------------------------------------------------------------------------

    def lacking(self, policy_version: int) -> list[EngineClient]:
        """Engines that answered the last survey and do not serve `policy_version`."""
        return [s.engine for s in self._slots if s.answers and (s.fenced_because or s.version != policy_version)]

    @property
    def present(self) -> list[EngineClient]:
        """Engines that answered the last survey."""
        return [slot.engine for slot in self._slots if slot.answers]

    def failures_alone(self, engine: EngineClient) -> int:
        """How often a push to this engine alone has failed since it last served."""
        return next(slot.num_failures_alone for slot in self._slots if slot.engine is engine)

    def note_failure_alone(self, engine: EngineClient) -> None:
        """Effect: counts one more."""
        for slot in self._slots:
            slot.num_failures_alone += slot.engine is engine

    def newest_version(self) -> tuple[int, str]:
        """The highest version that an engine reported in the last survey, and the url of that engine."""
        return max((slot.version, slot.engine.url) for slot in self._slots if slot.answers)

    def num_workers(self, engines: Sequence[EngineClient]) -> int:
        """Workers of these engines together, as of the last survey."""
        return sum(slot.num_workers for slot in self._slots if slot.engine in engines)

    def is_group(self, engines: Sequence[EngineClient]) -> bool:
        """Whether the weight group consists of exactly these engines, and none has been out since it was formed."""
        members = [slot.engine for slot in self._members]
        return members == list(engines) and all(slot.is_joined for slot in self._members)

    async def join(self, engines: Sequence[EngineClient], first_rank: int, info: dict[str, Any]) -> None:
        """Effect: these engines form the weight group, and no others: first_rank is that of their first worker.

        Raises: EngineError as soon as one cannot join; the others come back when the trainer has given up waiting.
        """
        self.leave()
        members = [slot for slot in self._slots if slot.engine in engines]
        joining = []
        for slot in members:
            joining.append(asyncio.ensure_future(slot.engine.init_weight_transfer(info | {"rank_offset": first_rank})))
            first_rank += slot.num_workers
        try:
            done, _ = await asyncio.wait(joining, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in joining:
                task.cancel()
            await asyncio.gather(*joining, return_exceptions=True)
        self._members = members
        for slot in members:
            slot.is_joined = True

    def leave(self) -> None:
        """Effect: the weight group counts as broken; a new one must be joined before the next update."""
        self._members = []

    async def pause(self) -> None:
        """Effect: running requests freeze on every engine of the group; one that fails is out."""
        await self._report("pause", await self._try_all(self._members, lambda s: s.engine.pause()), take_out=True)

    async def resume(self) -> None:
        """Effect: requests go on, on every engine of the group that is not fenced; one that fails is out."""
        slots = [slot for slot in self._members if not slot.fenced_because]
        await self._report("resume", await self._try_all(slots, lambda slot: slot.engine.resume()), take_out=True)

    async def start_weight_update(self) -> None:
        """Effect: fences every engine of the group and opens one update on each."""
        for slot in self._members:
            slot.fenced_because, slot.is_updated = "a weight update is running", False
        failed = await self._try_all(self._members, lambda slot: slot.engine.start_weight_update())
        await self._report("start a weight update", failed)

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """Effect: every engine of the group receives the whole push (the trainer sends meanwhile)."""
        failed = await self._try_all(self._members, lambda slot: slot.engine.update_weights(update_info))
        for slot in self._members:
            slot.is_updated = slot not in failed
        await self._report("receive weights", failed)

    async def finish_weight_update(self, policy_version: int) -> None:
        """Effect: publishes `policy_version` on every engine of the group, reads it back and lifts its fence.

        Raises:
            ProtocolError: some engine has not received everything; then no engine publishes, all stay fenced, and
                the push must be repeated from start_weight_update.
            EngineError: an engine refused to finish; it stays fenced.
        """
        missing = [slot.engine.url for slot in self._members if not slot.is_updated]
        if missing:
            raise ProtocolError(f"policy_version {policy_version} is not published: the engine at {', '.join(missing)} "
                                "has not received all weights; the whole push must be sent again")

        async def publish(slot: _Slot) -> None:
            await slot.engine.finish_weight_update(policy_version)
            reported = await slot.engine.weight_version()
            if reported != policy_version:
                raise EngineError(f"the engine at {slot.engine.url} was given version {policy_version} and reports "
                                  f"{reported}")

        failed = await self._try_all(self._members, publish)
        published = [slot for slot in self._members if slot not in failed]
        for slot in published:
            slot.has_our_push = True
        await self._admit(published, policy_version)
        for slot in self._members:
            slot.is_updated = False
        await self._report(f"publish policy_version {policy_version}", failed)

    async def _try_all(
        self, slots: Sequence[_Slot], operation: Callable[[_Slot], Awaitable[None]]
    ) -> dict[_Slot, BaseException]:
        """Runs the operation on all slots at once, waits for all, and returns the errors of the failed ones."""
        results = await asyncio.gather(*(operation(slot) for slot in slots), return_exceptions=True)
        return {slot: result for slot, result in zip(slots, results) if isinstance(result, BaseException)}

    async def _report(self, what: str, failed: dict[_Slot, BaseException], take_out: bool = False) -> None:
        """Raises EngineError if any failed."""
        if not failed:
            return
        for slot, error in failed.items():
            if not isinstance(error, SaoError):
                raise error
            if take_out:
                await self._take_out(slot, f"it failed to {what}: {error}")
            elif slot.fenced_because:
                slot.fenced_because = f"it failed to {what}"
        reasons = "; ".join(str(error) for error in failed.values())
        raise EngineError(f"{len(failed)} of {len(self._members)} engines failed to {what}: {reasons}")
