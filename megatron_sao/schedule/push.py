"""One publication of new weights to every engine that answers, however often parts of it must be repeated.

The trainer asks for a version again and again until it is told that it is done; each answer says what to do next:

    trainer                           scheduler
    (first bucket is ready)
    PushRequest(v, has_group) ------> which engines answer, and lack v?
          <------------------------   FormGroup: they are not the weight group, or it broke
    GroupOpen(address) ------------>  these engines join              Ack, or PushFailed
    PushRequest(v, has_group) ------> pauses them, starts an update   PushGo
    (sends all buckets)
    PushSent(v, fault) ------------>  verifies, publishes, resumes    PushDone, or PushFailed, or
    ... after Ack it goes on with the other engines,                  Ack: others still lack v
    ... after PushFailed the trainer leaves the group and begins again ...
    PushRequest(v, has_group) ------> no engine that answers lacks v  PushDone

So a fault has no path of its own: an engine that died is not in the next group; one that was started again or joins
late is asked at the next push, lacks the version and gets all of it; engines that already published take no part in
the repetition. When no engine serves while the trainer waits for trajectories, it is told PushWanted and pushes the
version it has. A trainer that dies leaves engines paused and fenced; the next one finds them lacking its version.

Invariants:
- running requests of an engine that answers are kept, never aborted: they wait and go on under the new weights;
- the version is published last, after every engine of the group received every tensor, and is read back;
- engines are resumed whatever happened, except where weights are half-updated;
- no step waits without a bound; when attempts with several engines fail again and again they are tried one by one, the
  run goes on without those that fail alone, and ends when none can be brought to the version.
"""

import asyncio
import logging
import time
from typing import Any

from megatron_sao.errors import EngineError, ProtocolError, SaoError
from megatron_sao.records import Ack, FormGroup, GroupOpen, PushDone, PushFailed, PushGo, PushSent
from megatron_sao.rollout.engine_client import EngineClient
from megatron_sao.rollout.engine_pool import EnginePool

MAX_FAILURES_TOGETHER = 2
CAUSE_WAIT_S = 2.0  # for the engines' side of a push that the trainer could not send

log = logging.getLogger(__name__)


class Push:
    """The scheduler's side of one push; each method gives the answer to one message of the trainer."""

    def __init__(
        self,
        engines: EnginePool,
        *,
        policy_version: int,
        plan_hash: str,
        num_trainer_ranks: int,
        join_info: dict[str, Any],
        timeout_s: float,
        attempts: int,
    ) -> None:
        """Args:
            engines: every engine of the run.
            policy_version: the version being published.
            plan_hash: names the bucket plan.
            num_trainer_ranks: they come first in the weight group.
            join_info: what an engine must know to join, besides where and as which rank.
            timeout_s: how long engines may take to load after the last bucket was sent.
            attempts: weight groups that may be formed for this push, and one more for each engine.
        """
        self._engines = engines
        self.policy_version = policy_version
        self._plan_hash = plan_hash
        self._num_trainer_ranks = num_trainer_ranks
        self._join_info = join_info
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._num_groups = 0
        self._num_failures = 0
        self._num_failures_together = 0  # of attempts with several engines
        self._asked: list[EngineClient] = []  # to form a weight group
        self._tried: list[EngineClient] = []  # whom the present attempt is for
        self._loading: asyncio.Task[None] | None = None
        self._fault = ""  # of the last attempt
        self._stopped_s: float | None = None  # when engines were first paused
        self._is_paused = False
        self._go_s = 0.0
        self._seconds: dict[str, float] = {}

    async def proceed(self, has_group: bool) -> FormGroup | PushGo | PushDone:
        """Answer to PushRequest.

        Raises:
            EngineError: no engine answers, or none could be brought to the version in so many attempts.
            ProtocolError: an engine holds a later version.
        """
        while True:
            # Who is out now stays out of this push.
            await self._engines.survey(self.policy_version, ask_absent=not self._num_groups)
            await self._stop_loading()
            self._check_versions()
            lacking = self._engines.lacking(self.policy_version)
            if not lacking and has_group:
                return self._done()
            wanted = self._next_group(lacking) or self._engines.present
            if not has_group or not self._engines.is_group(wanted):
                if self._num_groups < self._attempts + len(self._engines.engines):
                    return self._ask_for_group(wanted, is_push_due=bool(lacking))
                if not self._engines.serves(self.policy_version):
                    raise EngineError(f"version {self.policy_version} could not be pushed with push.attempts = "
                                      f"{self._attempts}; the last attempt ended with: {self._fault}")
                await self._engines.give_up_on(lacking)
                return self._done()
            self._tried = wanted
            try:
                await self._open()
                return PushGo(policy_version=self.policy_version)
            except EngineError as error:
                await self._fail(error)
                has_group = False

    async def join(self, opened: GroupOpen) -> Ack | PushFailed:
        """Answer to GroupOpen. Raises: ProtocolError when no group was asked for."""
        if not self._asked:
            raise ProtocolError(f"GroupOpen of version {self.policy_version} answers no FormGroup")
        place = {"master_address": opened.master_address, "master_port": opened.master_port}
        size = self._num_trainer_ranks + self._engines.num_workers(self._asked)
        info = self._join_info | place | {"world_size": size}
        try:
            await self._engines.join(self._asked, self._num_trainer_ranks, info)
        except SaoError as error:
            return await self._fail(error)
        return Ack()

    async def close(self, sent: PushSent) -> PushDone | Ack | PushFailed:
        """Answer to PushSent: wait until everything is loaded, publish the version, let requests go on.

        Raises: ProtocolError when no engine was receiving.
        """
        if self._loading is None:
            raise ProtocolError(f"PushSent of version {self.policy_version} answers no PushGo")
        sent_s = time.monotonic()
        self._add("push/transfer_s", sent_s - self._go_s)
        try:
            if sent.fault:
                raise EngineError(await self._cause(sent.fault))
            await asyncio.wait_for(asyncio.shield(self._loading), self._timeout_s)
            await self._engines.finish_weight_update(self.policy_version)
            self._add("push/load_s", time.monotonic() - sent_s)
            await self._resume()
        except TimeoutError:
            return await self._fail(EngineError(f"engines had not loaded version {self.policy_version} "
                                                f"push.timeout_s = {self._timeout_s:g} after it was sent"))
        except SaoError as error:
            return await self._fail(error)
        return Ack() if self._engines.lacking(self.policy_version) else self._done()

    async def abandon(self) -> None:
        """The run ends in the middle of this push. Effect: what is whole goes on."""
        await self._stop_loading()
        try:
            await self._resume()
        except SaoError:
            log.exception("engines could not be resumed")

    def _next_group(self, lacking: list[EngineClient]) -> list[EngineClient]:
        """Whom the next attempt is for: all, but one at a time when together they fail, or where one has failed alone.

        A fault of one engine that answers (too slow, weights that it cannot load) is seen by all members of the group.
        """
        failures = self._engines.failures_alone
        sound = [engine for engine in lacking if not failures(engine)]
        if sound and self._num_failures_together < MAX_FAILURES_TOGETHER:
            return sound
        return sorted(lacking, key=failures)[:1]

    def _check_versions(self) -> None:
        newest, url = self._engines.newest_version()
        if newest > self.policy_version:
            raise ProtocolError(
                f"the engine at {url} holds version {newest}, the trainer pushes {self.policy_version}: versions never "
                "fall. Start the engines again, or the trainer from its newest checkpoint"
            )

    def _ask_for_group(self, engines: list[EngineClient], is_push_due: bool) -> FormGroup:
        self._num_groups += 1
        self._engines.leave()
        self._asked = self._tried = engines
        num_workers = self._engines.num_workers(engines)
        return FormGroup(num_engines=len(engines), num_workers=num_workers, is_push_due=is_push_due)

    async def _open(self) -> None:
        """Pause the engines of the group and make them receive."""
        began_s = time.monotonic()
        self._stopped_s, self._is_paused = self._stopped_s or began_s, True
        await self._engines.pause()
        self._add("push/pause_s", time.monotonic() - began_s)
        await self._engines.start_weight_update()
        info = {"policy_version": self.policy_version, "plan_hash": self._plan_hash}
        self._loading = asyncio.create_task(self._engines.update_weights(info))
        self._loading.add_done_callback(_note_failure)
        self._go_s = time.monotonic()

    async def _fail(self, error: SaoError) -> PushFailed:
        self._fault = str(error)
        self._num_failures += 1
        log.warning("push of version %d, attempt %d: %s", self.policy_version, self._num_failures, error)
        try:
            await self._resume()
        except SaoError as another:
            log.warning("after it: %s", another)
        self._engines.leave()
        if len(self._tried) > 1:
            self._num_failures_together += 1
        else:
            self._engines.note_failure_alone(self._tried[0])
            if self._engines.serves(self.policy_version):
                await self._engines.give_up_on(self._tried)
        return PushFailed(reason=self._fault)

    async def _cause(self, fault: str) -> str:
        """What the engines say of a push that the trainer could not send: mostly they know better why."""
        await asyncio.wait({self._loading}, timeout=CAUSE_WAIT_S)
        failed = self._loading.done() and self._loading.exception()
        return f"{failed}; the trainer: {fault}" if failed else fault

    async def _resume(self) -> None:
        if not self._is_paused:  # an engine that still waits to join would answer to nothing
            return
        began_s, self._is_paused = time.monotonic(), False
        await self._engines.resume()
        self._add("push/resume_s", time.monotonic() - began_s)

    async def _stop_loading(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
            self._loading = None

    def _done(self) -> PushDone:
        metrics = dict(self._seconds)
        if self._stopped_s is not None:
            metrics["push/stopped_s"] = time.monotonic() - self._stopped_s
            metrics["push/attempts"] = float(1 + self._num_failures)
        return PushDone(policy_version=self.policy_version, metrics=metrics)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds


def _note_failure(loading: asyncio.Task) -> None:
    if not loading.cancelled() and loading.exception() is not None:
        log.warning("receiving failed: %s", loading.exception())
