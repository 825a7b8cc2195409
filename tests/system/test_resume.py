"""One run that is ended at stated points, nearly always by SIGKILL, and goes on from its newest checkpoint each time.

Each test is one end and the next start, and leaves the run as the next one finds it; the last ones look at the whole.
Where a process is when it is killed, it says itself: SIGUSR1 makes a trainer rank write its stack into its log.
"""

import json
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_sao.checkpoints import newest
from megatron_sao.cli.trainer_process import rank_log
from megatron_sao.observe.metrics import read_metrics
from megatron_sao.observe.trajectories import read_trajectories
from tests.support.local_run import ENGINE_CORE, SCHEDULER, TRAINER_RANK, LocalRun
from tests.support.rank_stack import is_inside, stack_of

STEPS = 14
BATCH = 16
GRACE_S = 120
WAIT_S = 300.0  # for one start and a step
END_WITHIN_S = 40.0  # from the fault to the end of the last process


class Chain:
    """The run, and what is common to its starts."""

    def __init__(self, place: Path, model: Path):
        self.place, self.folder = place, place / "runs" / "small"
        self.hold_file, self.hold_save_file = place / "hold", place / "hold_save"
        self._keys = {
            "run.steps": STEPS, "model.path": model, "warm_start.enabled": "false",
            "task.environment": "tests.support.held_letter:HeldLetter", "task.params.hold_file": self.hold_file,
            "task.params.hold_save_file": self.hold_save_file,
            "task.num_eval_prompts": 4, "value.pretrain_trajectories": 0, "value.warmup_steps": 0,
            "engine.restarts": 0, "checkpoint.every_steps": 1, "checkpoint.stop_grace_s": GRACE_S,
            "push.bucket_bytes": 50000,
        }  # fmt: skip
        self.run: LocalRun | None = None

    def start(self, *arguments: str) -> LocalRun:
        """The run goes on; returns once it has done a step since."""
        words = [word for key, value in self._keys.items() for word in (f"--{key}", str(value))]
        if self.run:
            self.run.close()  # if a test before this one failed, it may still be there
        done = self.saved_step()
        self.run = LocalRun(self.place, *words, *arguments, *(["--resume"] if done else []))
        self.run.wait_for(f"\ntrain {done + 1}/{STEPS}", WAIT_S)
        return self.run

    def saved_step(self) -> int:
        """The step of the newest checkpoint."""
        checkpoint = newest(self.folder / "checkpoints")
        return int(checkpoint.name.removeprefix("step-")) if checkpoint else 0

    def rank(self, rank: int) -> psutil.Process:
        (process,) = [found for found in self.run.processes(TRAINER_RANK) if found.environ()["RANK"] == str(rank)]
        return process

    def rank_at(self, rank: int, *places: str) -> psutil.Process:
        """The process of a trainer rank, at a moment when it is inside all of the functions."""
        process = self.rank(rank)
        log = rank_log(self.folder, rank)
        self.wait_until(lambda: is_inside(process, log, *places), f"rank {rank} never is in {places}")
        return process

    def wait_until_trainer_waits(self) -> None:
        """Returns once rank 0 waits for an answer of the scheduler, and has for a while."""
        rank, log = self.rank(0), rank_log(self.folder, 0)
        seen: list[str] = []

        def is_waiting() -> bool:
            seen.append(stack_of(rank, log))
            return len(seen) > 20 and len(set(seen[-20:])) == 1 and " in _wait_for_frames\n" in seen[-1]

        self.wait_until(is_waiting, "rank 0 never waits")

    def check_killed(self, *words: str, exit_code: int = 1) -> None:
        """It ends in time, with a cause that holds the words; no process is left, and no file half written."""
        killed_s = time.monotonic()
        found = self.run.wait(END_WITHIN_S)
        print(f"ended {time.monotonic() - killed_s:.1f} s after the fault:\n{self.run.output}")  # pytest -rP shows it
        assert found == exit_code, self.run.output
        assert self.run.processes() == []
        assert "Traceback" not in self.run.output
        _, *messages = self.run.output.split("\nerror: ")
        assert len(messages) == 1, self.run.output
        for word in words:
            assert word in messages[0]
        assert self.saved_step() >= 1
        assert not (self.folder / "export").exists()
        assert not (self.folder / "result.json").exists()
        assert read_metrics(self.folder / "metrics.jsonl")
        for path in (self.folder / "trajectories").iterdir():
            assert read_trajectories(path)
        for path in self.folder.glob("*.json"):
            assert json.loads(path.read_text())

    def check_summary(self) -> None:
        """The scheduler, which was not the one that was killed, has counted every prompt."""
        summary = json.loads((self.folder / "scheduler_summary.json").read_text())
        assert summary["issued"] == summary["trained"] + summary["dropped"] + summary["in_flight"]
        assert summary["outcome"] != "finished"

    def wait_until(self, is_true: Callable[[], bool], fault: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_true():
            assert time.monotonic() < deadline, f"{fault}:\n{self.run.output}"
            assert self.run.processes(SCHEDULER), f"it ended before:\n{self.run.output}"
            time.sleep(0.01)


@pytest.fixture(scope="module")
def chain(tmp_path_factory, tiny_folder):
    chain = Chain(tmp_path_factory.mktemp("chain"), tiny_folder)
    yield chain
    if chain.run:
        chain.run.close()


def test_a_trainer_rank_killed_in_a_step(chain):
    chain.start()
    chain.rank_at(1, "sao_step").kill()
    chain.check_killed("rank 1 of the trainer was killed by SIGKILL")
    chain.check_summary()


def test_a_trainer_rank_killed_in_the_middle_of_a_save(chain):
    chain.start()
    chain.rank_at(0, "save", "write").kill()
    chain.check_killed("rank 0 of the trainer was killed by SIGKILL")
    chain.check_summary()
    assert len(list((chain.folder / "checkpoints").glob("*.partial"))) == 1


def test_a_trainer_rank_killed_in_the_middle_of_a_push(chain):
    chain.start()
    chain.rank_at(1, "push", "_send_buckets").kill()
    chain.check_killed("rank 1 of the trainer was killed by SIGKILL")
    chain.check_summary()


def test_the_scheduler_killed_while_the_trainer_waits_for_a_batch(chain):
    chain.start()
    chain.hold_file.touch()
    chain.wait_until_trainer_waits()
    (scheduler,) = chain.run.processes(SCHEDULER)
    scheduler.kill()
    chain.check_killed("the scheduler was killed by SIGKILL")
    log = rank_log(chain.folder, 0).read_text()
    assert "went away before it answered NeedBatch" in log
    chain.hold_file.unlink()


def test_the_scheduler_killed_while_it_writes_its_part_of_a_checkpoint(chain):
    chain.start()
    (scheduler,) = chain.run.processes(SCHEDULER)

    chain.hold_save_file.touch()
    halted = chain.hold_save_file.with_suffix(".reached")
    chain.wait_until(halted.exists, "the scheduler never saves")
    scheduler.kill()
    chain.hold_save_file.unlink()
    (folder,) = (chain.folder / "checkpoints").glob("*.partial/scheduler")
    assert (folder / "ledger.sqlite").exists() and not (folder / "state.json").exists()
    chain.check_killed("the scheduler was killed by SIGKILL")
    log = rank_log(chain.folder, 0).read_text()
    assert "went away before it answered SaveState" in log


def test_an_engine_killed_for_good_while_episodes_run(chain):
    run = chain.start()
    (engine,) = [process for process in run.processes() if process.name() == ENGINE_CORE]
    engine.kill()
    chain.check_killed("VLLM::EngineCore", "of the engine at http://127.0.0.1:", "has ended", exit_code=6)
    chain.check_summary()


def test_sigterm_saves_and_ends(chain):
    run = chain.start()
    run.send(signal.SIGTERM)
    assert run.wait(GRACE_S + 10) == 75, run.output
    print(run.output)
    assert run.processes() == []
    assert "error" not in run.output
    assert f"[local] SIGTERM: the run finishes its step, saves and ends within {GRACE_S} s" in run.output
    assert run.output.splitlines()[-1].startswith(f"STOPPED checkpoint={newest(chain.folder / 'checkpoints')} ")
    assert chain.saved_step() < STEPS


def test_another_layout_finishes_it(chain):
    run = chain.start("--parallel.tp", "1", "--parallel.ep", "1")
    assert run.wait(WAIT_S) == 0, run.output
    print(run.output)
    assert run.processes() == []
    assert json.loads((chain.folder / "result.json").read_text())["steps"] == STEPS
    assert list((chain.folder / "checkpoints").glob("*.partial")) == []


# ---- the whole ---------------------------------------------------------------------------------------------------


def test_each_step_was_done_once_and_versions_never_fell(chain):
    records = [record for record in read_metrics(chain.folder / "metrics.jsonl") if record["phase"] == "train"]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert [record["schedule/policy_version"] for record in records] == list(range(STEPS))


def test_the_ledger_balances_and_each_prompt_was_trained_once(chain):
    summary = json.loads((chain.folder / "scheduler_summary.json").read_text())
    assert summary["issued"] == summary["trained"] + summary["dropped"] + summary["in_flight"]
    with sqlite3.connect(chain.folder / "ledger.sqlite") as book:
        issued = dict(book.execute("SELECT prompt_id, state FROM prompts ORDER BY number"))
    assert sorted(issued) == sorted(f"train/e0/{number}" for number in range(len(issued)))  # none left out
    assert summary["issued"] == len(issued)
    trained = [
        trajectory.prompt.prompt_id
        for path in (chain.folder / "trajectories").glob("train-*")
        for trajectory in read_trajectories(path)
    ]
    assert len(trained) == len(set(trained)) == BATCH * STEPS
    assert {prompt_id for prompt_id, state in issued.items() if state == "trained"} == set(trained)
