"""The whole system on one machine: makes or takes a model, starts engines, scheduler and trainer, waits for the result.

    python -m megatron_sao.cli.local CONFIG [--section.key value ...] [--dry-run]

Its last line is `RESULT key=value ...`. An engine that dies is started again, `engine.restarts` times; the scheduler
goes on with the others meanwhile. If another process fails, the rest is stopped and its message is the program's: of
the one that failed first, not of those that only lost their partner.
"""

import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from megatron_sao.cli.child import ChildProcess
from megatron_sao.cli.files import CONFIG_FILE, EXPORT_FOLDER, RESULT_FILE
from megatron_sao.cli.kept_engine import KeptEngine, engine_settings
from megatron_sao.cli.options import DRY_RUN, parse_options, run_command
from megatron_sao.cli.preflight import check_before_start, check_model
from megatron_sao.config import Config, check_one_machine, describe, to_toml
from megatron_sao.errors import EngineError, ProtocolError, SaoError
from megatron_sao.observe.progress import Progress
from megatron_sao.rollout.engine_process import EngineProcess

CAUSE_WAIT_S = 10.0  # when a process complains about another: how long that one's own failure may take to be seen

_ABOUT = "Train on this machine: warm start, engines, scheduler and trainer in one command."


def main(argv: Sequence[str]) -> None:
    options = parse_options(argv, about=_ABOUT, switches=DRY_RUN)
    config = options.load_config()
    if "dry-run" in options.switches:
        print(describe(config))
        return
    signal.signal(signal.SIGTERM, _raise_interrupt)  # so that `finally` runs and no child is left behind
    run(config, started=time.monotonic())


def run(config: Config, started: float) -> None:
    """One run from first to last line. Raises: SaoError with the message of whatever failed first."""
    check_one_machine(config)
    check_before_start(config)
    model_folder = prepare_model(config)
    check_model(config, model_folder)
    run_folder = new_run_folder(Path(config.run.folder) / config.run.name)
    config_path = run_folder / CONFIG_FILE
    config_path.write_text(to_toml(config))
    say(f"run folder {run_folder}, logs in {run_folder / 'logs'}")
    with ExitStack() as running:
        engines = []
        for number in range(config.engine.count):
            engines.append(_start_engine(config, number, model_folder, run_folder))
            running.callback(engines[-1].process.stop)
        trainer = _start_trainer(config, config_path, model_folder, run_folder)
        running.callback(trainer.stop)
        scheduler = _start_scheduler(config_path, model_folder, run_folder, [engine.process.url for engine in engines])
        running.callback(scheduler.stop)
        say(f"starting {len(engines)} engine(s), {config.parallel.world_size} trainer ranks and the scheduler")
        _wait_until_ready(engines, [scheduler, trainer])
        _supervise(engines, trainer, scheduler)
    report_result(run_folder, time.monotonic() - started)


def say(message: str) -> None:
    print(f"[local] {message}", flush=True)


def prepare_model(config: Config) -> Path:
    """The model folder to start from: `model.path`, or the demonstration model after its warm start."""
    if config.model.path:
        return Path(config.model.path)
    from megatron_sao.train.warm_start import prepare_demonstration_model

    with Progress() as progress:
        return prepare_demonstration_model(config, progress.update)


def new_run_folder(path: Path) -> Path:
    """An empty folder at `path`; an earlier run there is moved aside, nothing is overwritten."""
    if path.exists():
        number = next(n for n in range(1, 10**6) if not path.with_name(f"{path.name}.{n}").exists())
        path.rename(path.with_name(f"{path.name}.{number}"))
        say(f"{path} holds an earlier run: moved to {path.name}.{number}")
    path.mkdir(parents=True)
    return path


def _start_engine(config: Config, number: int, model_folder: Path, run_folder: Path) -> KeptEngine:
    log_path = run_folder / "logs" / f"engine-{number}.log"
    process = EngineProcess(engine_settings(config, number, model_folder, log_path)).start()
    return KeptEngine(process, config.engine.restarts, say)


def _start_scheduler(config_path: Path, model_folder: Path, run_folder: Path, urls: list[str]) -> ChildProcess:
    command = [sys.executable, "-m", "megatron_sao.cli.scheduler", str(config_path), "--run-folder", str(run_folder)]
    command += ["--model", str(model_folder), "--engines", ",".join(urls)]
    return ChildProcess("scheduler", command, run_folder / "logs" / "scheduler.log", shows_output=True)


def _start_trainer(config: Config, config_path: Path, model_folder: Path, run_folder: Path) -> ChildProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(config.parallel.world_size), "-m", "megatron_sao.cli.train", str(config_path)]
    command += ["--run-folder", str(run_folder), "--model", str(model_folder)]
    env = {
        "OMP_NUM_THREADS": str(config.run.threads_per_process),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",  # Megatron's notes on each package that a CPU does not have
    }
    return ChildProcess("trainer", command, run_folder / "logs" / "trainer.log", env)


def _wait_until_ready(engines: list[KeptEngine], others: list[ChildProcess]) -> None:
    for engine in engines:
        seconds = engine.wait_ready(meanwhile=lambda: _check(engines, others))
        say(f"engine {engine.process.url} ready after {seconds:.0f} s")


# Exit codes of a process that complains about another one, which mostly has ended or is about to.
_BLAMES_ANOTHER = (ProtocolError.exit_code, EngineError.exit_code)


def _check(engines: list[KeptEngine], children: list[ChildProcess]) -> None:
    """Raises: the error of the process that ended badly, for the reason nearest to the cause."""
    deadline = time.monotonic() + CAUSE_WAIT_S
    while True:
        for engine in engines:
            engine.check()
        failures = [failure for child in children if (failure := child.failure())]
        if not failures:
            return
        own = [failure for failure in failures if failure.exit_code not in _BLAMES_ANOTHER]
        if own or time.monotonic() > deadline:
            cause = (own or failures)[0]
            error = SaoError(cause.message)
            error.exit_code = cause.exit_code
            raise error
        time.sleep(0.1)


def _supervise(engines: list[KeptEngine], trainer: ChildProcess, scheduler: ChildProcess) -> None:
    """Wait until trainer and scheduler are through; the scheduler shows the progress. Raises: as `_check`."""
    while trainer.exit_code is None or scheduler.exit_code is None:
        _check(engines, [scheduler, trainer])
        time.sleep(0.2)
    _check([], [scheduler, trainer])


def report_result(run_folder: Path, seconds: float) -> None:
    """Print where things are and the RESULT line."""
    result = json.loads((run_folder / RESULT_FILE).read_text())
    above, total = result["lag0_tokens_above_1e-4"], result["lag0_tokens"]
    say(f"log-probs of learner and sampler differ by more than 1e-4 on {above:.0f} of {total:.0f} tokens at lag 0")
    say(f"{result['frozen_tensors_unchanged']:.0f} frozen tensors of the value model are bit-identical")
    say(f"exported policy: {run_folder / EXPORT_FOLDER}")
    print(
        f"RESULT pass_rate_before={result['pass_rate_before']:.3f} pass_rate_after={result['pass_rate_after']:.3f}"
        f" steps={result['steps']:.0f} seconds={seconds:.0f} logp_diff_lag0_max={result['logp_diff_lag0_max']:.1e}"
        f" lag_max={result['lag_max']:.0f}",
        flush=True,
    )


def _raise_interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    run_command(main)
