"""SaveState and resume of a whole scheduler, beside episodes that go on."""

import asyncio

import pytest

from megatron_sao.errors import CheckpointError, ProtocolError
from megatron_sao.records import Hello, NeedBatch, SaveState, StopWanted
from megatron_sao.schedule.ledger import Ledger
from megatron_sao.schedule.snapshot import SchedulerState, Snapshot, read_snapshot
from megatron_sao.schedule.totals import Totals
from tests.schedule.harness import (
    HELLO,
    Stopper,
    finish,
    hello,
    open_push,
    play_together,
    push,
    report,
    save,
    states,
    take,
    train,
)
from tests.schedule.support import make_prompt, make_trajectory
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
    assert balances(summary)
    trained = [i for _, _, ids in first.notes.steps[:6] + second.notes.steps for i in ids]
    assert len(trained) == len(set(trained)) == summary["trained"]
    issued_by_then = saved.state.prompts["position"]
    assert {f"p{i}" for i in range(issued_by_then)} <= {*trained, *second.still_in_flight}


@pytest.mark.parametrize(
    ("version", "num_buffered", "num_in_flight", "num_started"),
    [(25, 0, 0, 32), (25, 5, 0, 27), (25, 0, 5, 32), (25, 5, 5, 27), (0, 0, 0, 32)],
)
def test_capacity_after_a_restart(tmp_path, version, num_buffered, num_in_flight, num_started):  # ASY-01
    """(3 + version + 1) * 8 slots, of which version * 8 were used before: as many are left at any version."""
    stop, started = Stopper(), []

    def trainer(channel, engines):
        hello(channel, at_version(version))
        return channel.request(NeedBatch(step=0, phase="train", num_trajectories=8, policy_version=version))

    async def run_episode(prompt, pool):
        started.append(prompt.prompt_id)
        stop.wanted.set()
        await asyncio.sleep(3600)

    async def write():
        ledger = Ledger(tmp_path / "saved.sqlite")
        kept = [make_trajectory(f"p{i}", versions=(version,)) for i in range(num_buffered)]
        for number in range(num_buffered + num_in_flight):
            ledger.issue(make_prompt(f"p{number}"))
        for trajectory in kept:
            ledger.finish(trajectory.prompt.prompt_id)
        state = SchedulerState(step=1, policy_version=version, prompts={"position": num_buffered + num_in_flight},
                               num_trajectories=num_buffered, totals=Totals(), observer={})
        Snapshot(state, kept, ledger.freeze()).write(tmp_path)
        ledger.close()

    asyncio.run(write())
    out = play_together(tmp_path, trainer, run_episode=run_episode, saved=tmp_path, stopper=stop, linger_s=0.1,
                        batch_trajectories=8, max_staleness=3, max_in_flight=1000)
    assert (out.trainer_error, out.answer) == (None, StopWanted(reason="a test"))
    assert started == [f"p{number}" for number in range(num_buffered, num_buffered + num_started)]


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
