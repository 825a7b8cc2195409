"""A child process with a log file, that never outlives this program (through `process_guard`)."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_sao.cli.failure import FAILURE_FILE, Failure, read_failure
from megatron_sao.errors import ConfigError
from megatron_sao.rollout.engine_process import GUARD, log_excerpt

_GUARD_ENDS_WITHIN_S = 10.0  # once it kills what lives below it


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
        self._failure_path = log_path.with_suffix(".failure.json")
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", GUARD, *command],
                env={**os.environ, **(env or {}), FAILURE_FILE: str(self._failure_path.absolute())},
                stdin=subprocess.PIPE,  # held open as long as this program lives: its end is the guard's signal
                stdout=None if shows_output else log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of its guard, whose only child it is."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, or None if it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def failure(self) -> Failure | None:
        """Why it ended; None while it runs or if it ended well."""
        if not self.exit_code:
            return None
        log = f"\n  (whole log: {self.log_path})"
        text = self.log_path.read_text(errors="replace")
        killed = killed_rank(text)
        if killed is not None:
            rank, number = killed
            return Failure(1, f"rank {rank} of the {self.name} was killed by {signal_name(number)}{log}")
        if missing := hosts_missing(text):
            return Failure(ConfigError.exit_code, missing + log)
        if self.exit_code > 128:
            return Failure(1, f"the {self.name} was killed by {signal_name(self.exit_code - 128)}{log}")
        recorded = read_failure(self._failure_path)
        if recorded is not None:
            return Failure(recorded.exit_code, f"the {self.name} failed: {recorded.message}{log}")
        return Failure(1, f"the {self.name} ended with exit code {self.exit_code}:\n{log_excerpt(self.log_path)}")

    def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM, soon once more, and after `grace_s` the guard kills whatever lives below it; 0 = at once, unasked."""
        if self.exit_code is None and grace_s:
            self._process.terminate()
            if self.wait(grace_s / 4) is None:  # it may take the first one as a wish: the second is an order
                self._process.terminate()
                self.wait(grace_s * 3 / 4)
        self._process.stdin.close()
        self.wait(_GUARD_ENDS_WITHIN_S)
        self._process.kill()  # a guard that hangs; harmless otherwise
        self._process.wait()


# What torchrun writes about each rank that failed, e.g. "rank : 1 (local_rank: 1)\n exitcode : -9 (pid: 4711)".
_TORCHRUN_FAILURE = re.compile(r"^ *rank +: (\d+) .*\n +exitcode +: -(\d+) ", re.MULTILINE)


def killed_rank(torchrun_log: str) -> tuple[int, int] | None:
    """(rank, signal number) of the rank that was killed from outside, if torchrun reports one.

    SIGTERM does not count: that is what torchrun itself sends to the other ranks when one has failed.
    """
    for rank, number in _TORCHRUN_FAILURE.findall(torchrun_log):
        if int(number) != signal.SIGTERM:
            return int(rank), int(number)
    return None


# What torchrun's last line is when hosts stay away.
_HOSTS_JOINED = re.compile(r"Timed out after (\d+) seconds waiting for clients\. (\d+)/(\d+) clients joined")


def hosts_missing(torchrun_log: str) -> str:
    """What to say when too few hosts came to where torchrun waits for them; empty if that was not the fault."""
    if found := _HOSTS_JOINED.search(torchrun_log):
        seconds, num_joined, num_hosts = found.groups()
        return (
            f"only {num_joined} of {num_hosts} trainer hosts came within {seconds} s (parallel.join_timeout_s): are the"
            " others started, each with its own number, and can they reach the rendezvous?"
        )
    return ""


def signal_name(number: int) -> str:
    """ "SIGKILL (out of memory?)", "SIGSEGV", "signal 77"."""
    if number not in signal.valid_signals():
        return f"signal {number}"
    return signal.Signals(number).name + (" (out of memory?)" if number == signal.SIGKILL else "")
