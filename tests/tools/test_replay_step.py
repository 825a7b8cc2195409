"""A step of a run replayed as a user would do it."""

import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.checkpoints import config_hash
from megatron_sao.cli.run_folder import RunStart, write_start
from megatron_sao.config import to_toml
from megatron_sao.errors import ConfigError, DataError
from megatron_sao.observe.metrics import MetricsSink
from megatron_sao.observe.trajectories import trajectories_path, write_trajectories
from megatron_sao.train.progress import Progress
from tests.support.ranks import run_ranks
from tests.support.saved_runs import batch_of, start, train_until

TOOL = Path(__file__).parents[2] / "tools" / "replay_step.py"
STEPS = 4  # the first two of them the value warm-up's; a checkpoint after the second


def replay(*arguments):
    """-> (exit code, what rank 0 printed), in this process."""
    spec = importlib.util.spec_from_file_location("replay_step", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = tool.main([str(argument) for argument in arguments])
    return code, said.getvalue()


def recorded_run(folder, run):
    """Trains and writes down what the scheduler would, of two ranks."""
    trainer, saving = start(folder, run / "checkpoints", ["parallel.tp=2", "parallel.ep=2"])
    progress = Progress.at_start(trainer.config)
    sink = MetricsSink(run) if trainer.world.is_first else None
    for step, phase in ((1, "value_warmup"), (2, "value_warmup"), (3, "train"), (4, "train")):
        batch = batch_of(step, progress.policy_version)
        (metrics,) = train_until(trainer, progress, step)
        if sink:
            settings = config_hash(to_toml(trainer.config))
            sink.log(step, phase, metrics | {"rollout/pass_rate": 0.5, "config_hash": settings})
            path = trajectories_path(run, phase, step)
            write_trajectories(path, batch, phase=phase, step=step, decode=lambda ids: "")
        if step == 2:
            saving.save(progress)
    if sink:
        (run / "config.toml").write_text(to_toml(trainer.config))
        write_start(run, RunStart(model=folder, resume=None))
        sink.close()


@pytest.fixture(scope="module")
def recorded(tiny_folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "recorded"
    run.mkdir()
    run_ranks(2, recorded_run, tiny_folder, run, timeout_s=120)
    return run


@pytest.fixture
def run(recorded, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(recorded, tmp_path / "copy")


def change_record(run, step, change):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps(change(record) if record["step"] == step else record) for record in records]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def change_settings(path):
    path.write_text(path.read_text().replace("lr = 0.01", "lr = 0.1"))


def largest_difference(said):
    return float(re.search(r"max_rel_diff=(\S+)", said)[1])


def test_on_the_layout_of_the_run_a_replayed_step_is_the_recorded_one(recorded):
    (code, said), (other_code, nothing) = run_ranks(2, replay, recorded, 4, timeout_s=120)
    assert (code, other_code, nothing) == (0, 0, "")
    assert "REPLAY step=4 phase=train from=step-000002 metrics=" in said
    assert largest_difference(said) == 0.0
    table = dict(line.split(maxsplit=1) for line in said.splitlines()[1:-1])
    assert {"policy/loss", "value/loss", "policy/grad_norm", "policy/entropy"} <= table.keys()
    assert "rollout/pass_rate" not in table, "no metric of the trainer"


def test_one_process_replays_a_run_of_two_ranks(recorded):
    """As a user starts it; a step of the warm-up, before any checkpoint."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, str(TOOL), str(recorded), "2"], capture_output=True, text=True, timeout=180, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "REPLAY step=2 phase=value_warmup from=model metrics=" in done.stdout
    assert 0 < largest_difference(done.stdout) < 1e-4


def test_a_recorded_loss_that_does_not_come_out_is_shown(run):
    change_record(run, 4, lambda record: record | {"policy/loss": record["policy/loss"] * 1.5})
    ((code, said),) = run_ranks(1, replay, run, 4, timeout_s=120)
    assert code == 1 and largest_difference(said) == pytest.approx(1 / 3, abs=0.01)


def test_a_step_is_replayed_with_the_settings_that_it_had(run):
    """The run went on from step 4 with other rates: the checkpoint before it holds those of the step."""
    change_settings(run / "config.toml")
    ((code, said),) = run_ranks(1, replay, run, 4, timeout_s=120)
    assert code == 0 and largest_difference(said) < 1e-4


def test_a_step_whose_settings_are_not_known_is_refused(run):
    change_settings(run / "config.toml")
    change_record(run, 4, lambda record: record | {"config_hash": config_hash((run / "config.toml").read_text())})
    with pytest.raises(DataError, match="from step-000002, but step 3 on the way was trained with other settings"):
        replay(run, 4)
    assert "with the settings in " + str(run / "checkpoints" / "step-000002") in replay(run, 3, "--dry-run")[1]
    change_settings(run / "checkpoints" / "step-000002" / "config.toml")
    with pytest.raises(DataError, match="step 3 was trained with settings that are no longer there"):
        replay(run, 3)
    change_record(run, 3, lambda record: {name: record[name] for name in record if name != "config_hash"})
    with pytest.raises(DataError, match="does not say with which settings step 3 was trained"):
        replay(run, 3)


def test_what_a_replay_lacks_is_named(run):
    assert replay(run, 4, "--dry-run") == (
        0,
        "dry run, nothing trained. Step 4 (train) would be reached from step-000002, with the settings in"
        f" {run}/config.toml, by training on:\n"
        f"  {run}/trajectories/train-000003.parquet\n  {run}/trajectories/train-000004.parquet\n",
    )
    with pytest.raises(DataError, match="has no line of step 5; its last step is 4"):
        replay(run, 5)
    (run / "run.json").unlink()
    with pytest.raises(ConfigError, match="is no prepared run folder"):
        replay(run, 4)
    (run / "trajectories" / "train-000003.parquet").unlink()
    with pytest.raises(DataError, match="needs the trajectories of steps 3 to 4, but .*train-000003.parquet is missing"):
        replay(run, 4)
