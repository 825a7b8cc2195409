"""The whole system on one machine: makes or takes a model, starts engines, scheduler and trainer, waits for the result.

    python -m megatron_sao.cli.local CONFIG [--section.key value ...] [--resume | --resume-or-start] [--dry-run]

Its last line is `RESULT key=value ...`, or `STOPPED ...` (exit code 75) when it was told to stop and has saved: by
SIGTERM, Ctrl-C or the file `stop` in the run folder. An engine that dies is started again, `engine.restarts` times; the
scheduler goes on with the others meanwhile. If another process fails, the rest is stopped and its message is the
program's: of the one that failed first, not of those that only lost their partner.
"""

import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from megatron_sao.checkpoints import newest
from megatron_sao.cli.child import ChildProcess
from megatron_sao.cli.files import CHECKPOINTS_FOLDER, CONFIG_FILE, EXPORT_FOLDER, LOGS_FOLDER, RESULT_FILE
from megatron_sao.cli.kept_engine import KeptEngine, engine_settings
from megatron_sao.cli.options import Options, parse_options, run_command
from megatron_sao.cli.prepare import SWITCHES, prepare
from megatron_sao.cli.run_folder import read_start
from megatron_sao.cli.stop import StopOnSignal
from megatron_sao.cli.trainer_process import start_trainer
from megatron_sao.config import Config, check_one_machine, describe
from megatron_sao.errors import EngineError, ProtocolError, SaoError
from megatron_sao.rollout.engine_process import EngineProcess

CAUSE_WAIT_S = 10.0  # when a process complains about another: how long that one's own failure may take to be seen

SEES_END_WITHIN_S = 1.0  # the scheduler that of its trainer, for which it ends by itself

_ABOUT = "Train on this machine: warm start, engines, scheduler and trainer in one command."


STOPPED_EXIT_CODE = 75  # as sendmail's EX_TEMPFAIL: nothing is wrong, come again


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv, about=_ABOUT, switches=SWITCHES)
    config = options.load_config()
    if "dry-run" in options.switches:
        print(describe(config))
        return 0
    signal.signal(signal.SIGTERM, _raise_interrupt)  # so that `finally` runs and no child is left behind
    return run(config, options, started=time.monotonic())


def run(config: Config, options: Options, started: float) -> int:
    """One run from first to last line. Returns: the exit code, 75 when it was stopped before its end and has saved.

    Raises: SaoError with the message of whatever failed first.
    """
    check_one_machine(config)
    run_folder = prepare(config, options, say)
    start = read_start(run_folder)
    say(f"run folder {run_folder}, logs in {run_folder / LOGS_FOLDER}")
    with ExitStack() as running:
        stop = StopOnSignal(run_folder, config.checkpoint.stop_grace_s, say)
        engines = []
        for number in range(config.engine.count):
            engines.append(_start_engine(config, number, start.model, run_folder))
            running.callback(engines[-1].process.stop)
        scheduler = _start_scheduler(run_folder, [engine.process.url for engine in engines])
        running.callback(scheduler.stop)
        running.callback(scheduler.wait, SEES_END_WITHIN_S)
        trainer = start_trainer(config, run_folder)
        running.callback(trainer.stop, grace_s=0.0)  # its ranks let nobody but torchrun end them by SIGTERM
        say(f"starting {len(engines)} engine(s), {config.parallel.world_size} trainer ranks and the scheduler")
        _supervise(engines, trainer, scheduler, stop)
    return report_end(run_folder, time.monotonic() - started)


def say(message: str) -> None:
    print(f"[local] {message}", flush=True)


def _start_engine(config: Config, number: int, model_folder: Path, run_folder: Path) -> KeptEngine:
    log_path = run_folder / LOGS_FOLDER / f"engine-{number}.log"
    process = EngineProcess(engine_settings(config, number, model_folder, log_path)).start()
    return KeptEngine(process, config.engine.restarts, say)


def _start_scheduler(run_folder: Path, urls: list[str]) -> ChildProcess:
    command = [sys.executable, "-m", "megatron_sao.cli.scheduler", str(run_folder / CONFIG_FILE)]
    command += ["--run-folder", str(run_folder), "--engines", ",".join(urls)]
    return ChildProcess("scheduler", command, run_folder / LOGS_FOLDER / "scheduler.log", shows_output=True)


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


def _supervise(
    engines: list[KeptEngine], trainer: ChildProcess, scheduler: ChildProcess, stop: StopOnSignal
) -> None:
    """Wait until trainer and scheduler are through; the scheduler shows the progress. Raises: as `_check`.

    A run that shall stop needs no engines: who sent SIGTERM to all processes of a job has ended them already.
    """
    while trainer.exit_code is None or scheduler.exit_code is None:
        stop.check()
        _check([] if stop.is_wanted else engines, [scheduler, trainer])
        time.sleep(0.2)
    _check([], [scheduler, trainer])


def report_end(run_folder: Path, seconds: float) -> int:
    """Print where things are and the last line. Returns: the exit code."""
    if not (run_folder / RESULT_FILE).exists():  # the trainer writes it when it is through
        checkpoint = newest(run_folder / CHECKPOINTS_FOLDER)
        say("the same command with --resume goes on" if checkpoint else "nothing is saved: no step was begun")
        print(f"STOPPED checkpoint={checkpoint} seconds={seconds:.0f}", flush=True)
        return STOPPED_EXIT_CODE
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
    return 0


def _raise_interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    run_command(main)
