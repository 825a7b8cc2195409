"""One host's share of the trainer, or the scheduler, of a prepared run; `launch/node.sh` starts it.

    python -m megatron_sao.cli.node trainer RUN_FOLDER [--nodes N --node-rank K --rendezvous HOST:PORT] [--dry-run]
    python -m megatron_sao.cli.node scheduler RUN_FOLDER [--host ADDRESS] [--dry-run]

It starts the processes, waits, and ends as they do, with the cause as its message. It passes the wish to stop on to
the whole run (`cli/stop.py`), and nothing that it started outlives it.
"""

import ipaddress
import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_sao.cli.child import ChildProcess
from megatron_sao.cli.files import CONFIG_FILE, LOGS_FOLDER, RESULT_FILE, SUMMARY_FILE
from megatron_sao.cli.network import PLACE_VALUES, HostPlace, host_place
from megatron_sao.cli.options import Options, parse_options, run_command
from megatron_sao.cli.stop import StopOnSignal
from megatron_sao.cli.trainer_process import start_trainer
from megatron_sao.config import Config, check_num_nodes, describe, load_config
from megatron_sao.errors import ConfigError, SaoError

CONNECT_TIMEOUT_S = 5.0  # of one attempt to reach host 0

_ABOUT = "Run one host's share of the trainer, or the scheduler, of a prepared run: trainer|scheduler RUN_FOLDER."
_SCHEDULER_VALUES = {"host": "address to listen on for trainer rank 0 (default 127.0.0.1: it runs on this host)"}


def main(argv: Sequence[str]) -> None:
    starts: dict[str, tuple[dict[str, str], Callable[[Options, Config, Path], ChildProcess]]] = {
        "trainer": (PLACE_VALUES, _start_trainer),
        "scheduler": (_SCHEDULER_VALUES, _start_scheduler),
    }
    role = argv[0] if argv else ""
    if role not in starts:
        parse_options(argv, about=_ABOUT, values={**PLACE_VALUES, **_SCHEDULER_VALUES})
        raise ConfigError(f"say first what to run, {' or '.join(starts)}; {role!r} is neither")
    values, start = starts[role]
    options = parse_options(argv[1:], about=_ABOUT, values=values)
    run_folder, config = prepared_run(options, role)

    def say(message: str) -> None:
        print(f"[{role}] {message}", flush=True)

    if "dry-run" in options.switches:
        print(describe(config))
        if role == "trainer":
            host = trainer_host(options.values, config)
            say(f"would be host {host.number} of {host.num_hosts}, at {host.address} ({host.interface})")
        return
    stop = StopOnSignal(run_folder, config.checkpoint.stop_grace_s, say)
    child = start(options, config, run_folder)
    say(f"run folder {run_folder}, log {child.log_path}")
    try:
        while child.exit_code is None:
            stop.check()
            time.sleep(0.2)
    finally:
        child.stop(grace_s=0.0)
        failure = child.failure()
        if role == "scheduler" and not (run_folder / SUMMARY_FILE).exists():
            _say_that_it_is_over(run_folder, failure.message if failure else "the scheduler was stopped")
    if failure:
        error = SaoError(failure.message)
        error.exit_code = failure.exit_code
        raise error
    if role == "trainer":  # the scheduler ends before there is a result
        is_finished = (run_folder / RESULT_FILE).exists()
        say("the run is finished" if is_finished else "the run has saved and ended; prepare it with --resume to go on")


def prepared_run(options: Options, role: str) -> tuple[Path, Config]:
    """The run folder that a command line names first, and its configuration. Raises: ConfigError."""
    if options.config_path is None:
        raise ConfigError(f"the run folder is missing: {role} RUN_FOLDER ...; prepare prints it")
    if options.overrides:
        raise ConfigError(f"{', '.join(options.overrides)}: a prepared run has its configuration; give this to prepare")
    run_folder = Path(options.config_path)
    return run_folder, load_config(str(run_folder / CONFIG_FILE), ())


def _say_that_it_is_over(run_folder: Path, outcome: str) -> None:
    """Effect: the file that the engines' hosts wait for is there, though the scheduler could not write it itself."""
    (run_folder / SUMMARY_FILE).write_text(json.dumps({"outcome": outcome}) + "\n", encoding="utf-8")


def _start_trainer(options: Options, config: Config, run_folder: Path) -> ChildProcess:
    host = trainer_host(options.values, config)
    if host.number:
        _wait_for_host_0(*host.rendezvous, config.parallel.join_timeout_s)
    return start_trainer(config, run_folder, host)


def _start_scheduler(options: Options, config: Config, run_folder: Path) -> ChildProcess:
    command = [sys.executable, "-m", "megatron_sao.cli.scheduler", str(run_folder / CONFIG_FILE)]
    command += ["--run-folder", str(run_folder), "--host", options.values.get("host", "127.0.0.1")]
    return ChildProcess("scheduler", command, run_folder / LOGS_FOLDER / "scheduler.log", shows_output=True)


def trainer_host(values: dict[str, str], config: Config) -> HostPlace:
    """This host's place in the trainer. Raises: ConfigError."""
    place, ranks = host_place(values, config.parallel.interface), config.parallel.world_size
    check_num_nodes(config, "trainer", place.num_hosts)
    if ranks % place.num_hosts:
        raise ConfigError(
            f"--nodes {place.num_hosts} does not divide parallel.tp * pp * cp * dp = {ranks}, the trainer's ranks"
        )
    if place.rendezvous and place.number == 0 and place.address != place.rendezvous[0]:
        advice = "start host 0 there"
        if ipaddress.ip_address(place.rendezvous[0]).is_loopback:
            advice = "no other host reaches that one (/etc/hosts?): give the address by which they reach this host"
        raise ConfigError(
            f"--rendezvous {values['rendezvous']} is at {place.rendezvous[0]}, but this host, --node-rank 0, has the"
            f" address {place.address}; {advice}"
        )
    return place


def _wait_for_host_0(address: str, port: int, timeout_s: float) -> None:
    """torchrun would do so as well, three times as long, and end in a traceback. Raises: ConfigError."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"no trainer host 0 answers at {address}:{port} within parallel.join_timeout_s = {timeout_s:.0f} s"
                    f" ({error}): is it started, is this its address, and may other hosts use the port?"
                ) from error
        time.sleep(0.2)


if __name__ == "__main__":
    run_command(main)
