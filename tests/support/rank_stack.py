"""Where a trainer rank is: at SIGUSR1 it writes its stack into its log (`megatron_sao/cli/train.py`)."""

import signal
import time
from pathlib import Path

import psutil


def is_inside(process: psutil.Process, log: Path, *functions: str) -> bool:
    """Whether the rank's main thread is inside all of the functions now."""
    stack = stack_of(process, log)
    return all(f" in {function}\n" in stack for function in functions)


def stack_of(process: psutil.Process, log: Path) -> str:
    """Where the main thread of a rank is now: "File ..., line n in f" for each function, the innermost first."""
    before = log.stat().st_size
    process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + 30
    while True:
        with log.open("rb") as file:
            file.seek(before)
            written = file.read().decode(errors="replace")
        if written.endswith(("in _run_module_as_main\n", "  ...\n")):  # the latter where it is deep
            return written.rpartition("Current thread")[2].partition("\n")[2]
        assert time.monotonic() < deadline, f"no stack in {log}"
        time.sleep(0.001)
