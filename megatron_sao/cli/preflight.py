"""What can be found wrong within a second or two, before anything is written or started.

The processes check the same again, each for itself: they may also be started without this program.
"""

import json
import os
import socket
import time
from pathlib import Path

from megatron_sao.cli.files import ADDRESS_FILE, STOP_FILE, SUMMARY_FILE
from megatron_sao.cli.heartbeat import beats
from megatron_sao.cli.network import split_endpoint
from megatron_sao.cli.run_folder import announced_scheduler
from megatron_sao.config import Config, check_is_built, check_model_fits
from megatron_sao.convert.expected import check_tensors
from megatron_sao.convert.family import check_engine_reads_alike, check_stage_starts, read_shape
from megatron_sao.errors import ConfigError
from megatron_sao.rollout.environment import make_environment
from megatron_sao.rollout.prompts import PromptSource, read_prompt_file
from megatron_sao.transport.hf_shapes import check_model_folder

ENDS_WITHIN_S = 10.0  # the processes of an attempt that was just killed


def check_before_start(config: Config) -> None:
    """What is built, environment, prompts, ports and the place for the run folder.

    Raises: ConfigError, DataError.
    """
    check_is_built(config)
    _check_tasks(config)
    check_ports(config)
    check_run_folder(Path(config.run.folder))


def check_not_running(run_folder: Path) -> None:
    """No scheduler of an earlier attempt still serves the run in this folder, on whatever host. Raises: ConfigError."""
    scheduler = announced_scheduler(run_folder)
    if scheduler is None:
        return
    deadline = time.monotonic() + ENDS_WITHIN_S
    while _answers(scheduler.address):
        if time.monotonic() > deadline:
            raise _goes_on(run_folder, f"its scheduler answers at {scheduler.address}")
        time.sleep(0.2)
    has_said_its_end = (run_folder / SUMMARY_FILE).exists()
    if not has_said_its_end and beats(run_folder):
        raise _goes_on(run_folder, f"its scheduler lives on the host {scheduler.host}")


def _goes_on(run_folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"the run in {run_folder} goes on: {why}; end it first (the file {run_folder / STOP_FILE} makes it save and"
        " end), or choose another run.name"
    )


def _answers(address: str) -> bool:
    """Whether a scheduler answers at tcp://HOST:PORT, as far as this host reaches."""
    try:
        return _is_zeromq(split_endpoint(address.removeprefix("tcp://"), ADDRESS_FILE))
    except ConfigError:
        return False


def _is_zeromq(endpoint: tuple[str, int]) -> bool:
    """Whether such a socket listens there, as a scheduler's. Another program that has the port now begins otherwise."""
    try:
        with socket.create_connection(endpoint, timeout=2.0) as connection:
            return connection.recv(1) == b"\xff"
    except OSError:
        return False


def check_model(config: Config, folder: Path) -> None:
    """The model folder is whole, and the model fits the layout.

    Raises: CheckpointError, ConfigError.
    """
    shapes = check_model_folder(folder)
    hf_config = json.loads((folder / "config.json").read_text())
    check_model_fits(config, hf_config)
    check_engine_reads_alike(hf_config)
    check_stage_starts(read_shape(hf_config), config.parallel)
    check_tensors(shapes, hf_config, folder, with_mtp=config.policy.mtp_loss_weight > 0)


def _check_tasks(config: Config) -> None:
    """Every row of the prompt file is one that the environment plays, and both splits hold a prompt."""
    task = config.task
    environment = make_environment(task.environment, task.params)
    rows = None
    if task.prompts_file:
        rows = read_prompt_file(task.prompts_file, task.on_bad_line).tasks
        for row in rows:
            environment.start(row)
    for split in ("train", "eval"):
        PromptSource(split, task.environment, environment, seed=config.run.seed, tasks=rows).take(1)


def check_ports(config: Config) -> None:
    """Engines and scheduler can listen where they shall. Raises: ConfigError."""
    engine = config.engine
    for number in range(engine.count):
        _check_port(engine.host, engine.port and engine.port + number, "engine.port", "engine.host")
    _check_port("127.0.0.1", config.schedule.port, "schedule.port")


def _check_port(host: str, port: int, *keys: str) -> None:
    """Port 0 (a free one will be picked) still tells whether the address is one of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT can be used; one in use not
        try:
            probe.bind((host, port))
        except OSError as error:
            change = " or ".join(keys)
            raise ConfigError(
                f"nothing can listen on {host}:{port}: {error.strerror}; change {change} (port 0 = a free one)"
            ) from error


def check_run_folder(path: Path) -> None:
    """`path` can be made, or written to. Raises: ConfigError."""
    parent = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"run.folder = {path} cannot be used: {parent} is no folder that can be written to")
