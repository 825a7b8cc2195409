"""The scheduler: answers the trainer's messages while episodes run.

    Hello -> who the trainer is                     NeedBatch -> the first fresh trajectories
    PushRequest, GroupOpen, PushSent -> one push    EvalRequest -> held-out episodes
    StepReport -> the ledger marks the batch        SaveState -> the scheduler's part of a checkpoint
    Goodbye -> the end

Invariants:
- the version of the engines never falls, and a batch is trained by exactly the version the engines hold;
- engines may fail and come back (schedule/push.py); while none serves, the trainer is asked to push again;
- whatever else fails first (an episode, the prompt source, the trainer, all engines for good) ends the run at once: the
  trainer gets Abort with the reason, engines with whole weights are resumed, the book stays true;
- once a stop is wanted nothing new begins, engines are not needed any more, and what fails is not the run's failure: the
  trainer is told at its next request for episodes, pushes are taken as done, and it may save and say Goodbye;
- every wait has a bound: that of the caller's timeouts, or "no episode ended for so long".
"""

import asyncio
import base64
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from megatron_sao.errors import DataError, ProtocolError, SaoError
from megatron_sao.records import (
    FINISHED,
    PRETRAIN,
    STOPPED,
    TRAIN,
    Abort,
    Ack,
    Batch,
    EvalRequest,
    EvalResult,
    FormGroup,
    Goodbye,
    GroupOpen,
    Hello,
    NeedBatch,
    Prompt,
    PushDone,
    PushFailed,
    PushGo,
    PushRequest,
    PushSent,
    PushWanted,
    SaveState,
    SchedulerMessage,
    StepReport,
    StopWanted,
    TrainerMessage,
    Trajectory,
    Welcome,
)
from megatron_sao.rollout.engine_pool import EnginePool
from megatron_sao.schedule.buffer import Buffer
from megatron_sao.schedule.dispatcher import Dispatcher, Prompts, TokenRate
from megatron_sao.schedule.evaluation import Evaluation
from megatron_sao.schedule.freshness import capacity, num_to_issue
from megatron_sao.schedule.ledger import NO_SIGNAL, STALE, Ledger
from megatron_sao.schedule.push import Push
from megatron_sao.schedule.race import first_of
from megatron_sao.schedule.snapshot import SavedSchedule, SchedulerState, Snapshot
from megatron_sao.schedule.statistics import batch_metrics
from megatron_sao.schedule.stop import StopWish
from megatron_sao.schedule.totals import Totals
from megatron_sao.transport.channel import SchedulerChannel, TrainerLost

log = logging.getLogger(__name__)

@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """Limits of the scheduler."""

    batch_trajectories: int  # trajectories of one policy step
    max_staleness: int  # largest lag of the oldest action token
    max_in_flight: int  # episodes that run at the same time
    batch_timeout_s: float  # an episode must end at least this often while something waits for episodes
    push_timeout_s: float  # for each part of a push, and for joining the weight group
    push_backend: str  # "gloo" | "nccl"
    push_attempts: int = 3  # weight groups that one push may need
    trainer_start_timeout_s: float  # from the start of the scheduler to Hello
    linger_s: float = 15.0  # when the run ends early: how long a trainer that has not asked may still do so, to be told


class Observer(Protocol):
    """Who writes down what happens. `stepped` and `evaluated` run in a thread beside the loop, never two at a time."""

    def waited(self, phase: str, num_ready: int, num_needed: int) -> None:
        """A step waits for trajectories. Called from the event loop: must be quick."""

    def stepped(self, report: StepReport, metrics: dict[str, float], trajectories: Sequence[Trajectory]) -> None:
        """A step is over. `metrics`: the trainer's and the scheduler's."""

    def evaluated(self, result: EvalResult, policy_version: int, trajectories: Sequence[Trajectory]) -> None:
        """Held-out prompts were played."""

    def position(self) -> dict[str, Any]:
        """What it needs to go on from here after a restart, JSON-able. Called while nothing else is."""


@dataclass
class _OpenBatch:
    """The batch that the trainer works on."""

    request: NeedBatch
    trajectories: list[Trajectory]
    metrics: dict[str, float]
    num_reports: int = 0
    was_trained: bool = False

    @property
    def prompt_ids(self) -> list[str]:
        return [trajectory.prompt.prompt_id for trajectory in self.trajectories]


class Scheduler:
    """One run. `await run()` returns after a Goodbye that is no failure, and raises the reason otherwise."""

    def __init__(
        self,
        *,
        channel: SchedulerChannel,
        engines: EnginePool,
        prompts: Prompts,
        eval_prompts: Sequence[Prompt],
        run_episode: Callable[[Prompt], Awaitable[Trajectory]],
        ledger: Ledger,
        settings: ScheduleSettings,
        observer: Observer,
        stop: StopWish,
        saved: SavedSchedule | None = None,
    ) -> None:
        """Args:
            channel: the connection to the trainer.
            engines: all engines; some may come later.
            prompts: training prompts, in the order in which they are issued; of a resumed run, from the saved position.
            eval_prompts: held-out prompts; they never enter the ledger.
            run_episode: plays one prompt on `engines`.
            ledger: the book of this run; of a resumed run, a copy of the saved one.
            settings: limits.
            observer: metrics and trajectory files.
            stop: whether the run shall end before its end.
            saved: where a resumed run goes on.
        """
        self._channel = channel
        self._engines = engines
        self._prompts = prompts
        self._eval_prompts = eval_prompts
        self._run_episode = run_episode
        self._ledger = ledger
        self._settings = settings
        self._observer = observer
        self._stop = stop
        self._resumes_at = saved.state.policy_version if saved else None
        self._totals = saved.state.totals if saved else Totals()
        self._buffer = Buffer()
        for trajectory in saved.trajectories if saved else ():
            self._buffer.put(trajectory)
        self._dispatcher = Dispatcher(
            prompts=prompts,
            again=ledger.put_back(trajectory.prompt.prompt_id for trajectory in self._buffer.all()),
            run_episode=run_episode,
            ledger=ledger,
            buffer=self._buffer,
            num_to_issue=self._num_to_issue,
            on_failure=self._fail,
        )
        self._token_rate = TokenRate(self._dispatcher)
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failing: asyncio.Task[None] | None = None  # sets `_failure`, in a moment
        self._hello: Hello | None = None
        stop.wanted.add_done_callback(lambda _: self._dispatcher.close())
        self._version = 0  # what the engines hold, or would hold if they were still needed
        self._may_repeat_version = False  # engines lack the trainer's version: it may be pushed without having risen
        self._is_dispatching = False
        self._wanted: NeedBatch | None = None  # the request that waits for trajectories now
        self._batch: _OpenBatch | None = None
        self._num_unpublished = 0  # trajectories given to a policy step whose push is not out yet
        self._push: Push | None = None
        self._to_write: list[Callable[[], None]] = []  # calls of the observer, for when the trainer has its answer
        self._result: dict[str, float] = {}

    @property
    def policy_version(self) -> int:
        """What the engines hold."""
        return self._version

    # ---- the life of a run -------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Serve one trainer from Hello to Goodbye.

        Returns: FINISHED; or STOPPED, when the run ended before its end because somebody wanted it to.
        Effect: afterwards no episode runs, and engines are resumed unless their weights are half-updated: those stay
        paused, and the next scheduler fences them until a whole push.

        Raises:
            SaoError: whatever ended the run early; an unforeseen exception comes out unchanged.
        """
        try:
            return await self._serve()
        except Exception as error:
            if isinstance(error, TrainerLost) and self._stop.is_wanted:
                log.warning("%s; the run goes on from its last checkpoint", error)
                return STOPPED
            await self._dispatcher.stop()
            await self._tell_trainer(error)
            raise
        finally:
            await self._dispatcher.stop()
            if self._failing is not None:
                self._failing.cancel()
            if self._push is not None:
                await self._push.abandon()

    async def _serve(self) -> str:
        message = await self._unless_failed(self._first_message())
        while message is not None:
            answer = await self._unless_failed(self._answer_to(message))
            await self._channel.answer(answer)
            await self._write_down()
            if isinstance(message, Goodbye):
                self._result = message.result
                if message.reason not in (FINISHED, STOPPED):
                    raise ProtocolError(f"the trainer ended with: {message.reason}")
                return message.reason
            # The trainer may compute for as long as it needs: its heartbeat is what is watched.
            message = await self._unless_failed(self._channel.receive())
        return STOPPED

    async def _first_message(self) -> TrainerMessage | None:
        """None = none came in time, and none is missed: the run shall stop."""
        timeout_s = self._settings.trainer_start_timeout_s
        try:
            message = await asyncio.wait_for(self._stop.unless(self._channel.receive), timeout_s)
        except TimeoutError as error:
            said = f"no trainer said Hello within {timeout_s:.0f} s (parallel.start_timeout_s); see its log"
            raise ProtocolError(said) from error
        if not isinstance(message, StopWanted):
            return message
        try:
            return await asyncio.wait_for(self._channel.receive(), self._settings.linger_s)
        except TimeoutError:
            return None

    async def _answer_to(self, message: TrainerMessage) -> SchedulerMessage:
        if not isinstance(message, StepReport) and self._batch and self._batch.request.phase == PRETRAIN:
            self._settle_batch()
        match message:
            case Hello():
                return self._welcome(message)
            case NeedBatch():
                return await self._stop.unless(lambda: self._unless_no_engine_serves(self._give_batch(message)))
            case EvalRequest():
                return await self._stop.unless(lambda: self._unless_no_engine_serves(self._evaluate(message)))
            case PushRequest() | GroupOpen() | PushSent():
                answer = await self._stop.unless(lambda: self._take_part_in_push(message))
                return await self._leave_push(message) if isinstance(answer, StopWanted) else answer
            case StepReport():
                return self._take_report(message)
            case SaveState():
                return await self._save(message)
            case Goodbye():
                return Ack()

    async def _unless_failed[T](self, work: Awaitable[T]) -> T:
        """The result of `work`, or the first failure anywhere, whichever comes first."""
        return await first_of(work, self._failure, self._channel.lost)

    def _fail(self, error: BaseException) -> None:
        if self._failing is None:
            self._failing = asyncio.create_task(self._fail_unless_excused(error))

    async def _fail_unless_excused(self, error: BaseException) -> None:
        if not await self._stop.excuses(error):
            self._failure.set_exception(error)
            self._failure.exception()  # marks it as seen: it may come when nobody waits any more

    async def _write_down(self) -> None:
        """Let the observer see what was answered. Not given up half-way: there is no second time."""
        while self._to_write:
            await asyncio.to_thread(self._to_write.pop(0))

    async def _tell_trainer(self, error: Exception) -> None:
        """Answer the open message, or the next one if it comes soon, with Abort."""
        reason = str(error) if isinstance(error, SaoError) else f"{type(error).__name__}: {error}"
        log.error("the run ends: %s", reason)
        try:
            if not self._channel.is_asked:
                receive = asyncio.ensure_future(self._channel.receive())
                await asyncio.wait({receive, self._channel.lost}, timeout=self._settings.linger_s,
                                   return_when=asyncio.FIRST_COMPLETED)
                receive.cancel()
            await self._channel.answer(Abort(reason=reason))
        except ProtocolError:
            pass  # nobody is there to hear it

    # ---- Hello -------------------------------------------------------------------------------------------------

    def _welcome(self, hello: Hello) -> Welcome:
        if self._hello is not None:
            raise ProtocolError("the trainer said Hello twice")
        if self._resumes_at not in (None, hello.policy_version):
            raise ProtocolError(f"the trainer resumes at version {hello.policy_version}, the scheduler at "
                                f"{self._resumes_at}: both must start from the same checkpoint")
        self._hello = hello
        self._may_repeat_version = True
        return Welcome(num_engines=len(self._engines.engines))

    # ---- batches -----------------------------------------------------------------------------------------------

    def _num_to_issue(self, num_running: int) -> int:
        batch_trajectories = self._settings.batch_trajectories
        needed, extra = batch_trajectories, 0
        if self._wanted:
            needed = self._wanted.num_trajectories
            # What a value phase takes uses up no version, so it does not count against freshness.
            extra = needed - (batch_trajectories if self._wanted.phase == TRAIN else 0)
        consumed = self._version * batch_trajectories + self._num_unpublished
        room = capacity(
            policy_version=self._version,
            batch_trajectories=batch_trajectories,
            max_staleness=self._settings.max_staleness,
            num_accepted=consumed + len(self._buffer),
            num_running=num_running,
        )
        return num_to_issue(
            capacity=room + max(0, extra),
            num_running=num_running,
            max_in_flight=self._settings.max_in_flight,
            num_buffered=len(self._buffer),
            num_needed=needed,
        )

    async def _give_batch(self, request: NeedBatch) -> Batch:
        self._check_batch_request(request)
        self._wanted = request
        if not self._is_dispatching:
            self._is_dispatching = True
            self._dispatcher.start()
            self._token_rate.read()  # the interval of the first step begins here
        began_s = time.monotonic()
        try:
            taken, num_stale = await self._wait_for_fresh(request)
        finally:
            self._wanted = None
        metrics = batch_metrics(taken, request.policy_version) | {
            "schedule/policy_version": float(request.policy_version),
            "schedule/dropped_stale": float(num_stale),
            "schedule/wait_s": time.monotonic() - began_s,
            "schedule/buffered": float(len(self._buffer)),
            "schedule/in_flight": float(self._dispatcher.num_running),
            "schedule/tokens_per_s": self._token_rate.read(),
            "schedule/engines": float(self._engines.num_serving),
            "schedule/requests_reissued": float(self._totals.num_reissued + self._engines.num_reissued),  # in the run so far
        }
        self._batch = _OpenBatch(request, taken, metrics)
        self._ledger.take(self._batch.prompt_ids, phase=request.phase, step=request.step)
        if request.phase == TRAIN:
            self._num_unpublished += len(taken)
        self._dispatcher.fill()
        return Batch(step=request.step, trajectories=taken, metrics=metrics)

    async def _wait_for_fresh(self, request: NeedBatch) -> tuple[list[Trajectory], int]:
        num_stale = 0
        while True:
            if len(self._buffer) >= request.num_trajectories:
                taken, stale = self._buffer.take(
                    request.num_trajectories, request.policy_version, self._settings.max_staleness
                )
                for trajectory in stale:
                    self._ledger.drop(trajectory.prompt.prompt_id, STALE)
                num_stale += len(stale)
                if taken:
                    return taken, num_stale
            self._observer.waited(request.phase, len(self._buffer), request.num_trajectories)
            self._dispatcher.fill()
            if self._dispatcher.is_exhausted and self._dispatcher.num_running == 0:
                raise DataError(
                    f"the training prompts ran out: step {request.step} ({request.phase}) needs "
                    f"{request.num_trajectories} trajectories and {len(self._buffer)} are left; "
                    "give more prompts or lower run.steps"
                )
            if not await self._buffer.arrival(self._settings.batch_timeout_s):
                raise ProtocolError(
                    f"no episode ended within schedule.batch_timeout_s = {self._settings.batch_timeout_s:.0f} while "
                    f"step {request.step} ({request.phase}) waited: {len(self._buffer)} of "
                    f"{request.num_trajectories} trajectories are ready, {self._dispatcher.num_running} episodes run"
                )

    def _check_batch_request(self, request: NeedBatch) -> None:
        if self._hello is None or self._push is not None or self._batch is not None:
            raise ProtocolError(f"NeedBatch of step {request.step} came before Hello, during a push, or before the "
                                "StepReport of the step before")
        if request.num_trajectories < 1:
            raise ProtocolError(f"NeedBatch of step {request.step} asks for {request.num_trajectories} trajectories")
        if request.policy_version != self._version:
            raise ProtocolError(f"step {request.step} trains version {request.policy_version}, but the engines hold "
                                f"version {self._version}; push it first")

    def _take_report(self, report: StepReport) -> Ack:
        batch = self._batch
        is_expected = batch is not None and report.phase == batch.request.phase
        if not is_expected or (report.step != batch.request.step and report.phase != PRETRAIN):
            raise ProtocolError(f"StepReport of step {report.step} ({report.phase}) belongs to no open batch")
        if report.policy_version != self._version:
            raise ProtocolError(f"after step {report.step} the trainer holds version {report.policy_version}, "
                                f"but the engines hold {self._version}")
        batch.num_reports += 1
        batch.was_trained |= report.is_trained
        is_first = batch.num_reports == 1  # with which a batch is shown
        metrics = (batch.metrics if is_first else {}) | report.metrics
        self._to_write.append(partial(self._observer.stepped, report, metrics, batch.trajectories if is_first else []))
        if report.phase != PRETRAIN:
            self._settle_batch()
        return Ack()

    def _settle_batch(self) -> None:
        """Enter into the ledger what became of the open batch. Without any report it stays in flight."""
        batch, self._batch = self._batch, None
        self._num_unpublished = 0
        if batch.was_trained:
            self._ledger.train(batch.prompt_ids)
            self._totals.add_batch(batch.trajectories, batch.metrics)
        elif batch.num_reports:
            for prompt_id in batch.prompt_ids:
                self._ledger.drop(prompt_id, NO_SIGNAL)
        self._dispatcher.fill()

    # ---- pushes ------------------------------------------------------------------------------------------------

    async def _take_part_in_push(self, message: PushRequest | GroupOpen | PushSent) -> SchedulerMessage:
        if isinstance(message, PushRequest):
            return await self._go_on_with_push(message)
        if self._push is None or message.policy_version != self._push.policy_version:
            raise ProtocolError(f"{type(message).__name__} of version {message.policy_version} belongs to no open push")
        if isinstance(message, GroupOpen):
            return await self._push.join(message)
        answer = await self._push.close(message)
        return self._end_push(answer) if isinstance(answer, PushDone) else answer

    async def _leave_push(self, message: PushRequest | GroupOpen | PushSent) -> PushDone | PushFailed:
        """The run stops: engines may be gone already, and when it is resumed they get a whole push."""
        if self._push is not None:
            await self._push.abandon()
        if not isinstance(message, PushRequest):
            return PushFailed(reason=f"the run stops: {self._stop.wanted.result().reason}")
        if self._push is None or self._push.policy_version != message.policy_version:
            self._check_push_request(message)
        return self._end_push(PushDone(policy_version=message.policy_version, metrics={}))

    async def _go_on_with_push(self, request: PushRequest) -> FormGroup | PushGo | PushDone:
        if self._push is None or self._push.policy_version != request.policy_version:
            self._check_push_request(request)
            self._push = self._new_push(request.policy_version)
        answer = await self._push.proceed(request.has_group)
        if isinstance(answer, PushGo):
            self._totals.add_in_flight(self._dispatcher.running_ids, self._ledger)
        return self._end_push(answer) if isinstance(answer, PushDone) else answer

    def _new_push(self, policy_version: int) -> Push:
        info = {
            "backend": self._settings.push_backend,
            "plan": base64.b64encode(self._hello.plan).decode(),
            "plan_hash": self._hello.plan_hash,
            "timeout_s": self._settings.push_timeout_s,
        }
        return Push(
            self._engines,
            policy_version=policy_version,
            plan_hash=self._hello.plan_hash,
            num_trainer_ranks=self._hello.num_trainer_ranks,
            join_info=info,
            timeout_s=self._settings.push_timeout_s,
            attempts=self._settings.push_attempts,
        )

    def _end_push(self, done: PushDone) -> PushDone:
        self._push, self._may_repeat_version = None, False
        self._totals.add_push(done)
        self._version = done.policy_version
        self._num_unpublished = 0
        self._dispatcher.fill()
        return done

    def _check_push_request(self, request: PushRequest) -> None:
        if self._hello is None or self._push is not None:
            raise ProtocolError(f"PushRequest of version {request.policy_version} came before Hello or during a push")
        lowest = max(self._version, self._hello.policy_version) + (not self._may_repeat_version)
        if request.policy_version < lowest:
            raise ProtocolError(f"version {request.policy_version} cannot be pushed: versions only grow, the next one "
                                f"is {lowest}")

    async def _unless_no_engine_serves[T](self, work: Awaitable[T]) -> T | PushWanted:
        """The result of `work`, or, when no engine serves any more, what brings those back that answer."""

        async def until_fenced() -> PushWanted:
            await self._engines.all_fenced(self._version)
            return PushWanted()

        fenced = asyncio.ensure_future(until_fenced())
        try:
            answer = await first_of(work, fenced)
        finally:
            fenced.cancel()
            await asyncio.gather(fenced, return_exceptions=True)
        self._may_repeat_version |= isinstance(answer, PushWanted)
        return answer

    # ---- evaluation --------------------------------------------------------------------------------------------

    async def _evaluate(self, request: EvalRequest) -> EvalResult:
        if self._hello is None or self._push is not None:
            raise ProtocolError(f"EvalRequest {request.name} came before Hello or during a push")
        if self._version < self._hello.policy_version:
            raise ProtocolError(f"EvalRequest {request.name} is about version {self._hello.policy_version}, but the "
                                f"engines hold version {self._version}; push it first")
        evaluation = Evaluation(
            request.name,
            self._eval_prompts,
            self._run_episode,
            max_in_flight=self._settings.max_in_flight,
            timeout_s=self._settings.batch_timeout_s,
            on_progress=partial(self._observer.waited, f"eval {request.name}"),
        )
        result, trajectories = await evaluation.play()
        self._to_write.append(partial(self._observer.evaluated, result, self._version, trajectories))
        return result

    # ---- checkpoints -------------------------------------------------------------------------------------------

    async def _save(self, request: SaveState) -> Ack:
        if self._hello is None or self._push is not None or self._batch is not None:
            raise ProtocolError(f"SaveState after step {request.step} came before Hello, during a push, or before the "
                                "StepReport of the step")
        # Taken here, at once; episodes that end while it is written belong to the next one.
        snapshot = Snapshot(
            SchedulerState(
                step=request.step,
                policy_version=self._version,
                prompts=self._prompts.state(),
                num_trajectories=len(self._buffer),
                totals=self._totals_now(),
                observer=self._observer.position(),
            ),
            self._buffer.all(),
            self._ledger.freeze(),
        )
        await asyncio.to_thread(snapshot.write, Path(request.folder))
        return Ack()

    def _totals_now(self) -> Totals:
        """A copy, with what the engines of this start have counted."""
        before = self._totals
        return msgspec.structs.replace(
            before,
            num_taken_out=before.num_taken_out + self._engines.num_taken_out,
            num_reissued=before.num_reissued + self._engines.num_reissued,
            num_across_pushes=before.num_across_pushes + self._dispatcher.num_across_pushes,
            ids_in_flight_at_pushes=set(before.ids_in_flight_at_pushes),
        )

    # ---- summary -----------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """What the run did, JSON-able. Raises ProtocolError when the ledger does not balance."""
        return {
            # Of a run that was stopped, the resumed one plays again what failed.
            **self._totals_now().summary(self._ledger, set() if self._stop.is_wanted else self._dispatcher.failed_ids),
            "policy_version": self._version,
            "result": self._result,
        }
