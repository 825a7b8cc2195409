"""The folder of a run between its attempts: made, continued, what its processes start from, where they find each other.

Owns `run.json`, `scheduler.json` and the files of the engines. Invariants: a new run finds an empty folder, an earlier
run of its name is moved aside, nothing is overwritten; a continued one finds no trace of the attempt before that its
processes could mistake for their own (an address, a result, a wish to stop, an older checkpoint to go on from), and the
logs of that attempt under `logs.1`, `logs.2` and so on.
"""

import json
import socket
from dataclasses import dataclass
from pathlib import Path

from megatron_sao.cli.files import (
    ADDRESS_FILE,
    ENGINES_FOLDER,
    HEARTBEAT_FILE,
    LOGS_FOLDER,
    RESULT_FILE,
    RUN_FILE,
    STOP_FILE,
    SUMMARY_FILE,
)
from megatron_sao.errors import ConfigError


@dataclass(frozen=True)
class RunStart:
    """What the processes of one attempt start from."""

    model: Path  # HF folder of both models before the first step
    resume: Path | None  # the checkpoint to go on from; None = a new run
    job: str | None = None  # the SLURM job that prepared it


def write_start(folder: Path, start: RunStart) -> None:
    """Effect: `run.json` says it, and never less: what is killed here must still know which job the run is of."""
    resume = str(start.resume.absolute()) if start.resume else None
    _replace(folder / RUN_FILE, {"model": str(start.model.absolute()), "resume": resume, "job": start.job})


def read_start(folder: Path) -> RunStart:
    """What `run.json` says. Raises: ConfigError where no run was prepared."""
    try:
        content = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        resume = Path(content["resume"]) if content["resume"] else None
        return RunStart(Path(content["model"]), resume, content.get("job"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder} is no prepared run folder ({RUN_FILE}: {error}); `python -m megatron_sao.cli.prepare CONFIG`"
            " makes one and prints its name"
        ) from error


def engine_file(folder: Path, number: int) -> Path:
    """Where an engine of the run says where it listens."""
    return folder / ENGINES_FOLDER / f"engine-{number}.json"


def register_engine(folder: Path, number: int, url: str) -> None:
    """Effect: tells the scheduler where this engine listens, or will once it has started."""
    path = engine_file(folder, number)
    path.parent.mkdir(exist_ok=True)
    _replace(path, {"url": url})


def registered_url(folder: Path, number: int) -> str | None:
    """What this engine told; None = nothing yet, or not whole."""
    try:
        return json.loads(engine_file(folder, number).read_text(encoding="utf-8"))["url"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Announced:
    """What the scheduler of an attempt has told."""

    address: str  # tcp://HOST:PORT, where it listens; maybe for its own host alone
    host: str  # name of that one
    is_ready: bool  # for the trainer: its engines answer


def announce_scheduler(folder: Path, address: str) -> None:
    """Effect: tells that this attempt has its scheduler, which is not ready. Raises: FileExistsError if it has one."""
    with open(folder / ADDRESS_FILE, "x", encoding="utf-8") as file:
        file.write(json.dumps({"address": address, "host": socket.gethostname(), "is_ready": False}) + "\n")


def announce_ready(folder: Path, address: str) -> None:
    """Effect: tells the trainer that it may come."""
    _replace(folder / ADDRESS_FILE, {"address": address, "host": socket.gethostname(), "is_ready": True})


def announced_scheduler(folder: Path) -> Announced | None:
    """What the scheduler told; None = nothing yet, or not whole."""
    try:
        content = json.loads((folder / ADDRESS_FILE).read_text(encoding="utf-8"))
        return Announced(content["address"], content["host"], content["is_ready"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _replace(path: Path, content: dict[str, str | bool | None]) -> None:
    """Effect: whoever reads `path` finds what it held before or this, never a part."""
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def make_run_folder(path: Path) -> Path | None:
    """Effect: an empty folder at `path`. Returns: where an earlier run went that stood there."""
    aside = None
    if path.exists():
        aside = _free_name(path)
        path.rename(aside)
    path.mkdir(parents=True)
    return aside


def clear_attempt(folder: Path) -> None:
    """Effect: the attempt before has left nothing behind that the next one could take for its own, but for `run.json`,
    which is to be written anew."""
    for name in (ADDRESS_FILE, HEARTBEAT_FILE, STOP_FILE, SUMMARY_FILE, RESULT_FILE):
        (folder / name).unlink(missing_ok=True)
    for file in (folder / ENGINES_FOLDER).glob("*"):
        file.unlink()
    logs = folder / LOGS_FOLDER
    if logs.exists():
        logs.rename(_free_name(logs))


def _free_name(path: Path) -> Path:
    numbers = (path.with_name(f"{path.name}.{number}") for number in range(1, 10**6))
    return next(name for name in numbers if not name.exists())
