"""How a process tells the program that started it why it failed: in a small file, which the first one to fail writes.

The ranks of a trainer share one file: those that fail later mostly fail because of the first.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

FAILURE_FILE = "MEGATRON_SAO_FAILURE_FILE"  # environment variable: where to; not set = nobody wants to know


@dataclass(frozen=True)
class Failure:
    """Why a process ended."""

    exit_code: int
    message: str


def record_failure(failure: Failure) -> None:
    """Effect: writes the file that the environment names, unless another process has done so already."""
    path = os.environ.get(FAILURE_FILE)
    if not path:
        return
    try:
        with open(path, "x", encoding="utf-8") as file:
            json.dump({"exit_code": failure.exit_code, "message": failure.message}, file)
    except OSError:
        pass  # the first one counts; and a full disk must not hide the message on standard error


def read_failure(path: Path) -> Failure | None:
    """What was recorded, once the process has ended; None = nothing."""
    try:
        return Failure(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # absent, or cut off in the middle
        return None
