"""The engines of one rollout host of a prepared run; `launch/node.sh` starts it.

    python -m megatron_sao.cli.engines RUN_FOLDER [--nodes N --node-rank K --rendezvous HOST:PORT]

It starts this host's share of the engines, tells the scheduler through `engines/engine-N.json` where each listens, and
starts one that dies again, `engine.restarts` times. It ends when the scheduler has written its summary, and nothing
that it started outlives it. A signal asks the whole run to stop (`cli/stop.py`); an engine that ends then, by the same
signal for example, is left as it is: what is left of the run needs no engine.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from megatron_sao.cli.files import LOGS_FOLDER, STOP_FILE, SUMMARY_FILE
from megatron_sao.cli.heartbeat import HeartWatch
from megatron_sao.cli.kept_engine import KeptEngine, engine_settings
from megatron_sao.cli.network import PLACE_VALUES, HostPlace, host_place, take_interface
from megatron_sao.cli.node import prepared_run
from megatron_sao.cli.options import parse_options, run_command
from megatron_sao.cli.run_folder import announced_scheduler, read_start, register_engine
from megatron_sao.cli.slurm import gpus_on_node
from megatron_sao.cli.stop import StopOnSignal
from megatron_sao.config import Config, check_num_nodes, describe
from megatron_sao.config.devices import engine_devices, visible_devices
from megatron_sao.errors import ConfigError, ProtocolError
from megatron_sao.rollout.engine_process import EngineProcess, is_cpu_build

SILENT_S = 120.0  # of the scheduler's heart, after which it counts as gone

_ABOUT = "Run the engines of one rollout host of a prepared run: RUN_FOLDER."


def main(argv: Sequence[str]) -> None:
    options = parse_options(argv, about=_ABOUT, values=PLACE_VALUES)
    run_folder, config = prepared_run(options, "engines")
    place = host_place(options.values, config.parallel.interface)
    check_num_nodes(config, "rollout", place.num_hosts)
    numbers = engines_of_host(config.engine.count, place.num_hosts, place.number)
    devices = devices_of_engines(os.environ, len(numbers), config.engine.num_workers, is_cpu_build())
    if "dry-run" in options.switches:
        print(describe(config))
        for number, shown in zip(numbers, devices, strict=True):
            say(f"would start engine {number} at {place.address} ({place.interface}), GPUs: {shown or 'none'}")
        return
    model_folder = read_start(run_folder).model
    take_interface(place.interface, config.parallel.interface)
    stop = StopOnSignal(run_folder, config.checkpoint.stop_grace_s, say)
    with ExitStack() as running:
        engines = []
        for number, shown in zip(numbers, devices, strict=True):
            engine = start_engine(config, number, model_folder, run_folder, place, shown)
            running.callback(engine.process.stop)
            engines.append(engine)
        keep(engines, run_folder, stop, config.parallel.join_timeout_s)
        say("the run is over")


def say(message: str) -> None:
    print(f"[engines] {message}", flush=True)


def engines_of_host(count: int, num_hosts: int, host: int) -> range:
    """The numbers of the engines on one of so many hosts: each has as many, in order. Raises: ConfigError."""
    if count % num_hosts:
        raise ConfigError(f"--nodes {num_hosts} does not divide engine.count = {count}; change either")
    share = count // num_hosts
    return range(host * share, (host + 1) * share)


def devices_of_engines(env: Mapping[str, str], count: int, num_workers: int, is_cpu_build: bool) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each of `count` engines of a host; empty where there are no GPUs to share out.

    The GPUs are those that CUDA_VISIBLE_DEVICES shows this program, else as many as SLURM gave, else all of the host.
    Raises: ConfigError when they do not suffice.
    """
    if "CUDA_VISIBLE_DEVICES" in env:
        visible = visible_devices(env["CUDA_VISIBLE_DEVICES"])
    elif "SLURM_GPUS_ON_NODE" in env:
        visible = [str(number) for number in range(gpus_on_node(env))]
    else:
        visible = [str(number) for number in range(count * num_workers)]
    if is_cpu_build and len(visible) < count * num_workers:
        return [""] * count
    return [engine_devices(visible, number, num_workers) for number in range(count)]


def start_engine(
    config: Config, number: int, model_folder: Path, run_folder: Path, place: HostPlace, devices: str
) -> KeptEngine:
    """Effect: the engine is starting, on the network interface that the environment names, and the scheduler is told
    where it will listen."""
    log_path = run_folder / LOGS_FOLDER / f"engine-{number}.log"
    settings = replace(
        engine_settings(config, number, model_folder, log_path),
        host=place.address,
        devices=devices,
    )
    process = EngineProcess(settings).start()
    say(f"engine {number} is starting at {process.url}" + (f" on GPUs {devices}" if devices else ""))
    register_engine(run_folder, number, process.url)
    return KeptEngine(process, config.engine.restarts, say)


def keep(engines: list[KeptEngine], run_folder: Path, stop: StopOnSignal, start_timeout_s: float) -> None:
    """Wait until the run is over; engines that die before it is told to stop are started again.

    Args: start_timeout_s: within which the scheduler has to begin.
    Raises: EngineError when one does not start or dies too often, SaoError when a stop takes too long, ProtocolError
        when the scheduler does not come, or is gone without a word: its host may have lost its power.
    """
    heart, began_s = None, time.monotonic()
    while not (run_folder / SUMMARY_FILE).exists():
        stop.check()
        if scheduler := announced_scheduler(run_folder):
            heart = heart or HeartWatch(run_folder)  # from now on: until now there was nothing to hear
            _check_heart(run_folder, scheduler.host, heart.silent_s())
        elif time.monotonic() - began_s > start_timeout_s:
            raise ProtocolError(
                f"no scheduler has begun in {run_folder} within parallel.join_timeout_s = {start_timeout_s:.0f} s: is"
                " it started, and does its host see the same folder?"
            )
        if not (run_folder / STOP_FILE).exists():
            for engine in engines:
                engine.check()
        time.sleep(0.2)


def _check_heart(run_folder: Path, host: str, silent_s: float) -> None:
    if silent_s > SILENT_S:
        raise ProtocolError(
            f"the scheduler on the host {host} gave no sign of life in {run_folder} for {SILENT_S:.0f} s: is that host"
            " up, and the file system between the two?"
        )


if __name__ == "__main__":
    run_command(main)
