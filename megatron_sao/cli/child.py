"""A child process with a log file, that never outlives this program (through `process_guard`)."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_sao.rollout.engine_process import GUARD, log_excerpt


class ChildProcess:
    """One started command. Use `stop` in a `finally`; it is harmless after the child ended by itself."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        env: Mapping[str, str] | None = None,
        *,
        shows_output: bool = False,
    ):
        """Start `command` under the name that messages call it by.

        Effect: what it prints goes to `log_path`; with `shows_output` its standard output stays this program's.
        """
        self.name, self.log_path = name, log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", GUARD, *command],
                env={**os.environ, **(env or {})},
                stdin=subprocess.PIPE,  # held open as long as this program lives: its end is the guard's signal
                stdout=None if shows_output else log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, or None if it still runs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.exit_code

    def complaint(self) -> str:
        """What its log says went wrong: its own "error:" messages, else the last errors or lines."""
        said = self.log_path.read_text(errors="replace").split("error: ")[1:]
        if said:
            return said[0].strip().split("\nE1", 1)[0].split("\nW1", 1)[0]
        return log_excerpt(self.log_path)

    def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM, after `grace_s` SIGKILL to the whole process group."""
        if self.exit_code is None:
            self._process.terminate()
            self.wait(grace_s)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._process.stdin.close()
