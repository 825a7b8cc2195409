"""A run that is told to stop: the trainer hears it, saves and leaves, whatever engines and episodes do meanwhile."""

import asyncio
import threading

import pytest

from megatron_sao.errors import EngineError, ProtocolError
from megatron_sao.records import (
    STOPPED,
    Ack,
    EvalRequest,
    FormGroup,
    Goodbye,
    GroupOpen,
    NeedBatch,
    PushDone,
    PushFailed,
    PushGo,
    PushRequest,
    PushSent,
    StopWanted,
)
from megatron_sao.schedule.snapshot import read_snapshot
from tests.schedule.harness import (
    HELLO,
    Stopper,
    hello,
    one_turn,
    open_push,
    play_together,
    push,
    report,
    save,
    states,
    take,
    train,
    wait_for,
)
from tests.schedule.support import make_trajectory
from tests.schedule.test_loop import balances

NEED = NeedBatch(step=2, phase="train", num_trajectories=40, policy_version=2)  # more than there are
STOP = StopWanted(reason="a test")


def leave(channel, step: int, folder) -> None:
    """Save and say Goodbye, as a trainer does that was told to stop."""
    save(channel, step, folder)
    assert channel.request(Goodbye(reason=STOPPED)) == Ack()


def stopped_well(out) -> None:
    assert (out.trainer_error, out.scheduler_error, out.ended) == (None, None, STOPPED)
    assert balances(out.summary)
    assert out.summary["requests_lost_by_pushes"] == 0


def act_on_engines(engines, fate: str) -> None:
    if fate == "dead":
        for engine in engines:
            engine.kill()
        wait_for(lambda: not any(engine.is_joined for engine in engines))


FATES = ["alive", "dead"]


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("request_", [NEED, EvalRequest(name="x")], ids=["batch", "evaluation"])
@pytest.mark.parametrize("moment", ["before", "while it waits"])
def test_a_request_for_episodes_is_answered_with_the_wish(tmp_path, request_, moment, fate):
    """Also one that waits already, also while no engine lives."""
    stop, asks = Stopper(), threading.Event()

    def trainer(channel, engines):
        hello(channel)
        train(channel, 2)
        for engine in engines:
            engine.hold = True  # from here on no episode ends
        act_on_engines(engines, fate)
        if moment == "before":
            stop.ask()
        asks.set()
        answer = channel.request(request_)
        leave(channel, 1, tmp_path / "saved")
        return answer

    async def stop_when_asked(scheduler, engines):
        await asyncio.to_thread(asks.wait, 20)
        while not scheduler._channel.is_asked:
            await asyncio.sleep(0.01)
        stop.wanted.set()

    out = play_together(tmp_path, trainer, engines=[{}, {}], stopper=stop, at_start=stop_when_asked,
                        return_timeout_s=20.0)
    stopped_well(out)
    assert out.answer == STOP
    assert [result.name for result, _ in out.notes.evaluations] == []
    saved = read_snapshot(tmp_path / "saved")
    assert (saved.state.step, saved.state.policy_version, saved.state.totals.num_pushes) == (1, 2, 2)
    assert list(states(saved.ledger_path)) == list(out.states), "a prompt was issued after the stop"


@pytest.mark.parametrize("fate", FATES)
def test_the_step_that_runs_is_finished_without_its_push(tmp_path, fate):
    stop = Stopper()

    def trainer(channel, engines):
        hello(channel)
        train(channel, 2)
        take(channel, 2, 2)
        stop.ask()
        act_on_engines(engines, fate)
        answers.append(push(channel, 3))
        report(channel, 2, 3)
        answers.append(channel.request(NEED))
        leave(channel, 2, tmp_path / "saved")
        return [engine.version for engine in engines]

    answers = []
    out = play_together(tmp_path, trainer, engines=[{}, {}], stopper=stop)
    stopped_well(out)
    assert out.answer == ["2", "2"]
    assert answers == [PushDone(policy_version=3, metrics={}), STOP]
    assert (out.summary["policy_version"], out.summary["num_pushes"], out.summary["trained"]) == (3, 2, 12)
    assert read_snapshot(tmp_path / "saved").state.policy_version == 3


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("moment", ["init", "pause", "start", "sending", "update", "finish"])
def test_a_push_under_way_ends_as_if_it_was_done(tmp_path, moment, fate):
    """In each part of it, with engines that hang there or die."""
    stop = Stopper()

    def trainer(channel, engines):
        hello(channel)
        train(channel, 1)
        take(channel, 1, 1)
        if moment == "init":
            assert isinstance(channel.request(PushRequest(policy_version=2, has_group=False)), FormGroup)
        if moment != "sending":
            engines[1].faults[moment] = "hang"
            num_calls = engines[1].calls.count(moment)
        message = PushRequest(policy_version=2, has_group=True)
        if moment == "init":
            message = GroupOpen(policy_version=2, master_address="127.0.0.1", master_port=1)
        elif moment in ("sending", "update", "finish"):
            assert isinstance(open_push(channel, 2), PushGo)
            message = PushSent(policy_version=2, fault="the engines are gone" if fate == "dead" else "")
        if moment == "sending":
            stop.ask()
            act_on_engines(engines, fate)
        else:
            threading.Thread(target=stop_when_there, args=(engines, num_calls), daemon=True).start()
        first = channel.request(message)
        done = first if isinstance(first, PushDone) else push(channel, 2, has_group=False)
        report(channel, 1, 2)
        leave(channel, 1, tmp_path / "saved")
        return first, done

    def stop_when_there(engines, num_calls):
        wait_for(lambda: engines[1].calls.count(moment) > num_calls or moment == "update")
        stop.ask()
        act_on_engines(engines, fate)

    out = play_together(tmp_path, trainer, engines=[{}, {}], stopper=stop, push_timeout_s=3.0)
    stopped_well(out)
    first, done = out.answer
    assert isinstance(first, PushDone if moment in ("pause", "start") else PushFailed)
    assert done == PushDone(policy_version=2, metrics={})
    assert (out.summary["policy_version"], out.summary["trained"]) == (2, 8)
    assert not any(engine.num_tokens_during_update for engine in out.engines)


def test_a_resumed_run_goes_on_where_it_was_stopped(tmp_path):
    """Episodes that end after the wish are kept with the checkpoint; what runs then is played again."""
    stop = Stopper()

    def stops(channel, engines):
        hello(channel)
        train(channel, 2)
        take(channel, 2, 2)
        wait_for(lambda: engines[0].num_held == 6)
        stop.ask()
        engines[0].num_free = 8 + 4 + 4  # four of them end
        push(channel, 3)
        report(channel, 2, 3)
        assert channel.request(NEED) == STOP
        leave(channel, 2, tmp_path / "saved")

    def goes_on(channel, engines):
        hello(channel, type(HELLO)(policy_version=3, num_trainer_ranks=2, plan=b"plan", plan_hash="h"))
        for step in range(3, 6):
            take(channel, step, step)
            push(channel, step + 1)
            report(channel, step, step + 1)
        channel.request(Goodbye(reason="finished"))

    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = play_together(tmp_path / "first", stops, engines=[{"num_free": 12, "hold_at": 1}], stopper=stop)
    stopped_well(first)
    assert first.summary["in_flight_running"] + first.summary["in_flight_buffered"] == 6
    second = play_together(tmp_path / "second", goes_on, saved=tmp_path / "saved")
    assert (second.trainer_error, second.ended) == (None, "finished")
    assert list(first.states) == list(second.states)[: len(first.states)]
    trained = [i for _, _, ids in first.notes.steps + second.notes.steps for i in ids]
    assert len(trained) == len(set(trained)) == 6 * 4
    assert set(first.states) <= set(trained), "a prompt of the first start was lost"


def test_what_fails_while_a_run_stops_is_not_its_failure(tmp_path):
    stop = Stopper()

    async def run_episode(prompt, pool):
        if prompt.prompt_id in {f"p{i}" for i in range(8)}:  # of the two steps
            return make_trajectory(prompt.prompt_id)
        while not stop.is_heard.is_set():
            await pool.engines[0].is_healthy()
        await pool.engines[0].is_healthy()
        failed.append(prompt.prompt_id)
        raise ValueError("the tool server is gone")

    def trainer(channel, engines):
        hello(channel)
        take(channel, 0, 0)
        report(channel, 0, 0)
        take(channel, 1, 0)
        stop.ask()
        wait_for(lambda: len(failed) >= 2)
        report(channel, 1, 0)
        leave(channel, 1, tmp_path / "saved")

    failed = []
    out = play_together(tmp_path, trainer, run_episode=run_episode, stopper=stop, max_staleness=9)
    stopped_well(out)
    rows = states(tmp_path / "saved" / "ledger.sqlite")
    assert {rows[prompt_id] for prompt_id in failed} == {"in_flight"}, "a resumed run would not play it again"


@pytest.mark.parametrize("waits_for", ["batch", "evaluation"])
def test_engines_that_end_a_moment_before_the_wish_is_heard_are_no_failure(tmp_path, waits_for):
    """SLURM signals all hosts: a request may fail on one dying engine after the other before the scheduler is told."""
    stop = Stopper()

    def trainer(channel, engines):
        hello(channel)
        train(channel, 1)
        for engine in engines:
            engine.faults["generate"] = "refuse"  # 500, as by a server that shuts down
        if waits_for == "evaluation":
            answer = channel.request(EvalRequest(name="x"))
        else:
            answer = channel.request(NeedBatch(step=1, phase="train", num_trajectories=40, policy_version=1))
        leave(channel, 1, tmp_path / "saved")
        return answer

    async def run_episode(prompt, pool):
        try:
            return await one_turn(prompt, pool)
        except EngineError:
            asyncio.get_running_loop().call_later(0.2, stop.wanted.set)
            raise

    out = play_together(tmp_path, trainer, engines=[{}] * 6, run_episode=run_episode, stopper=stop, heard_within_s=20.0)
    stopped_well(out)
    assert out.answer == STOP
    assert out.summary["engines_taken_out"] >= 5


@pytest.mark.parametrize("moment", ["never there", "in a step", "after a push", "in a push"])
def test_it_ends_well_and_soon_without_a_trainer(tmp_path, moment):
    stop = Stopper()

    def trainer(channel, engines):
        if moment == "never there":
            stop.ask()
            return
        hello(channel)
        take(channel, 0, 0)
        if moment == "in a push":
            open_push(channel, 1)
        stop.ask()
        if moment == "after a push":
            push(channel, 1)

    out = play_together(tmp_path, trainer, stopper=stop, linger_s=0.3, trainer_start_timeout_s=25.0)
    stopped_well(out)


def test_a_trainer_that_comes_late_is_told(tmp_path):
    """The run is stopped while the trainer still starts: it may leave a checkpoint of the beginning."""
    stop = Stopper()

    def trainer(channel, engines):
        stop.ask()
        engines[0].kill()
        hello(channel)
        answer = channel.request(EvalRequest(name="before"))
        leave(channel, 0, tmp_path / "saved")
        return answer

    out = play_together(tmp_path, trainer, stopper=stop)
    stopped_well(out)
    assert out.answer == STOP
    assert (out.summary["issued"], out.summary["num_pushes"]) == (0, 0)


def test_a_trainer_that_cannot_save_fails_the_run(tmp_path):
    stop = Stopper()

    def trainer(channel, engines):
        hello(channel)
        stop.ask()
        channel.request(EvalRequest(name="before"))
        channel.request(Goodbye(reason="no space left on device"))

    out = play_together(tmp_path, trainer, stopper=stop, num_eval=500)
    assert isinstance(out.scheduler_error, ProtocolError) and "no space left" in str(out.scheduler_error)
