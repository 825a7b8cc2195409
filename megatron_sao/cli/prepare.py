"""Makes ready what a run needs before its processes start: a checked configuration, the model, the run folder.

    python -m megatron_sao.cli.prepare CONFIG [--section.key value ...] [--resume | --resume-or-start | --requeued]
        [--dry-run]

Its last line is the run folder. There `config.toml` is what the processes are started with, and `run.json` says which
model they start from and which checkpoint they go on from. Resuming is another thing than starting from weights, which
is a new run with `model.path`: it counts from 0, with fresh optimizers and every prompt still to come.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_sao.checkpoints import newest, put_back_replaced
from megatron_sao.cli.files import CHECKPOINTS_FOLDER, CONFIG_FILE
from megatron_sao.cli.options import DRY_RUN, Options, parse_options, run_command
from megatron_sao.cli.preflight import check_before_start, check_model, check_not_running
from megatron_sao.cli.run_folder import RunStart, clear_attempt, make_run_folder, read_start, write_start
from megatron_sao.config import Config, changes_since, describe, to_toml
from megatron_sao.errors import ConfigError
from megatron_sao.observe.progress import Progress

RESUME = "resume"
RESUME_OR_START = "resume-or-start"
REQUEUED = "requeued"
JOB = "SLURM_JOB_ID"
SWITCHES = {
    RESUME: "go on from the newest checkpoint of this run; an error where there is none",
    RESUME_OR_START: "go on from the newest checkpoint of this run, or start it where there is none",
    REQUEUED: "the same, but only if this job of SLURM's has begun that run: an earlier one of its name is moved aside",
    **DRY_RUN,
}

_ABOUT = "Check a configuration, and make model and run folder ready; the last line is the run folder."


def main(argv: Sequence[str]) -> None:
    options = parse_options(argv, about=_ABOUT, switches=SWITCHES)
    config = options.load_config()
    if "dry-run" in options.switches:
        print(describe(config))
        return
    print(prepare(config, options, print))


def prepare(config: Config, options: Options, say: Callable[[str], None]) -> Path:
    """Everything up to the start of the processes. Returns: the run folder.

    Raises: ConfigError, DataError, CheckpointError. Effect: makes the folder, or continues it.
    """
    folder = Path(config.run.folder) / config.run.name
    check_not_running(folder)  # first: it writes checkpoints, and a port of its own would be found in use
    checkpoint = _checkpoint_to_resume(folder, options)
    for change in changes_since(checkpoint, config) if checkpoint else ():
        say(f"changed since {checkpoint.name}: {change}")
    if checkpoint is None:
        _check_nothing_needed_is_moved(config, folder)
    check_before_start(config)
    model_folder = (_model_of(folder) if checkpoint else None) or _model_folder(config)
    check_model(config, model_folder)
    if checkpoint:
        clear_attempt(folder)
        say(f"going on from {checkpoint}")
    elif aside := make_run_folder(folder):
        say(f"{folder} holds an earlier run: moved to {aside.name}")
    (folder / CONFIG_FILE).write_text(to_toml(config), encoding="utf-8")
    write_start(folder, RunStart(model_folder, checkpoint, os.environ.get(JOB)))
    return folder


def _checkpoint_to_resume(folder: Path, options: Options) -> Path | None:
    """Raises: ConfigError when a run shall be resumed that has saved nothing.

    Effect: a checkpoint that the run was about to replace when it was killed has its name again.
    """
    chosen = [switch for switch in (RESUME, RESUME_OR_START, REQUEUED) if switch in options.switches]
    if len(chosen) > 1:
        raise ConfigError(f"--{chosen[0]} and --{chosen[1]} are given; choose one")
    if not chosen or chosen == [REQUEUED] and not _is_of_this_job(folder):
        return None
    put_back_replaced(folder / CHECKPOINTS_FOLDER)
    checkpoint = newest(folder / CHECKPOINTS_FOLDER)
    if checkpoint is None and RESUME in options.switches:
        what = "holds no finished checkpoint" if folder.exists() else "does not exist"
        raise ConfigError(
            f"--{RESUME}: {folder} {what}; run.folder and run.name say which run is resumed, and without --{RESUME} a"
            " new one is started"
        )
    return checkpoint


def _is_of_this_job(folder: Path) -> bool:
    """This job of SLURM's has prepared the run there, in an earlier attempt. Raises: ConfigError outside of SLURM."""
    if JOB not in os.environ:
        raise ConfigError(f"--{REQUEUED} is for a job of SLURM's; {JOB} is not set")
    try:
        return read_start(folder).job == os.environ[JOB]
    except ConfigError:
        return False


def _check_nothing_needed_is_moved(config: Config, folder: Path) -> None:
    """A new run does not read what it moves aside with an earlier run of its name. Raises: ConfigError."""
    needed = {"model.path": config.model.path, "task.prompts_file": config.task.prompts_file}
    if not config.model.path:
        needed["warm_start.cache_folder"] = config.warm_start.cache_folder
    faults = [
        f"{key} = {path!r} lies in {folder}, where this run will be: what stands there is moved aside before it begins;"
        " give the run another run.name, or copy this elsewhere"
        for key, path in needed.items()
        if path and _lies_in(Path(path), folder)
    ]
    if faults:
        raise ConfigError("\n".join(faults))


def _lies_in(path: Path, folder: Path) -> bool:
    """As the two are written, or where links lead."""
    tops = (Path(os.path.abspath(folder)), folder.resolve())
    return any(place.is_relative_to(top) for place in (Path(os.path.abspath(path)), path.resolve()) for top in tops)


def _model_of(folder: Path) -> Path | None:
    """What the run in `folder` began with; None = it is gone, or an attempt to go on ended before it said so again."""
    try:
        model = read_start(folder).model
    except ConfigError:
        return None
    return model if model.is_dir() else None


def _model_folder(config: Config) -> Path:
    """The model folder to start from: `model.path`, or the demonstration model after its warm start."""
    if config.model.path:
        return Path(config.model.path)
    from megatron_sao.train.warm_start import prepare_demonstration_model

    with Progress() as progress:
        return prepare_demonstration_model(config, progress.update)


if __name__ == "__main__":
    run_command(main)
