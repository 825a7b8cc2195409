"""What a checkpoint holds of the scheduler, and how a run goes on from it (ASY-07, ASY-08, ASY-01, WSY-10)."""

import asyncio
import random
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from megatron_sao.errors import CheckpointError, DataError, ProtocolError
from megatron_sao.records import Trajectory, encode
from megatron_sao.rollout.calculator import Calculator
from megatron_sao.rollout.environment import split_of
from megatron_sao.rollout.prompts import PromptSource
from megatron_sao.schedule.buffer import Buffer
from megatron_sao.schedule.dispatcher import Dispatcher
from megatron_sao.schedule.ledger import Ledger
from megatron_sao.schedule.snapshot import SchedulerState, Snapshot, read_snapshot
from megatron_sao.schedule.totals import Totals
from tests.schedule.support import make_prompt, make_trajectory

TEN = [{"prompt": f"q{i}"} for i in range(100) if split_of({"prompt": f"q{i}"}) == "train"][:10]


def source(tasks=TEN, **changes) -> PromptSource:
    return PromptSource("train", "calculator", Calculator(), **{"seed": 1, "tasks": tasks, **changes})


def snapshot(ledger: Ledger, buffer: Buffer, prompts: dict, *, step: int = 0, **changes) -> Snapshot:
    state = SchedulerState(step=step, policy_version=0, prompts=prompts, num_trajectories=len(buffer), totals=Totals(),
                           observer={})
    return Snapshot(state, buffer.all(), ledger.freeze())


class Bench:
    """Ledger, buffer and dispatcher of one start of a run; a test says which episodes end."""

    def __init__(self, path: Path, prompts: PromptSource, saved: Path | None = None) -> None:
        kept = []
        if saved:
            read = read_snapshot(saved)
            shutil.copyfile(read.ledger_path, path)
            prompts.restore(read.state.prompts)
            kept = read.trajectories
        self.prompts, self.ledger, self.buffer = prompts, Ledger(path), Buffer()
        for trajectory in kept:
            self.buffer.put(trajectory)
        self.issued: list[str] = []
        self.num_wanted = 0
        self._ends: dict[str, asyncio.Future] = {}
        self.dispatcher = Dispatcher(
            prompts=prompts,
            again=self.ledger.put_back(trajectory.prompt.prompt_id for trajectory in kept),
            run_episode=self._play,
            ledger=self.ledger,
            buffer=self.buffer,
            num_to_issue=lambda num_running: self.num_wanted,
            on_failure=self._fail,
        )

    async def _play(self, prompt) -> Trajectory:
        self.issued.append(prompt.prompt_id)
        self._ends[prompt.prompt_id] = asyncio.get_running_loop().create_future()
        await self._ends[prompt.prompt_id]
        return make_trajectory(prompt.prompt_id)

    def _fail(self, error: BaseException) -> None:
        raise AssertionError("nothing fails here") from error

    async def issue(self, num_prompts: int) -> list[str]:
        """So many more episodes begin. -> their prompts"""
        before, self.num_wanted = len(self.issued), num_prompts
        self.dispatcher.start()
        self.num_wanted = 0
        await asyncio.sleep(0)
        return self.issued[before:]

    async def end(self, *prompt_ids: str) -> None:
        """These episodes come to their end, in this order."""
        for prompt_id in prompt_ids:
            self._ends[prompt_id].set_result(None)
            while self.ledger.state(prompt_id) == "in_flight":
                await asyncio.sleep(0)

    def train(self, num: int) -> list[str]:
        """One step on so many."""
        taken, _ = self.buffer.take(num, 0, 10)
        ids = [trajectory.prompt.prompt_id for trajectory in taken]
        self.ledger.take(ids, phase="train", step=0)
        self.ledger.train(ids)
        return ids

    def save(self, folder: Path, **changes) -> Path:
        folder.mkdir(parents=True)
        snapshot(self.ledger, self.buffer, self.prompts.state(), **changes).write(folder)
        return folder

    async def close(self) -> None:
        await self.dispatcher.stop()
        self.ledger.close()


def ids(*numbers: int, epoch: int = 0) -> list[str]:
    return [f"train/e{epoch}/{number}" for number in numbers]


def test_in_flight_comes_first_then_the_buffer_then_what_was_never_issued(tmp_path):  # ASY-07
    async def run():
        first = Bench(tmp_path / "1.sqlite", source(shuffle=False))
        assert await first.issue(7) == ids(0, 1, 2, 3, 4, 5, 6)
        await first.end(*ids(0, 1, 2, 3))
        assert first.train(4) == ids(0, 1, 2, 3)
        await first.end(*ids(6))
        assert first.prompts.cursor == 7
        saved = first.save(tmp_path / "saved")
        # What happens after it does not count: it is rolled back.
        await first.end(*ids(4, 5))
        assert await first.issue(2) == ids(7, 8)
        first.train(3)
        await first.close()

        second = Bench(tmp_path / "2.sqlite", source(shuffle=False), saved)
        assert len(second.buffer) == 1
        assert await second.issue(2) == ids(4, 5)
        await second.end(*ids(5, 4))
        assert second.train(3) == ids(6, 5, 4)
        assert await second.issue(3) == ids(7, 8, 9)
        await second.end(*ids(7, 8, 9))
        second.train(3)
        counts = second.ledger.check()
        assert (counts.issued, counts.trained) == (10, 10)
        assert [await second.issue(1), second.prompts.epoch] == [ids(0, epoch=1), 1]
        await second.close()

    asyncio.run(run())


def test_another_restart_before_the_first_ones_are_issued_again(tmp_path):  # ASY-07, a variation
    async def run():
        first = Bench(tmp_path / "1.sqlite", source(shuffle=False))
        await first.issue(5)
        await first.end(*ids(2))
        second = Bench(tmp_path / "2.sqlite", source(shuffle=False), first.save(tmp_path / "saved1"))
        assert await second.issue(1) == ids(0)
        third = Bench(tmp_path / "3.sqlite", source(shuffle=False), second.save(tmp_path / "saved2"))
        assert await third.issue(6) == ids(0, 1, 3, 4, 5, 6)
        await third.end(*ids(0, 1, 3, 4, 5, 6))
        assert third.train(7) == ids(2, 0, 1, 3, 4, 5, 6)
        for bench in (first, second, third):
            await bench.close()

    asyncio.run(run())


@pytest.mark.parametrize("rollouts", [1, 3])
def test_every_prompt_is_trained_once_an_epoch_wherever_a_run_is_interrupted(tmp_path, rollouts):  # ASY-07, random
    given = dict(rollouts_per_prompt=rollouts)
    an_epoch = 10 * rollouts
    uninterrupted = [prompt.prompt_id for prompt in source(**given).take(3 * an_epoch)]

    async def run(seed: int) -> None:
        rng, saved, trained = random.Random(seed), None, []
        for start in range(6):
            bench = Bench(tmp_path / f"{seed}-{start}.sqlite", source(**given), saved)
            trained_here = list(trained)
            is_last, num_steps = start == 5, rng.randrange(1, 25)
            saved_at = rng.randrange(num_steps)
            for step in range(1000 if is_last else num_steps):
                running, counts = bench.dispatcher.running_ids, bench.ledger.counts()
                num_left = 3 * an_epoch - counts.issued + counts.in_flight - len(running)
                await bench.issue(min(rng.randrange(4), num_left))
                await bench.end(*rng.sample(running, min(len(running), rng.randrange(4))))
                trained_here += bench.train(rng.randrange(1, 5)) or (bench.train(1) if is_last else [])
                if not is_last and step == saved_at:
                    saved, trained = bench.save(tmp_path / f"{seed}-{start}"), list(trained_here)
                if len(trained_here) == 3 * an_epoch:
                    break
            counts = bench.ledger.check()
            await bench.close()
            if counts.trained == 3 * an_epoch and is_last:
                assert sorted(trained_here) == sorted(uninterrupted)
                rows = sqlite3.connect(tmp_path / f"{seed}-{start}.sqlite").execute(
                    "SELECT prompt_id FROM prompts ORDER BY number")
                assert [prompt_id for (prompt_id,) in rows] == uninterrupted  # the shuffled epochs 2 and 3 included
                return
        raise AssertionError("it did not come to its end")

    for seed in range(4):
        asyncio.run(run(seed))


def test_each_checkpoint_holds_the_position_of_its_own_moment(tmp_path):  # ASY-08
    async def run():
        bench = Bench(tmp_path / "1.sqlite", source(num_prompts=0, tasks=None))
        await bench.issue(64)
        after_3 = snapshot(bench.ledger, bench.buffer, bench.prompts.state(), step=3)  # not written yet
        await bench.issue(32)  # rollout 4 moves on
        after_4 = bench.save(tmp_path / "4", step=4)
        (tmp_path / "3").mkdir()
        after_3.write(tmp_path / "3")
        await bench.close()
        saved = {folder.name: read_snapshot(folder) for folder in (tmp_path / "3", after_4)}
        assert {name: (one.state.step, one.state.prompts["cursor"]) for name, one in saved.items()} == {
            "3": (3, 64), "4": (4, 96)}
        for name, one in saved.items():
            copy = shutil.copyfile(one.ledger_path, tmp_path / f"of-{name}.sqlite")
            assert Ledger(copy).check().in_flight == one.state.prompts["cursor"]

    asyncio.run(run())


def test_a_snapshot_is_of_one_moment_however_late_it_is_written(tmp_path):  # ASY-08, a variation
    async def run():
        bench = Bench(tmp_path / "1.sqlite", source(shuffle=False))
        await bench.issue(6)
        await bench.end(*ids(0, 1, 2))
        early = snapshot(bench.ledger, bench.buffer, bench.prompts.state())
        await bench.end(*ids(3, 4))
        assert bench.train(5) == ids(0, 1, 2, 3, 4)
        await bench.issue(3)
        (tmp_path / "saved").mkdir()
        early.write(tmp_path / "saved")
        assert bench.ledger.check().trained == 5
        await bench.close()
        after = Bench(tmp_path / "2.sqlite", source(shuffle=False), tmp_path / "saved")
        counts = after.ledger.check()
        assert (counts.issued, counts.buffered, counts.in_flight, counts.trained) == (6, 3, 3, 0)
        assert await after.issue(4) == ids(3, 4, 5, 6)
        await after.close()

    asyncio.run(run())


def test_trajectories_come_back_bit_by_bit_and_in_order(tmp_path):
    async def run():
        ledger, buffer = Ledger(tmp_path / "1.sqlite"), Buffer()
        for number, versions in enumerate([(7,) * 5 + (8,) * 3, (9,), (0, 0)]):
            ledger.issue(make_prompt(f"p{number}"))
            ledger.finish(f"p{number}")
            trajectory = make_trajectory(f"p{number}", versions, reward=-0.25, metrics={"tool_calls": 1.5})
            trajectory.logp_sampler[-1] = np.float32(-1e-30)
            buffer.put(trajectory)
        (tmp_path / "saved").mkdir()
        snapshot(ledger, buffer, {}).write(tmp_path / "saved")
        read = read_snapshot(tmp_path / "saved")
        assert [encode(t) for t in read.trajectories] == [encode(t) for t in buffer.all()]
        assert [t.oldest_version for t in read.trajectories] == [7, 9, 0]
        ledger.close()

    asyncio.run(run())


def test_a_checkpoint_is_not_changed_by_reading_it(tmp_path):
    async def run():
        bench = Bench(tmp_path / "1.sqlite", source())
        await bench.issue(3)
        saved = bench.save(tmp_path / "saved")
        before = {path.name: path.read_bytes() for path in saved.iterdir()}
        assert set(before) == {"ledger.sqlite", "trajectories.msgpack", "state.json"}
        again = Bench(tmp_path / "2.sqlite", source(), saved)
        await again.issue(5)
        assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
        for one in (bench, again):
            await one.close()

    asyncio.run(run())


@pytest.mark.parametrize("name", ["state.json", "ledger.sqlite", "trajectories.msgpack"])
def test_a_file_that_is_missing_or_cut_is_named(tmp_path, name):
    async def save():
        bench = Bench(tmp_path / "1.sqlite", source())
        await bench.issue(3)
        await bench.end(*bench.issued)
        bench.save(tmp_path / "saved")
        await bench.close()

    asyncio.run(save())
    path = tmp_path / "saved" / name
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(CheckpointError, match=name):
        read_snapshot(tmp_path / "saved")
    if name != "ledger.sqlite":
        for size in (0, 5, len(whole) - 1):
            path.write_bytes(whole[:size])
            with pytest.raises(CheckpointError, match=name):
                read_snapshot(tmp_path / "saved")


def test_a_position_of_another_task_or_seed_is_refused(tmp_path):
    state = source().state()
    for other in (source(seed=2), source(TEN[:9]), source(None)):
        with pytest.raises(DataError, match="same task and run.seed"):
            other.restore(state)


def test_trajectories_that_do_not_belong_to_the_ledger_are_refused(tmp_path):
    ledger = Ledger(tmp_path / "1.sqlite")
    ledger.issue(make_prompt("a"))
    for kept, said in (("a", "in_flight"), ("b", "never issued")):
        with pytest.raises(ProtocolError, match=said):
            ledger.put_back([kept])
    assert [prompt.prompt_id for prompt in ledger.put_back([])] == ["a"]
    ledger.close()
