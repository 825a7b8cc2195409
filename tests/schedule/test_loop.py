"""The scheduler with a real channel, client, pool and ledger; only engines and trainer are stand-ins."""

import asyncio
import itertools
import time

import pytest

from megatron_sao.errors import DataError, EngineError, ProtocolError
from megatron_sao.records import (
    EvalRequest,
    FormGroup,
    Goodbye,
    GroupOpen,
    Hello,
    NeedBatch,
    PushFailed,
    PushGo,
    PushRequest,
    PushSent,
    PushWanted,
    Welcome,
)
from megatron_sao.rollout.assemble import Unscored
from megatron_sao.rollout.engine_client import RequestRefused
from tests.schedule.harness import (
    HELLO,
    Notes,
    ask,
    finish,
    hello,
    open_push,
    play_in_turn,
    play_together,
    push,
    report,
    take,
    train,
    wait_for,
)
from tests.schedule.support import make_prompt, make_trajectory


def balances(summary: dict) -> bool:
    return summary["issued"] == summary["trained"] + summary["dropped"] + summary["in_flight"]


def test_a_whole_run(tmp_path):
    def trainer(channel, engines):
        welcome = hello(channel)
        before = channel.request(EvalRequest(name="before"))
        take(channel, 0, 0, phase="value_pretrain", num=30)
        for update in range(3):  # many updates on one batch
            report(channel, update, 0, phase="value_pretrain")
        take(channel, 0, 0, phase="value_warmup")
        report(channel, 0, 0, phase="value_warmup")
        version = train(channel, 6)
        after = channel.request(EvalRequest(name="after"))
        finish(channel)
        return welcome, before, version, after

    out = play_together(tmp_path, trainer, engines=[{}, {}])
    assert (out.trainer_error, out.scheduler_error) == (None, None)
    welcome, before, version, after = out.answer
    assert (welcome, version) == (Welcome(num_engines=2), 6)
    assert (before.pass_rate, before.num_episodes, after.mean_reward) == (1.0, 3, 1.0)
    assert [engine.version for engine in out.engines] == ["6", "6"]
    assert out.summary["trained"] == 30 + 4 + 6 * 4
    assert out.summary["num_pushes"] == 6
    assert out.summary["lag_max"] <= 2
    assert out.summary["result"] == {"pass_rate_after": 0.9}
    assert balances(out.summary)
    assert [(r.phase, r.step, len(ids)) for r, _, ids in out.notes.steps] == [
        ("value_pretrain", 0, 30), ("value_pretrain", 1, 0), ("value_pretrain", 2, 0), ("value_warmup", 0, 4),
        *(("train", step, 4) for step in range(6)),
    ]
    trained_ids = [i for _, _, ids in out.notes.steps for i in ids]
    assert len(set(trained_ids)) == len(trained_ids)
    assert not any(i.startswith("eval") for i in trained_ids)
    metrics = out.notes.steps[-1][1]
    assert metrics["policy/loss"] == 1.0
    assert metrics["rollout/pass_rate"] == 1.0
    assert {"wait_s", "buffered", "in_flight", "tokens_per_s", "dropped_stale"} <= {
        name.removeprefix("schedule/") for name in metrics
    }


def test_requests_in_flight_survive_a_push_and_carry_both_versions(tmp_path):
    def trainer(channel, engines):
        (engine,) = engines
        hello(channel)
        take(channel, 0, 0)
        wait_for(lambda: engine.num_held == 6)  # each of the six that now run has written two tokens
        push(channel, 1)
        engine.num_free = None
        report(channel, 0, 1)
        batch = take(channel, 1, 1)
        report(channel, 1, 1, is_trained=False)
        finish(channel)
        return [trajectory.version_t.tolist() for trajectory in batch.trajectories]

    # The first four requests are free: they are the first batch.
    out = play_together(tmp_path, trainer, engines=[{"num_tokens": 5, "num_free": 4, "hold_at": 2}])
    assert (out.trainer_error, out.scheduler_error) == (None, None)
    assert out.answer == [[-1, -1, 0, 0, 1, 1, 1]] * 4
    assert out.summary["requests_in_flight_at_pushes"] == 6
    assert out.summary["requests_lost_by_pushes"] == 0
    assert out.summary["trajectories_across_pushes"] >= 4
    assert out.summary["dropped_by_reason"] == {"no_signal": 4}
    assert balances(out.summary)


def test_the_steps_of_a_push_come_in_order_and_nothing_is_sampled_during_one(tmp_path):  # WSY-09
    def trainer(channel, engines):
        hello(channel)
        train(channel, 8)
        finish(channel)

    out = play_together(tmp_path, trainer, engines=[{"num_tokens": 25}, {"num_tokens": 25}])
    assert out.scheduler_error is None
    assert out.summary["requests_lost_by_pushes"] == 0
    for engine in out.engines:
        assert engine.num_tokens_during_update == 0
        assert engine.calls == ["init"] + ["pause", "start", "update", "finish", "resume"] * 8


def test_every_engine_gets_its_own_place_in_the_weight_group(tmp_path):
    def trainer(channel, engines):
        hello(channel)
        finish(channel)

    out = play_together(tmp_path, trainer, engines=[{}, {}, {}])
    seen = [engine.joined_as for engine in out.engines]
    assert [(info["rank_offset"], info["world_size"]) for info in seen] == [(2, 5), (3, 5), (4, 5)]
    assert seen[0]["plan"] == "cGxhbg=="  # base64 of b"plan"
    assert seen[0] | {"rank_offset": 3} == seen[1]


# ---- faults: the trainer learns the reason within seconds -----------------------------------------------------------


def fails_with(out, text: str, kind: type = EngineError) -> None:
    assert isinstance(out.trainer_error, ProtocolError)
    assert text in str(out.trainer_error)
    assert isinstance(out.scheduler_error, kind)
    assert balances(out.summary)


def test_a_request_that_every_engine_would_refuse_ends_the_run(tmp_path):
    async def refuse(prompt, pool):
        raise RequestRefused("the prompt is too long")

    def trainer(channel, engines):
        hello(channel)
        take(channel, 0, 0)

    fails_with(play_together(tmp_path, trainer, run_episode=refuse, engines=[{}, {}]), "too long")


def test_the_only_engine_that_never_comes_back_ends_the_run(tmp_path):
    def trainer(channel, engines):
        hello(channel)
        take(channel, 0, 0)
        engines[0].hold = True  # requests are with the engine when it dies
        engines[0].kill()
        time.sleep(0.3)
        push(channel, 1)

    out = play_together(tmp_path, trainer, engines=[{"num_tokens": 40}], max_in_flight=4, return_timeout_s=1.5)
    fails_with(out, "no engine answers, and none came back")
    assert "pause" not in out.engines[0].calls


# ---- faults that a run survives -------------------------------------------------------------------------------------


def survived(out, version: int) -> None:
    """Both engines hold the last version and no request was lost."""
    assert (out.trainer_error, out.scheduler_error) == (None, None)
    assert [engine.version for engine in out.engines] == [str(version)] * len(out.engines)
    assert not any(engine.num_tokens_during_update for engine in out.engines)
    assert out.summary["policy_version"] == version
    assert out.summary["requests_lost_by_pushes"] == 0
    assert balances(out.summary)


@pytest.mark.parametrize(
    ("step", "fault"),
    [*itertools.product(["init", "pause", "start", "update", "finish"], ["refuse once", "hang once"]),
     ("finish", "forget once")],
)
def test_a_part_of_a_push_that_fails_once_is_repeated(tmp_path, step, fault):  # WSY-14
    def trainer(channel, engines):
        hello(channel)
        take(channel, 0, 0)
        engines[1].faults[step] = fault
        if step == "init":
            engines[0].kill()
            time.sleep(0.1)
            engines[0].revive()  # so that the next push needs a new group
        done = push(channel, 1)
        report(channel, 0, 1)
        versions = [engine.version for engine in engines]
        train_one_more(channel, 1)
        finish(channel)
        return done, versions

    out = play_together(tmp_path, trainer, engines=[{}, {}], push_timeout_s=1.0)
    survived(out, 2)
    done, versions = out.answer
    assert versions == ["1", "1"]
    assert done.metrics["push/attempts"] >= 2
    assert out.summary["failed_push_attempts"] >= 1
    if step not in ("init", "finish"):
        assert [e.calls.count("finish") for e in out.engines] == [2, 2], "it was published before all had received it"
    if step == "finish":
        assert out.engines[0].calls.count("finish") == 2, "the engine that had published took part in the repetition"


def train_one_more(channel, version: int) -> None:
    take(channel, version, version)
    push(channel, version + 1)
    report(channel, version, version + 1)


@pytest.mark.parametrize("moment", ["while the trainer computes", "pause", "start", "update", "finish"])
def test_an_engine_that_dies_is_left_out_and_taken_in_again(tmp_path, moment):
    def trainer(channel, engines):
        hello(channel)
        take(channel, 0, 0)
        wait_for(lambda: engines[1].num_held > 0)
        if moment.startswith("while"):
            engines[1].kill()
            wait_for(lambda: not engines[1].is_joined)
        else:
            engines[1].faults[moment] = "die once"
        first = push(channel, 1)
        report(channel, 0, 1)
        for engine in engines:
            engine.num_free = None
        take(channel, 1, 1)  # by the other one alone
        alone = [engine.version for engine in engines]
        engines[1].revive()
        time.sleep(0.3)
        before_push = [call for call in engines[1].calls if call == "update"]
        push(channel, 2)
        report(channel, 1, 2)
        take(channel, 2, 2)
        finish(channel)
        return first, alone, before_push

    out = play_together(tmp_path, trainer, engines=[{"num_free": 2, "hold_at": 1}, {"num_free": 2, "hold_at": 1}],
                        push_timeout_s=1.0)
    survived(out, 2)
    first, alone, before_push = out.answer
    assert alone == ["1", "default"]
    assert first.metrics["push/attempts"] == (1 if moment.startswith("while") else 2)
    assert out.summary["requests_reissued"] > 0 and out.summary["engines_taken_out"] >= 1


def test_an_engine_that_was_started_again_unnoticed_gets_everything_first(tmp_path):
    def trainer(channel, engines):
        hello(channel)
        train(channel, 1)
        take(channel, 1, 1)  # with max_staleness 0 nothing runs now: nobody asks the engine
        engines[1].kill()
        wait_for(lambda: not engines[1].is_joined)
        engines[1].revive()
        done = push(channel, 2)
        report(channel, 1, 2)
        finish(channel)
        return done

    out = play_together(tmp_path, trainer, engines=[{}, {}], max_staleness=0)
    survived(out, 2)
    assert out.answer.metrics["push/attempts"] == 1
    assert [engine.calls.count("init") for engine in out.engines] == [2, 2]
    assert out.summary["engines_taken_out"] == 1


def test_an_engine_that_joins_late_gets_everything_first(tmp_path):
    def trainer(channel, engines):
        engines[1].kill()
        time.sleep(0.2)
        hello(channel)
        take(channel, 0, 0)
        push(channel, 1)
        report(channel, 0, 1)
        engines[1].revive()
        train_one_more(channel, 1)
        finish(channel)

    out = play_together(tmp_path, trainer, engines=[{}, {}])
    survived(out, 2)
    assert out.engines[1].calls == ["init", "pause", "start", "update", "finish", "resume"]


def test_a_slow_engine_is_left_out_after_the_timeout_and_its_requests_are_asked_of_others(tmp_path):
    def trainer(channel, engines):
        hello(channel)
        take(channel, 0, 0)
        wait_for(lambda: engines[1].num_held > 0)
        engines[1].hold = True
        engines[1].faults["is_paused"] = "hang"
        began_s = time.monotonic()
        push(channel, 1)
        seconds = time.monotonic() - began_s
        report(channel, 0, 1)
        engines[0].num_free = None
        take(channel, 1, 1)
        calls = list(engines[1].calls)
        engines[1].hold, engines[1].num_free = False, None
        del engines[1].faults["is_paused"]
        push(channel, 2)
        report(channel, 1, 2)
        finish(channel)
        return seconds, calls

    out = play_together(tmp_path, trainer, engines=[{"num_free": 2, "hold_at": 1}, {"num_free": 2, "hold_at": 1}],
                        push_timeout_s=1.0)
    survived(out, 2)
    seconds, calls = out.answer
    assert seconds >= 1.0
    assert "update" not in calls
    assert out.summary["requests_reissued"] > 0


def test_when_no_engine_serves_the_trainer_pushes_again_what_it_has(tmp_path):
    def trainer(channel, engines):
        hello(channel)
        train(channel, 1)
        for engine in engines:
            engine.hold = True
            engine.kill()
        wait_for(lambda: not any(engine.is_joined for engine in engines))
        for engine in engines:
            engine.hold = False
        engines[0].revive()
        need = NeedBatch(step=1, phase="train", num_trajectories=4, policy_version=1)
        answers = [channel.request(need)]
        push(channel, 1, has_group=False)
        answers.append(ask(channel, need, 1))
        push(channel, 2)
        report(channel, 1, 2)
        engines[0].hold = True
        engines[0].kill()
        wait_for(lambda: not engines[0].is_joined)
        engines[0].hold = False
        engines[1].revive()
        answers.append(ask(channel, EvalRequest(name="x"), 2))
        finish(channel)
        return answers

    # At version 1 an engine with its first weights is old; at version 0 it would be as good as any.
    out = play_together(tmp_path, trainer, engines=[{}, {}], max_staleness=0)
    assert (out.trainer_error, out.scheduler_error) == (None, None)
    first, batch, result = out.answer
    assert isinstance(first, PushWanted)
    assert all(set(t.version_t[t.action_mask].tolist()) == {1} for t in batch.trajectories)
    assert result.num_episodes == 3
    assert out.engines[1].version == "2"
    assert out.summary["requests_lost_by_pushes"] == 0


def test_an_evaluation_is_written_once_though_all_engines_fall_out_meanwhile(tmp_path):
    class Slow(Notes):
        def evaluated(self, result, policy_version, trajectories):
            super().evaluated(result, policy_version, trajectories)
            if result.name == "first":
                engines[0].kill()
                wait_for(lambda: not engines[0].is_joined)
                engines[0].revive()
                asyncio.run_coroutine_threadsafe(pools[0].survey(1), loops[0]).result(10)  # finds its first weights
                time.sleep(0.3)  # time for the scheduler to act on it

    async def look(scheduler, fakes):
        engines.extend(fakes)
        pools.append(scheduler._engines)
        loops.append(asyncio.get_running_loop())

    def trainer(channel, engines):
        hello(channel)
        train(channel, 1)
        results = [ask(channel, EvalRequest(name=name), 1) for name in ("first", "second")]
        finish(channel)
        return [result.name for result in results]

    engines, pools, loops = [], [], []
    out = play_together(tmp_path, trainer, notes=Slow(), at_start=look)
    assert (out.trainer_error, out.scheduler_error) == (None, None)
    assert out.answer == [result.name for result, _ in out.notes.evaluations] == ["first", "second"]


def test_a_trainer_that_could_not_send_repeats_the_push(tmp_path):
    def trainer(channel, engines):
        hello(channel)
        take(channel, 0, 0)
        assert isinstance(open_push(channel, 1), PushGo)
        failed = channel.request(PushSent(policy_version=1, fault="rank 1 broke"))
        held = [engine.version for engine in engines]
        push(channel, 1, has_group=False)
        report(channel, 0, 1)
        finish(channel)
        return failed, held

    out = play_together(tmp_path, trainer, engines=[{}, {}])
    survived(out, 1)
    failed, held = out.answer
    assert failed == PushFailed(reason="rank 1 broke")
    assert held == ["default", "default"]


def test_why_a_push_could_not_be_sent_is_told_in_the_words_of_the_engine(tmp_path):
    def trainer(channel, engines):
        hello(channel)
        engines[0].faults["update"] = "refuse once"
        open_push(channel, 1)
        failed = channel.request(PushSent(policy_version=1, fault="an engine refused"))
        push(channel, 1, has_group=False)
        finish(channel)
        return failed

    out = play_together(tmp_path, trainer)
    assert "update failed inside the engine; the trainer: an engine refused" in out.answer.reason


def test_a_push_that_always_fails_ends_the_run_with_its_reason(tmp_path):
    def trainer(channel, engines):
        hello(channel)
        take(channel, 0, 0)
        for engine in engines:
            engine.faults["update"] = "refuse"
        push(channel, 1)

    out = play_together(tmp_path, trainer, engines=[{}, {}])
    fails_with(out, "update failed inside")
    assert "push.attempts = 3" in str(out.trainer_error)
    for engine in out.engines:
        assert not {"finish", "resume"} & set(engine.calls), "its weights may be half-updated: it must not serve"
    assert out.summary["policy_version"] == 0


@pytest.mark.parametrize("step", ["init", "start", "update", "finish"])
@pytest.mark.parametrize("fault", ["refuse", "hang"])
@pytest.mark.parametrize("faulty", [0, 1])
def test_an_engine_that_answers_but_takes_no_push_is_found_out_and_left_out(tmp_path, step, fault, faulty):
    def trainer(channel, engines):
        hello(channel)
        take(channel, 0, 0)
        if step == "init":
            engines[faulty].kill()
            wait_for(lambda: not engines[faulty].is_joined)
            engines[faulty].revive()
        engines[faulty].faults[step] = fault
        push(channel, 1)
        report(channel, 0, 1)
        take(channel, 1, 1)  # by the other one alone
        push(channel, 2)  # the sound one is not held up any more
        report(channel, 1, 2)
        del engines[faulty].faults[step]
        take(channel, 2, 2)
        push(channel, 3)
        report(channel, 2, 3)
        finish(channel)

    out = play_together(tmp_path, trainer, engines=[{}, {}], push_timeout_s=0.5)
    survived(out, 3)
    sound, broken = out.engines[1 - faulty], out.engines[faulty]
    assert sound.calls.count("pause") <= 5  # two attempts together, one alone; then one for each push
    assert broken.calls.count("resume") == 1, "it served before a whole push had reached it"


def test_engines_that_a_dead_trainer_left_in_the_middle_serve_only_after_a_whole_push(tmp_path):
    """The engines outlive their scheduler: a second one, with a new trainer, meets them as they are."""

    def dies(channel, engines):
        hello(channel)
        take(channel, 0, 0)
        open_push(channel, 1)

    def comes_after(channel, engines):
        calls = [list(engine.calls) for engine in engines]
        hello(channel)  # of version 0 again, as from a checkpoint
        result = channel.request(EvalRequest(name="x"))
        finish(channel)
        return calls, result

    first, second = play_in_turn(tmp_path, [dies, comes_after], engines=[{}, {}])
    assert "the trainer went away" in str(first.scheduler_error)
    calls, result = second.answer
    assert (second.trainer_error, second.scheduler_error) == (None, None)
    for engine, before in zip(second.engines, calls, strict=True):
        assert before == ["init", "pause", "start", "update"]
        assert engine.calls[len(before):] == ["init", "pause", "start", "update", "finish", "resume"]
        assert engine.num_tokens_during_update == 0
    assert result.num_episodes == 3


def third_one_fails():
    calls = iter(range(1000))

    async def run_episode(prompt, pool):
        if next(calls) == 2:
            raise ValueError("reward backend failed")
        return make_trajectory(prompt.prompt_id)

    return run_episode


def test_an_environment_that_raises(tmp_path):  # ASY-03
    def trainer(channel, engines):
        hello(channel)
        take(channel, 0, 0)
        take(channel, 1, 0)

    out = play_together(tmp_path, trainer, run_episode=third_one_fails())
    fails_with(out, "reward backend failed", ValueError)


def test_a_prompt_source_that_raises(tmp_path):  # ASY-03
    def prompts():
        yield make_prompt("a")
        raise DataError("prompts.jsonl line 2 is no JSON")

    def trainer(channel, engines):
        hello(channel)
        take(channel, 0, 0)

    fails_with(play_together(tmp_path, trainer, prompts=prompts()), "prompts.jsonl line 2", DataError)


def test_prompts_that_end_are_a_clean_end_until_more_are_needed(tmp_path):  # ASY-03
    def trainer(channel, engines):
        hello(channel)
        take(channel, 0, 0)
        report(channel, 0, 0, is_trained=False)
        finish(channel)

    few = (make_prompt(f"p{i}") for i in range(6))
    out = play_together(tmp_path, trainer, prompts=few)
    assert (out.trainer_error, out.scheduler_error, out.summary["issued"]) == (None, None, 6)

    def greedy(channel, engines):
        hello(channel)
        take(channel, 0, 0)
        report(channel, 0, 0, is_trained=False)
        take(channel, 1, 0)

    (tmp_path / "again").mkdir()
    few = (make_prompt(f"p{i}") for i in range(6))
    fails_with(play_together(tmp_path / "again", greedy, prompts=few), "ran out", DataError)


def test_a_prompt_issued_twice(tmp_path):
    def trainer(channel, engines):
        hello(channel)
        take(channel, 0, 0)

    twice = iter([make_prompt("a"), make_prompt("a")])
    fails_with(play_together(tmp_path, trainer, prompts=twice), "a was issued before", ProtocolError)


def test_episodes_that_never_end(tmp_path):
    async def hold(scheduler, engines):
        engines[0].hold = True

    def trainer(channel, engines):
        hello(channel)
        take(channel, 0, 0)

    out = play_together(tmp_path, trainer, at_start=hold, batch_timeout_s=0.5)
    fails_with(out, "schedule.batch_timeout_s", ProtocolError)
    assert out.summary["in_flight_running"] == 6


def test_unscored_episodes_are_dropped_and_counted(tmp_path):
    calls = iter(range(1000))

    async def run_episode(prompt, pool):
        if next(calls) % 2:
            raise Unscored("unscored", "no reward")
        return make_trajectory(prompt.prompt_id)

    def trainer(channel, engines):
        hello(channel)
        batch = take(channel, 0, 0)
        report(channel, 0, 0, is_trained=False)
        result = channel.request(EvalRequest(name="x"))
        finish(channel)
        return [t.prompt.prompt_id for t in batch.trajectories], result

    out = play_together(tmp_path, trainer, run_episode=run_episode, num_eval=40)
    ids, result = out.answer
    assert len(ids) == 4
    assert out.summary["dropped_by_reason"]["unscored"] >= 3
    assert result.num_episodes == 40 and result.pass_rate == 0.5  # could not be scored = not passed
    assert balances(out.summary)


def test_stale_trajectories_are_dropped_when_the_step_consumes(tmp_path):
    held_version = 0

    async def run_episode(prompt, pool):  # ends at once, so that it is known which version writes what
        return make_trajectory(prompt.prompt_id, versions=(held_version,))

    def trainer(channel, engines):
        nonlocal held_version
        hello(channel)
        for step in range(5):
            take(channel, step, held_version)
            first = held_version
            push(channel, first + 1)
            push(channel, first + 2)  # two pushes a step: what waits ages twice as fast
            held_version = first + 2
            report(channel, step, held_version)
        finish(channel)

    out = play_together(tmp_path, trainer, run_episode=run_episode, max_staleness=1)
    assert (out.trainer_error, out.scheduler_error) == (None, None)
    # After each batch six trajectories wait; the next step finds them two versions old and drops them.
    assert out.summary["dropped_by_reason"] == {"stale": 4 * 6}
    assert [metrics["schedule/dropped_stale"] for _, metrics, _ in out.notes.steps] == [0.0, 6.0, 6.0, 6.0, 6.0]
    assert out.summary["lag_max"] == 0
    assert balances(out.summary)


def test_a_trainer_that_resumes_publishes_first_and_versions_never_fall(tmp_path):  # WSY-10
    resumed = Hello(policy_version=57, num_trainer_ranks=1, plan=b"", plan_hash="")

    def trainer(channel, engines):
        hello(channel, resumed)
        versions = set(take(channel, 57, 57).trajectories[0].version_t.tolist())
        push(channel, 58)
        report(channel, 57, 58)
        with pytest.raises(ProtocolError, match="the next one is 59"):
            push(channel, 1)
        return versions

    out = play_together(tmp_path, trainer)
    assert out.trainer_error is None
    assert out.answer == {-1, 57}
    assert [engine.version for engine in out.engines] == ["58"]
    assert isinstance(out.scheduler_error, ProtocolError)


def test_a_trainer_older_than_the_engines_is_refused(tmp_path):  # WSY-10
    def newer(channel, engines):
        hello(channel)
        train(channel, 2)
        finish(channel)

    def older(channel, engines):
        channel.request(Hello(policy_version=1, num_trainer_ranks=1, plan=b"", plan_hash=""))
        push(channel, 1, has_group=False)

    _, second = play_in_turn(tmp_path, [newer, older])
    assert isinstance(second.scheduler_error, ProtocolError)
    assert "holds version 2, the trainer pushes 1: versions never fall" in str(second.trainer_error)
    assert second.engines[0].version == "2"


def out_of_turn(channel, name: str) -> None:
    match name:
        case "batch before hello":
            take(channel, 0, 0)
        case "hello twice":
            channel.request(HELLO)
            channel.request(HELLO)
        case "batch of another version":
            hello(channel)
            take(channel, 0, 3)
        case "resumed trainer that does not push":
            channel.request(Hello(policy_version=5, num_trainer_ranks=1, plan=b"", plan_hash=""))
            take(channel, 0, 5)
        case "batch while one is open":
            hello(channel)
            take(channel, 0, 0)
            take(channel, 1, 0)
        case "report of another step":
            hello(channel)
            take(channel, 0, 0)
            report(channel, 1, 0)
        case "report without a batch":
            channel.request(HELLO)
            report(channel, 0, 0)
        case "report of a version that was not pushed":
            hello(channel)
            take(channel, 0, 0)
            report(channel, 0, 1)
        case "sent without a push":
            channel.request(HELLO)
            channel.request(PushSent(policy_version=1))
        case "sent of another version":
            hello(channel)
            open_push(channel, 1)
            channel.request(PushSent(policy_version=2))
        case "batch during a push":
            hello(channel)
            open_push(channel, 1)
            take(channel, 0, 0)
        case "evaluation during a push":
            hello(channel)
            open_push(channel, 1)
            channel.request(EvalRequest(name="x"))
        case "another push during one":
            hello(channel)
            open_push(channel, 1)
            channel.request(PushRequest(policy_version=2, has_group=True))
        case "group without being asked":
            hello(channel)
            channel.request(PushRequest(policy_version=1, has_group=True))
            channel.request(GroupOpen(policy_version=1, master_address="h", master_port=1))
        case "sent before receiving":
            hello(channel)
            channel.request(PushRequest(policy_version=1, has_group=False))
            channel.request(PushSent(policy_version=1))
        case "the same version again":
            hello(channel)
            push(channel, 1)
            push(channel, 1)
        case "no trajectories":
            hello(channel)
            take(channel, 0, 0, num=0)


@pytest.mark.parametrize(
    "name",
    [
        "batch before hello", "hello twice", "batch of another version", "resumed trainer that does not push",
        "batch while one is open", "report of another step", "report without a batch",
        "report of a version that was not pushed", "sent without a push", "sent of another version",
        "batch during a push", "evaluation during a push", "no trajectories",
        "another push during one", "the same version again", "group without being asked", "sent before receiving",
    ],
)
def test_messages_out_of_turn_are_refused(tmp_path, name):
    out = play_together(tmp_path, lambda channel, engines: out_of_turn(channel, name), trainer_start_timeout_s=1.0,
                        linger_s=0.5)
    assert isinstance(out.trainer_error, ProtocolError)
    assert isinstance(out.scheduler_error, ProtocolError)
    assert balances(out.summary)


# ---- the end --------------------------------------------------------------------------------------------------------


def test_what_runs_at_the_end_stays_in_flight(tmp_path):
    async def hold_later(scheduler, engines):
        engines[0].num_tokens = 1

    def trainer(channel, engines):
        hello(channel)
        take(channel, 0, 0)
        report(channel, 0, 0)
        engines[0].hold = True
        time.sleep(0.2)
        finish(channel)

    out = play_together(tmp_path, trainer, at_start=hold_later)
    assert out.scheduler_error is None
    assert out.summary["trained"] == 4
    assert out.summary["in_flight"] == out.summary["issued"] - 4 > 0


def test_a_batch_without_a_report_stays_in_flight(tmp_path):
    def trainer(channel, engines):
        hello(channel)
        take(channel, 0, 0, phase="value_pretrain")
        finish(channel)

    out = play_together(tmp_path, trainer)
    assert (out.summary["trained"], out.summary["in_flight_training"]) == (0, 4)


def test_a_trainer_that_failed_makes_the_scheduler_fail(tmp_path):
    def trainer(channel, engines):
        hello(channel)
        channel.request(Goodbye(reason="loss is NaN"))

    out = play_together(tmp_path, trainer)
    assert out.trainer_error is None
    assert "loss is NaN" in str(out.scheduler_error)


@pytest.mark.parametrize("moment", ["idle", "push"])
def test_a_trainer_that_goes_away_ends_the_scheduler(tmp_path, moment):
    def trainer(channel, engines):
        hello(channel)
        take(channel, 0, 0)
        if moment == "push":
            open_push(channel, 1)

    out = play_together(tmp_path, trainer)
    assert out.trainer_error is None
    assert "the trainer went away" in str(out.scheduler_error)
    assert balances(out.summary)


def test_a_scheduler_without_a_trainer_ends(tmp_path):
    out = play_together(tmp_path, lambda channel, engines: None, trainer_start_timeout_s=0.5, linger_s=0.2)
    assert "no trainer said Hello" in str(out.scheduler_error)
