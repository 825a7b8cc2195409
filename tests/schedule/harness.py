"""A scheduler with its real channel, client, pool, ledger and buffer; fake engines, and a trainer in a thread."""

import asyncio
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from megatron_sao.records import (
    Ack,
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
    StepReport,
    Trajectory,
    Turn,
)
from megatron_sao.rollout.assemble import assemble
from megatron_sao.rollout.engine_client import EngineClient
from megatron_sao.rollout.engine_pool import EnginePool
from megatron_sao.schedule.ledger import Ledger
from megatron_sao.schedule.loop import Scheduler, ScheduleSettings
from megatron_sao.schedule.snapshot import read_snapshot
from megatron_sao.schedule.stop import StopWish
from megatron_sao.transport.channel import SchedulerChannel, TrainerChannel
from tests.schedule.fake_engine import FakeEngine
from tests.schedule.support import make_prompt

LIMIT_S = 30.0  # of a whole test; nothing comes near it unless it hangs

HELLO = Hello(policy_version=0, num_trainer_ranks=2, plan=b"plan", plan_hash="h")


@dataclass
class Notes:
    """An observer that remembers."""

    steps: list[tuple[StepReport, dict, list[str]]] = field(default_factory=list)
    evaluations: list = field(default_factory=list)

    def waited(self, phase, num_ready, num_needed):
        pass

    def stepped(self, report, metrics, trajectories):
        self.steps.append((report, metrics, [t.prompt.prompt_id for t in trajectories]))

    def evaluated(self, result, policy_version, trajectories):
        self.evaluations.append((result, policy_version))

    def position(self):
        return {"steps": len(self.steps)}


@dataclass
class Outcome:
    answer: object  # what the trainer function returned
    trainer_error: Exception | None
    ended: str | None  # what the scheduler's run returned
    scheduler_error: Exception | None
    summary: dict
    notes: Notes
    engines: list[FakeEngine]
    states: dict[str, str]  # of every issued prompt, in order of issue, as the ledger's file says

    @property
    def still_in_flight(self) -> list[str]:
        return [prompt_id for prompt_id, state in self.states.items() if state not in ("trained", "dropped")]


def states(ledger_path: Path) -> dict[str, str]:
    """prompt_id -> state of every prompt in a ledger's file, in order of issue."""
    with closing(sqlite3.connect(f"file:{ledger_path}?mode=ro", uri=True)) as db:
        return dict(db.execute("SELECT prompt_id, state FROM prompts ORDER BY number"))


class Numbered:
    """Endless prompts p0, p1, ... that know their place."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def __next__(self) -> Prompt:
        self.position += 1
        return make_prompt(f"p{self.position - 1}")

    def state(self) -> dict[str, int]:
        return {"position": self.position}


def settings(**changes) -> ScheduleSettings:
    given = dict(
        batch_trajectories=4, max_staleness=2, max_in_flight=6, batch_timeout_s=10.0, push_timeout_s=5.0,
        push_backend="gloo", trainer_start_timeout_s=10.0, linger_s=5.0,
    )
    return ScheduleSettings(**(given | changes))


def play_together(tmp_path: Path, trainer: Callable, *, engines: list[dict] | None = None, **given) -> Outcome:
    """Run a scheduler and `trainer(channel, engines)` (in a thread) until both are over.

    Args:
        engines: the arguments of each FakeEngine; default: one without faults.
        given: as of `play`.
    """
    (outcome,) = play_in_turn(tmp_path, [trainer], engines=engines, **given)
    return outcome


def play_in_turn(
    tmp_path: Path, trainers: list[Callable], *, engines: list[dict] | None = None, **given
) -> list[Outcome]:
    """One trainer after the other, each with a scheduler of its own, on the same engines."""

    async def run() -> list[Outcome]:
        fakes = [FakeEngine(**arguments) for arguments in engines or [{}]]
        for fake in fakes:
            await fake.start()
        try:
            return [await play(tmp_path / f"{i}.sqlite", trainer, fakes, **given) for i, trainer in enumerate(trainers)]
        finally:
            for fake in fakes:
                await fake.stop()

    return asyncio.run(run())


async def one_turn(prompt: Prompt, pool: EnginePool) -> Trajectory:
    """An episode of one request."""
    sample = await pool.generate([1, 2], max_tokens=8)
    turn = Turn(observation_ids=[1, 2], action_ids=sample.token_ids, logp_sampler=sample.logp,
                version_spans=sample.version_spans, stop_reason=sample.stop_reason)
    return assemble(prompt, [turn], reward=1.0, is_cut=False, started_s=0.0, finished_s=1.0)


class Stopper:
    """Lets a thread of a test tell the run to stop."""

    def __init__(self) -> None:
        self.wanted, self.is_heard = threading.Event(), threading.Event()

    def ask(self) -> None:
        """Returns when the scheduler knows it. Not from its own thread."""
        self.wanted.set()
        assert self.is_heard.wait(LIMIT_S)

    async def pass_on(self, wish: StopWish) -> None:
        await asyncio.to_thread(self.wanted.wait, 2 * LIMIT_S)
        wish.ask("a test")
        self.is_heard.set()


async def play(
    ledger_path: Path,
    trainer: Callable,
    fakes: list[FakeEngine],
    *,
    prompts: Iterator[Prompt] | Numbered | None = None,
    run_episode: Callable | None = None,
    num_eval: int = 3,
    at_start: Callable | None = None,
    return_timeout_s: float = 5.0,
    saved: Path | None = None,
    stopper: "Stopper | None" = None,
    heard_within_s: float = 0.05,
    notes: Notes | None = None,
    **changes,
) -> Outcome:
    """One scheduler with one trainer.

    Args:
        prompts, run_episode: replace the endless prompts and the one-turn episode.
        at_start: async function of (scheduler, engines) that runs beside.
        return_timeout_s: of the pool.
        saved: what `save` wrote; the run goes on there.
        notes: the observer.
        heard_within_s: of StopWish.
        stopper: through which a test tells the run to stop.
        changes: of ScheduleSettings.
    """

    given = settings(**changes)
    clients = [EngineClient(fake.url, request_timeout_s=8.0, push_timeout_s=given.push_timeout_s) for fake in fakes]
    pool = EnginePool(clients, wait_timeout_s=8.0, return_timeout_s=return_timeout_s)
    episode = run_episode or one_turn
    channel = SchedulerChannel("127.0.0.1", 0)
    schedule = read_snapshot(saved) if saved else None
    if schedule:
        shutil.copyfile(schedule.ledger_path, ledger_path)
    ledger, notes, stop = Ledger(ledger_path), notes or Notes(), StopWish(heard_within_s)
    scheduler = Scheduler(
        channel=channel,
        engines=pool,
        prompts=prompts or Numbered(**schedule.state.prompts if schedule else {}),
        eval_prompts=[make_prompt(f"eval{i}") for i in range(num_eval)],
        run_episode=lambda prompt: episode(prompt, pool),
        ledger=ledger,
        settings=given,
        observer=notes,
        stop=stop,
        saved=schedule,
    )
    beside = asyncio.create_task(at_start(scheduler, fakes)) if at_start else None
    stopper = stopper or Stopper()
    stopping = asyncio.create_task(stopper.pass_on(stop))
    served = asyncio.create_task(scheduler.run())
    trained = asyncio.create_task(asyncio.to_thread(_train, trainer, channel.address, fakes))
    try:
        (answer, trainer_error), (ended, error) = await asyncio.wait_for(
            asyncio.gather(trained, _end_of(served)), LIMIT_S
        )
        return Outcome(answer, trainer_error, ended, error, scheduler.summary(), notes, fakes, states(ledger_path))
    finally:
        if beside:
            beside.cancel()
        stopper.wanted.set()
        await stopping
        ledger.close()
        await channel.close()
        await pool.close()


def _train(trainer: Callable, address: str, fakes: list[FakeEngine]) -> tuple[object, Exception | None]:
    channel = TrainerChannel(address, timeout_s=20.0)
    try:
        return trainer(channel, fakes), None
    except Exception as error:
        return None, error
    finally:
        channel.close()


async def _end_of(served: asyncio.Task) -> tuple[str | None, Exception | None]:
    try:
        return await served, None
    except Exception as error:
        return None, error


# ---- what a trainer does --------------------------------------------------------------------------------------------


def hello(channel: TrainerChannel, message: Hello = HELLO):
    """Say Hello and bring the engines to the trainer's version, as Pusher.connect does. -> Welcome"""
    welcome = channel.request(message)
    push(channel, message.policy_version, has_group=False)
    return welcome


def take(channel: TrainerChannel, step: int, version: int, *, phase: str = "train", num: int = 4):
    return ask(channel, NeedBatch(step=step, phase=phase, num_trajectories=num, policy_version=version), version)


def ask(channel: TrainerChannel, message, version: int):
    """Request, with the pushes that the scheduler wants before it answers."""
    while isinstance(answer := channel.request(message), PushWanted):
        push(channel, version, has_group=False)
    return answer


def open_push(channel: TrainerChannel, version: int, has_group: bool = True) -> PushGo | PushDone:
    """Form groups until the engines receive, or have the version already."""
    while not isinstance(answer := channel.request(PushRequest(policy_version=version, has_group=has_group)),
                         PushGo | PushDone):
        assert isinstance(answer, FormGroup)
        opened = channel.request(GroupOpen(policy_version=version, master_address="127.0.0.1", master_port=1))
        has_group = not isinstance(opened, PushFailed)
    return answer


def push(channel: TrainerChannel, version: int, has_group: bool = True) -> PushDone:
    """One whole push, with its repetitions."""
    while True:
        answer = open_push(channel, version, has_group)
        if isinstance(answer, PushGo):
            answer = channel.request(PushSent(policy_version=version))
        if isinstance(answer, PushDone):
            return answer
        has_group = not isinstance(answer, PushFailed)


def report(channel: TrainerChannel, step: int, version: int, *, phase: str = "train", is_trained: bool = True):
    metrics = {"policy/loss": 1.0}
    return channel.request(
        StepReport(step=step, phase=phase, policy_version=version, is_trained=is_trained, metrics=metrics)
    )


def save(channel: TrainerChannel, step: int, folder: Path) -> Path:
    """Have the scheduler's part of a checkpoint written. -> `folder`, which is made"""
    folder.mkdir(parents=True)
    assert channel.request(SaveState(step=step, folder=str(folder))) == Ack()
    return folder


def train(channel: TrainerChannel, num_steps: int, version: int = 0) -> int:
    """So many whole steps. Returns the version afterwards."""
    for step in range(num_steps):
        take(channel, step, version)
        version += 1
        push(channel, version)
        report(channel, step, version)
    return version


def finish(channel: TrainerChannel):
    return channel.request(Goodbye(reason="finished", result={"pass_rate_after": 0.9}))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)
