"""One step of a run done again by itself: do its losses come out as they were recorded?

    source launch/env.sh
    python tools/replay_step.py RUN_FOLDER STEP [--model HF_DIR] [--tolerance 1e-4] [--dry-run] [KEY=VALUE ...]
    torchrun --nproc-per-node 2 tools/replay_step.py RUN_FOLDER STEP ...

Starts from the newest checkpoint before the step (or from the model folder, as the run did), trains again on the
trajectories that were written down (run.trajectories_every must not have left one out), and compares every metric that
the trainer computes. The settings are those that the step had, also where the run has gone on with others since: the
run folder or a checkpoint holds them, or the step is refused. One process takes the whole model, whatever the layout of
the run was; under torchrun the layout is that of the run, or what KEY=VALUE say (parallel.tp=2). Prints a table and

    REPLAY step=44 phase=train from=step-000040 metrics=31 max_rel_diff=0.0e+00

Differences are relative, of numbers below 0.01 relative to that. Exit code 0 only if none is above the tolerance. With
run.deterministic and the layout of the run all are 0; another layout adds in another order.
"""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_sao import checkpoints
from megatron_sao.cli.files import CHECKPOINTS_FOLDER, CONFIG_FILE
from megatron_sao.cli.options import hush_libraries, run_command
from megatron_sao.cli.run_folder import read_start
from megatron_sao.config import Config, load_config
from megatron_sao.errors import DataError
from megatron_sao.observe.metrics import CONFIG_HASH, METRICS_FILE, read_metrics
from megatron_sao.observe.trajectories import read_trajectories, trajectories_path
from megatron_sao.records import TRAIN, WARMUP

SMALL = 0.01  # numbers below it are compared as if they were as large
ANYWHERE = {
    f"placement.{who}_{what}": "0" for who in ("trainer", "rollout") for what in ("nodes", "gpus_per_node")
}
ALONE = {f"parallel.{axis}": "1" for axis in ("tp", "pp", "cp", "ep", "etp", "dp", "vpp")} | {
    "parallel.first_stage_layers": "0",
    "parallel.last_stage_layers": "0",
}


@dataclass(frozen=True)
class Plan:
    """What is to be done, from files alone."""

    checkpoint: Path | None  # None = begin with the model folder
    files: dict[int, Path]  # step -> its trajectories
    phase: str
    recorded: Mapping[str, Any]  # metrics of the step


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_folder", metavar="RUN_FOLDER", type=Path)
    parser.add_argument("step", metavar="STEP", type=int)
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="settings other than those of the run")
    parser.add_argument("--model", type=Path, help="HF folder that the run began with (default: as the run says)")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference (default 1e-4)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be read, train nothing, and exit")
    options = parser.parse_args(argv)
    run_folder, step = options.run_folder, options.step
    recorded = _recorded(run_folder, step)
    settings = _settings(run_folder, recorded[step])
    config = _config(settings, options.overrides)
    plan = _plan(run_folder, config, step, recorded)
    start = plan.checkpoint.name if plan.checkpoint else "the model folder"
    if options.dry_run:
        print(
            f"dry run, nothing trained. Step {step} ({plan.phase}) would be reached from {start}, with the settings in"
            f" {settings}, by training on:"
        )
        print("\n".join(f"  {path}" for path in plan.files.values()))
        return 0
    found = _replay(config, options.model or read_start(run_folder).model, plan, step)
    differences = {
        name: _difference(found[name], plan.recorded[name]) for name in sorted(found) if name in plan.recorded
    }
    if not int(os.environ["RANK"]):
        width = max(map(len, ["metric", *differences]))
        print(f"{'metric':<{width}} {'recorded':>14} {'replayed':>14}  difference")
        for name, difference in differences.items():
            print(f"{name:<{width}} {plan.recorded[name]:>14.7g} {found[name]:>14.7g}  {difference:.1e}")
        print(
            f"REPLAY step={step} phase={plan.phase} from={plan.checkpoint.name if plan.checkpoint else 'model'}"
            f" metrics={len(differences)} max_rel_diff={max(differences.values(), default=0.0):.1e}"
        )
    return int(any(difference > options.tolerance for difference in differences.values()))


def _recorded(run_folder: Path, step: int) -> dict[int, Mapping[str, Any]]:
    """The metrics of each step; there are some of `step`."""
    recorded = {
        record["step"]: record  # of a step that was done again after a resume, the last line counts
        for record in read_metrics(run_folder / METRICS_FILE)
        if record["phase"] in (TRAIN, WARMUP)
    }
    if step not in recorded:
        last = max(recorded, default=0)
        raise DataError(f"{run_folder / METRICS_FILE} has no line of step {step}; its last step is {last}")
    return recorded


def _settings(run_folder: Path, recorded: Mapping[str, Any]) -> Path:
    """The file of the configuration that a step was trained with: the newest, or that of a checkpoint."""
    wanted, step = recorded.get(CONFIG_HASH), recorded["step"]
    if wanted is None:
        raise DataError(
            f"{run_folder / METRICS_FILE} does not say with which settings step {step} was trained ({CONFIG_HASH}), as"
            " runs of earlier versions: replay it with the version that trained it"
        )
    places = [run_folder, *reversed(checkpoints.finished(run_folder / CHECKPOINTS_FOLDER))]
    for path in (place / CONFIG_FILE for place in places):
        if path.is_file() and checkpoints.config_hash(path.read_text(encoding="utf-8")) == wanted:
            return path
    raise DataError(
        f"step {step} was trained with settings that are no longer there ({CONFIG_HASH} {wanted[:12]}): the run has"
        f" gone on with others, and neither {run_folder / CONFIG_FILE} nor a checkpoint holds them;"
        " checkpoint.keep_every keeps more of those"
    )


def _config(path: Path, overrides: Sequence[str]) -> Config:
    """The run's; its layout too where as many ranks as it had were started, else that of one process."""
    given = ANYWHERE | dict(override.partition("=")[::2] for override in overrides)
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    if num_ranks == 1 != load_config(path).parallel.world_size:
        given = ALONE | given
    return load_config(path, [f"{key}={value}" for key, value in given.items()])


def _plan(run_folder: Path, config: Config, step: int, recorded: Mapping[int, Mapping[str, Any]]) -> Plan:
    before = [path for path in checkpoints.finished(run_folder / CHECKPOINTS_FOLDER) if _step(path) < step]
    checkpoint = before[-1] if before else None
    if checkpoint is None and config.value.pretrain_trajectories:
        raise DataError(
            f"{run_folder} has no checkpoint before step {step}, and the run began with a value pretraining, which cannot"
            " be replayed; checkpoint.keep_every keeps more of them"
        )
    first = _step(checkpoint) + 1 if checkpoint else 1
    files = {n: trajectories_path(run_folder, recorded[n]["phase"], n) for n in range(first, step + 1) if n in recorded}
    missing = [path for path in files.values() if not path.is_file()]
    if missing or len(files) <= step - first:
        what = f"{missing[0]} is missing" if missing else f"{METRICS_FILE} lacks steps"
        raise DataError(
            f"step {step} needs the trajectories of steps {first} to {step}, but {what}; run.trajectories_every ="
            f" {config.run.trajectories_every}, and with 1 every step can be replayed"
        )
    others = [n for n in files if recorded[n].get(CONFIG_HASH) != recorded[step][CONFIG_HASH]]
    if others:
        raise DataError(
            f"step {step} can only be reached from {checkpoint.name if checkpoint else 'the model folder'}, but step"
            f" {others[-1]} on the way was trained with other settings than step {step} ({CONFIG_HASH}): the run went"
            " on with others in between; checkpoint.keep_every keeps more checkpoints to begin with"
        )
    return Plan(checkpoint, files, recorded[step]["phase"], recorded[step])


def _step(checkpoint: Path) -> int:
    return checkpoints.step_of(checkpoint) or 0


def _replay(config: Config, model_folder: Path, plan: Plan, step: int) -> dict[str, float]:
    """Metrics of the step. Collective: every rank of the world."""
    import torch

    import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
    from megatron_sao.models.hf_folder import HFFolder
    from megatron_sao.parallel.init import start_world, stop_world
    from megatron_sao.train.agreement import Agreement
    from megatron_sao.train.progress import Progress
    from megatron_sao.train.replay import replay_steps
    from megatron_sao.train.restoring import restore
    from megatron_sao.train.setup import build_trainer

    for name, value in dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0").items():
        os.environ.setdefault(name, value)  # torchrun's; without it this process is alone
    torch.set_num_threads(config.run.threads_per_process)
    torch.use_deterministic_algorithms(config.run.deterministic)
    trainer = build_trainer(config, HFFolder(model_folder), start_world(config))
    progress = Progress.at_start(config)
    if plan.checkpoint:
        progress = restore(trainer, plan.checkpoint, Agreement(config.checkpoint.timeout_s))
    for number, result in replay_steps(trainer, progress, lambda n, phase: read_trajectories(plan.files[n])):
        if number == step:
            break
    stop_world()
    return result.metrics


def _difference(a: float, b: float) -> float:
    if math.isnan(a) and math.isnan(b):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b), SMALL) if math.isfinite(a - b) else math.inf


if __name__ == "__main__":
    hush_libraries()
    run_command(main)
