"""SaveState and resume of a whole scheduler, beside episodes that go on."""

import asyncio

import pytest

from megatron_sao.errors import CheckpointError, ProtocolError
from megatron_sao.records import Hello, SaveState
from megatron_sao.schedule.snapshot import read_snapshot
from tests.schedule.harness import HELLO, finish, hello, open_push, play_together, push, report, save, states, take, train
from tests.schedule.support import make_trajectory
from tests.schedule.test_loop import balances


def at_version(version: int) -> Hello:
    return Hello(policy_version=version, num_trainer_ranks=2, plan=b"plan", plan_hash="h")


def test_a_run_that_was_killed_goes_on_from_its_checkpoint(tmp_path):  # ASY-01, ASY-07, WSY-10
    """What came after the checkpoint is rolled back, in the ledger as in the weights."""

    def dies(channel, engines):
        hello(channel)
        take(channel, 0, 0, phase="value_pretrain", num=9)
        report(channel, 1, 0, phase="value_pretrain")
        train(channel, 5)
        save(channel, 4, tmp_path / "saved")
        for step in (5, 6):
            take(channel, step, step)
            push(channel, step + 1)
            report(channel, step, step + 1)

    def goes_on(channel, engines):
        hello(channel, at_version(5))
        before = [engine.version for engine in engines]
        for step in range(5, 9):
            batch = take(channel, step, step)
            lags.append(max(step - t.oldest_version for t in batch.trajectories))
            push(channel, step + 1)
            report(channel, step, step + 1)
        finish(channel)
        return before

    lags = []
    (tmp_path / "first").mkdir(), (tmp_path / "second").mkdir()
    first = play_together(tmp_path / "first", dies, engines=[{}, {}])
    assert "the trainer went away" in str(first.scheduler_error) and first.trainer_error is None
    saved = read_snapshot(tmp_path / "saved")
    assert (saved.state.policy_version, saved.state.step, saved.state.observer) == (5, 4, {"steps": 6})

    second = play_together(tmp_path / "second", goes_on, engines=[{}, {}], saved=tmp_path / "saved")
    assert (second.trainer_error, second.scheduler_error) == (None, None)
    assert second.answer == ["5", "5"], "an engine did not hold the resumed version before episodes began"
    assert max(lags) <= 2
    summary = second.summary
    assert summary["trained"] == 9 + 9 * 4
    assert (summary["policy_version"], summary["num_pushes"]) == (9, 5 + 1 + 4)  # the one that brings fresh engines to 5
    assert summary["trained_action_tokens"] == 4 * summary["trained"]
    # Capacity counts what was accepted before: (2 + 9 + 1) * 4 - 9 * 4, never more than that ahead.
    assert summary["in_flight"] <= 12
    assert balances(summary)
    trained = [i for _, _, ids in first.notes.steps[:6] + second.notes.steps for i in ids]
    assert len(trained) == len(set(trained)) == summary["trained"]
    issued_by_then = saved.state.prompts["position"]
    assert {f"p{i}" for i in range(issued_by_then)} <= {*trained, *second.still_in_flight}


def test_what_ends_while_it_is_written_belongs_to_the_next_one(tmp_path):
    """Episodes end as fast as they can while one checkpoint after the other is written."""

    async def run_episode(prompt, pool):
        await asyncio.sleep(0)
        return make_trajectory(prompt.prompt_id, versions=(0,) * 20_000)

    def trainer(channel, engines):
        hello(channel)
        for step in range(20):
            take(channel, step, 0)
            report(channel, step, 0, is_trained=step % 2 == 0)
            save(channel, step, tmp_path / str(step))
        finish(channel)

    out = play_together(tmp_path, trainer, run_episode=run_episode, max_in_flight=40, max_staleness=50)
    assert (out.trainer_error, out.scheduler_error) == (None, None)
    for step in range(20):
        saved = read_snapshot(tmp_path / str(step))
        rows = states(saved.ledger_path)
        assert list(rows) == [f"p{i}" for i in range(saved.state.prompts["position"])]
        buffered = {prompt_id for prompt_id, state in rows.items() if state == "buffered"}
        assert buffered == {t.prompt.prompt_id for t in saved.trajectories}
        assert sum(state in ("trained", "dropped") for state in rows.values()) == 4 * (step + 1)
        assert "training" not in rows.values()
        assert saved.state.policy_version == 0


@pytest.mark.parametrize("moment", ["before hello", "in a step", "in a push"])
def test_a_state_of_no_moment_is_refused(tmp_path, moment):  # ASY-08
    def trainer(channel, engines):
        channel.request(HELLO) if moment != "before hello" else None
        if moment != "before hello":
            push(channel, 0, has_group=False)
        if moment == "in a step":
            take(channel, 0, 0)
        if moment == "in a push":
            open_push(channel, 1)
        channel.request(SaveState(step=7, folder=str(tmp_path)))

    out = play_together(tmp_path, trainer, trainer_start_timeout_s=1.0, linger_s=0.5)
    assert isinstance(out.trainer_error, ProtocolError) and isinstance(out.scheduler_error, ProtocolError)
    assert not (tmp_path / "state.json").exists()


def test_a_trainer_of_another_checkpoint_is_refused(tmp_path):  # WSY-10
    def saves(channel, engines):
        hello(channel)
        train(channel, 2)
        save(channel, 1, tmp_path / "saved")
        finish(channel)

    (tmp_path / "first").mkdir(), (tmp_path / "second").mkdir()
    play_together(tmp_path / "first", saves)
    out = play_together(tmp_path / "second", lambda channel, _: channel.request(at_version(1)), saved=tmp_path / "saved")
    assert "resumes at version 1, the scheduler at 2: both must start from the same" in str(out.trainer_error)


def test_a_state_that_cannot_be_written_ends_the_run_with_its_reason(tmp_path):
    def trainer(channel, engines):
        hello(channel)
        channel.request(SaveState(step=1, folder=str(tmp_path / "absent")))

    out = play_together(tmp_path, trainer)
    assert isinstance(out.scheduler_error, CheckpointError)
    assert "scheduler's part of a checkpoint cannot go to" in str(out.trainer_error)
