"""`bash launch/local.sh` as a user starts it, and whatever it starts, in whatever session and under whatever parent.

Processes are found by a mark in the environment. vLLM's workers write their name over it: they are found as children of
marked ones, and remembered, so `processes` must have been called while their parents lived (`wait_for` does).
"""

import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

import psutil

from tests.support.parent import end_with_parent

CLONE = Path(__file__).resolve().parents[2]
SMALL_RUN = CLONE / "tests" / "system" / "run.toml"
_MARK = "MEGATRON_SAO_TEST_MARK"

# How the command line of each process goes on after its python.
ENGINE_CORE = "VLLM::EngineCore"  # the name of vLLM's process that holds the model
ENGINE = ["-m", "megatron_sao.rollout.vllm_server"]
SCHEDULER = ["-m", "megatron_sao.cli.scheduler"]
TORCHRUN = ["-m", "torch.distributed.run"]
TRAINER_RANK = ["-u", "-m", "megatron_sao.cli.train"]


def _begin() -> None:
    """A test session that is killed must not leave a run of its own behind; one that was started in the background has
    Ctrl-C ignored, and its children would inherit that."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class MarkedCommand:
    """A started command whose terminal output and processes, in whatever session, can be looked at."""

    def __init__(self, command: list[str], terminal: Path, env: dict[str, str] | None = None):
        self._mark = uuid.uuid4().hex
        self._terminal = terminal
        self._seen: set[psutil.Process] = set()
        self.started_s = time.monotonic()
        with terminal.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=CLONE,
                env={**os.environ, **(env or {}), _MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_begin,
            )

    @property
    def output(self) -> str:
        """All that it has written on its terminal so far."""
        return self._terminal.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Its exit code. Raises: AssertionError when it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:.0f} s:\n{self.output}") from None

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Wait until the terminal shows `text`. Raises: AssertionError when it ends or takes too long."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self._process.poll() is None, f"it ended before {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout_s:.0f} s:\n{self.output}"
            time.sleep(0.1)
        self.processes()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command itself, as a shell's `kill` does."""
        self._process.send_signal(number)

    def processes(self, arguments: list[str] | None = None) -> list[psutil.Process]:
        """All its living processes; only those whose command line goes on with `arguments`, if given."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark:
                    self._seen |= {process, *process.children(recursive=True)}
            except psutil.Error:
                pass  # ended meanwhile, or another user's
        return [process for process in self._seen if _goes_on_with(process, arguments)]

    def close(self) -> None:
        """Effect: nothing that it started lives."""
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        self._process.wait(10)


def _goes_on_with(process: psutil.Process, arguments: list[str] | None) -> bool:
    """Whether it lives, and its command line after the first word begins with `arguments`."""
    try:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        return not arguments or process.cmdline()[1 : 1 + len(arguments)] == arguments
    except psutil.NoSuchProcess:
        return False


def num_trained(run_folder: Path) -> int:
    """How many policy steps a run has written down, also while it goes on."""
    metrics = run_folder / "metrics.jsonl"
    return metrics.read_text().count('"phase": "train"') if metrics.exists() else 0


class LocalRun(MarkedCommand):
    """One run of the whole system with the small configuration."""

    def __init__(self, tmp_path: Path, *arguments: str, config: Path | str = SMALL_RUN, name: str = "small"):
        self.folder = tmp_path / "runs" / name
        place = ["--run.folder", str(tmp_path / "runs"), "--run.name", name]
        command = ["bash", str(CLONE / "launch" / "local.sh"), str(config), *place, *arguments]
        super().__init__(command, tmp_path / f"{name}.terminal")
