"""One trainer rank, started by torchrun:

    torchrun --nproc-per-node 2 -m megatron_sao.cli.train runs/local/config.toml --run-folder runs/local

It waits for the scheduler's address in the prepared run folder (cli/prepare.py), starts from the model or goes on from
the checkpoint that `run.json` there names, trains, exports the policy to `export/`, and leaves the figures of the run
in `result.json`. A run that was told to stop saves and leaves no result.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_sao.cli.files import ADDRESS_FILE, CHECKPOINTS_FOLDER, EXPORT_FOLDER, RESULT_FILE, SUMMARY_FILE
from megatron_sao.cli.options import DRY_RUN, parse_options, run_command
from megatron_sao.cli.preflight import check_model
from megatron_sao.cli.rank_end import RankEnd
from megatron_sao.cli.run_folder import RunStart, announced_scheduler, read_start
from megatron_sao.cli.stop import stop_on_sigterm
from megatron_sao.cli.trainer_process import rank_log
from megatron_sao.config import Config, check_is_built, check_nodes, check_world_size, describe
from megatron_sao.errors import ConfigError, ProtocolError
from megatron_sao.records import STOPPED

SCHEDULER_START_S = 120.0  # that the scheduler takes itself, beside the engines' start, on a busy machine

_ABOUT = "One rank of the trainer; torchrun starts all of them."
_VALUES = {
    "run-folder": "prepared folder of this run; the scheduler writes its address there",
    "host": "address of trainer rank 0 that the engines can reach (default 127.0.0.1)",
}
_SWITCHES = {"own-log": "write to logs/trainer-rank-N.log in the run folder instead of where torchrun writes"}


def main(argv: Sequence[str]) -> None:
    with RankEnd() as end:
        _main(argv, end)


def _main(argv: Sequence[str], end: RankEnd) -> None:
    options = parse_options(argv, about=_ABOUT, values=_VALUES, switches=DRY_RUN | _SWITCHES)
    if "dry-run" in options.switches:
        if int(os.environ.get("RANK", 0)) == 0:
            print(describe(options.load_config()))
        return
    if "run-folder" in options.values:
        _begin(Path(options.values["run-folder"]), "own-log" in options.switches)
    config = options.load_config()
    check_is_built(config)
    check_world_size(config, int(os.environ.get("WORLD_SIZE", 1)))
    check_nodes(config, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if "run-folder" not in options.values:
        raise ConfigError(f"--run-folder is missing: {_VALUES['run-folder']}")
    run_folder = Path(options.values["run-folder"])
    start = read_start(run_folder)
    check_model(config, start.model)
    host = options.values.get("host", "127.0.0.1")
    end.watch(config, host)
    run_trainer(config, run_folder, start, host)


def _begin(run_folder: Path, has_own_log: bool) -> None:
    """Effect: signals mean what they shall mean in a rank, and output goes where it shall go.

    SIGUSR1 writes where every thread of the rank is: for a run that seems to hang.
    """
    stop_on_sigterm(run_folder)
    faulthandler.register(signal.SIGUSR1)
    if has_own_log:
        log = rank_log(run_folder, int(os.environ.get("RANK", 0)))
        log.parent.mkdir(exist_ok=True)
        with log.open("wb") as file:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(file.fileno(), stream.fileno())


def run_trainer(config: Config, run_folder: Path, start: RunStart, host: str) -> None:
    """Everything between start and end of one rank. Collective: every rank of the world."""
    import torch

    from megatron_sao.models.hf_folder import HFFolder
    from megatron_sao.models.weights import left_out_names, policy_shapes
    from megatron_sao.parallel.exchange import broadcast_object
    from megatron_sao.parallel.init import start_world, stop_world
    from megatron_sao.train.link import SchedulerLink
    from megatron_sao.train.loop import run
    from megatron_sao.train.progress import Progress
    from megatron_sao.train.push import Pusher, longest_push_answer_s
    from megatron_sao.train.saving import Checkpoints
    from megatron_sao.train.setup import build_trainer

    folder = HFFolder(start.model)
    torch.set_num_threads(config.run.threads_per_process)
    torch.use_deterministic_algorithms(config.run.deterministic)
    world = start_world(config)
    trainer = build_trainer(config, folder, world)
    if world.is_first:
        print(f"value model, parameter groups of rank 0:\n{trainer.manifest}", flush=True)
    longest_wait_s = max(config.schedule.batch_timeout_s + 60, longest_push_answer_s(config))
    link = SchedulerLink(_scheduler_address(run_folder, config.engine.start_timeout_s), longest_wait_s)
    names, left_out = (
        listed(folder, trainer.shape, with_mtp=trainer.exporter.has_mtp) for listed in (policy_shapes, left_out_names)
    )
    models = trainer.models
    pusher = Pusher(
        trainer.exporter, names, config, link, host, left_out, wake=lambda: models.turns.take(models.policy)
    )
    checkpoints = Checkpoints(trainer, link, run_folder / CHECKPOINTS_FOLDER)
    progress = checkpoints.restore(start.resume) if start.resume else Progress.at_start(config)
    if broadcast_object(_was_stopped(run_folder)):
        result = None
        print("the run was told to stop before this trainer was ready: nothing to save", flush=True)
    else:
        result = run(trainer, link, pusher, checkpoints, progress, run_folder / EXPORT_FOLDER)
    if world.is_first and result is not None:
        (run_folder / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n")
    link.close()
    stop_world()


def _scheduler_address(run_folder: Path, engine_start_s: float) -> str:
    """Waits for the scheduler, which itself waits for its engines. Raises: ProtocolError when it is not there."""
    wait_s = engine_start_s + SCHEDULER_START_S
    deadline = time.monotonic() + wait_s
    while (scheduler := announced_scheduler(run_folder)) is None or not scheduler.is_ready:
        if (run_folder / SUMMARY_FILE).exists():
            raise ProtocolError("the scheduler ended before it was ready; see its log")
        if time.monotonic() > deadline:
            raise ProtocolError(
                f"no scheduler was ready within {wait_s:.0f} s, which {run_folder / ADDRESS_FILE} would say; see its"
                " log"
            )
        time.sleep(0.1)
    return scheduler.address


def _was_stopped(run_folder: Path) -> bool:
    """The scheduler has ended because the run was told to stop."""
    try:
        return json.loads((run_folder / SUMMARY_FILE).read_text())["outcome"] == STOPPED
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    run_command(main)
