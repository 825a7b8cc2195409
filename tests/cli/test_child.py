"""Children and their failures: what is reported about a process that ended badly, and which of several."""

import json
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import psutil
import pytest

from megatron_sao.cli import local
from megatron_sao.cli.child import ChildProcess, killed_rank, signal_name
from megatron_sao.cli.failure import FAILURE_FILE, Failure, read_failure, record_failure
from megatron_sao.errors import ConfigError, EngineError, ProtocolError, SaoError

# The report of torchrun (torch 2.13) after rank 1 of two was killed.
KILLED = """
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  time      : 2026-11-30_10:11:53
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 25092)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 25092
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_10:11:52
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 25093)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 25093
"""


@pytest.fixture
def start(tmp_path):
    children = []

    def start_child(code: str, name: str = "helper") -> ChildProcess:
        children.append(ChildProcess(name, [sys.executable, "-c", code], tmp_path / f"{name}.log"))
        return children[-1]

    yield start_child
    for child in children:
        child.stop()


def command_that_raises(error: SaoError) -> str:
    """A program of ours that ends with this error."""
    return (
        "from megatron_sao.cli.options import run_command\nfrom megatron_sao.errors import *\n"
        f"def main(argv): raise {type(error).__name__}({str(error)!r})\nrun_command(main)"
    )


# ---- one child -------------------------------------------------------------------------------------------------


def test_a_child_that_ends_well_has_no_failure(start):
    child = start("print('done')")
    assert child.wait(60) == 0
    assert child.failure() is None


def test_a_child_that_runs_has_no_failure_and_stops_with_all_that_it_started(start):
    child = start(
        "import subprocess, time\n"
        "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\n"
        "time.sleep(600)"
    )
    while "\n" not in child.log_path.read_text():
        assert child.wait(0.05) is None
    assert child.failure() is None
    below = psutil.Process(int(child.log_path.read_text()))
    child.stop()
    assert child.exit_code is not None
    assert not below.is_running() or below.status() == psutil.STATUS_ZOMBIE
    child.stop()  # again: harmless


def test_a_foreseen_error_is_its_message_and_exit_code(start):
    child = start(command_that_raises(ConfigError("two faults:\n  a = 1\n  error: b = 2")))
    child.wait(60)
    failure = child.failure()
    assert failure.exit_code == ConfigError.exit_code
    said = "two faults:\n  a = 1\n  error: b = 2"
    assert failure.message == f"the helper failed: {said}\n  (whole log: {child.log_path})"


def test_an_unforeseen_error_is_named_and_its_traceback_stays_in_the_log(start):
    child = start("from megatron_sao.cli.options import run_command\nrun_command(lambda argv: {}['x'])")
    child.wait(60)
    assert child.failure().exit_code == 1
    assert child.failure().message.startswith("the helper failed: KeyError: 'x'\n")
    assert "Traceback" in child.log_path.read_text()


def test_a_child_that_says_nothing_is_quoted_from_its_log(start):
    child = start("import sys; sys.exit('no space left')")
    child.wait(60)
    assert child.failure().message.startswith("the helper ended with exit code 1:\n  no space left")


def test_a_killed_child_says_so(start):
    child = start("import os; os.kill(os.getpid(), 9)")
    child.wait(60)
    assert child.failure().message.startswith("the helper was killed by SIGKILL (out of memory?)")


def test_a_killed_rank_counts_more_than_what_its_neighbours_said(start):
    code = "\n".join([
        f"print({KILLED!r}, flush=True)",
        "import os",
        "from megatron_sao.cli.failure import *",
        "record_failure(Failure(5, 'connection closed by peer'))",
        "raise SystemExit(1)",
    ])
    child = start(code, "trainer")
    child.wait(60)
    assert child.failure().message.startswith("rank 1 of the trainer was killed by SIGKILL (out of memory?)")


def test_ranks_that_torchrun_ended_itself_were_not_killed():
    assert killed_rank(KILLED) == (1, 9)
    assert killed_rank(KILLED.replace("-9 ", "4 ")) is None
    assert killed_rank("") is None


def test_signals_are_named():
    assert signal_name(11) == "SIGSEGV"
    assert signal_name(99) == "signal 99"


# ---- the record of a failure -----------------------------------------------------------------------------------


def test_the_first_failure_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "failure.json"
    assert read_failure(path) is None
    monkeypatch.setenv(FAILURE_FILE, str(path))
    record_failure(Failure(4, "a tensor is missing"))
    record_failure(Failure(5, "the other rank is gone"))
    assert read_failure(path) == Failure(4, "a tensor is missing")


def test_nothing_is_written_where_nobody_asked(tmp_path, monkeypatch):
    monkeypatch.delenv(FAILURE_FILE, raising=False)
    monkeypatch.chdir(tmp_path)
    record_failure(Failure(4, "a tensor is missing"))
    assert list(tmp_path.iterdir()) == []


def test_a_broken_record_is_none(tmp_path):
    (tmp_path / "failure.json").write_text(json.dumps({"exit_code": 4}))
    assert read_failure(tmp_path / "failure.json") is None


# ---- which of several processes is to blame --------------------------------------------------------------------


class Ended:
    """A child as `local` sees it: it fails after `after_s`."""

    def __init__(self, failure: Failure | None, after_s: float = 0.0):
        self._failure, self._at = failure, time.monotonic() + after_s

    def failure(self) -> Failure | None:
        return self._failure if time.monotonic() >= self._at else None


class Engine(Ended):
    def check(self) -> None:
        if failure := self.failure():
            raise EngineError(failure.message)


class EndsWell(Ended):
    """It still runs when it is looked at for the first time."""

    def __init__(self):
        super().__init__(None)
        self._seen = False

    @property
    def exit_code(self) -> int | None:
        self._seen, seen = True, self._seen
        return 0 if seen else None


LOST = Failure(ProtocolError.exit_code, "the scheduler went away")
NO_ANSWER = Failure(EngineError.exit_code, "the engine does not answer")
BAD_CONFIG = Failure(ConfigError.exit_code, "a = 1")


@pytest.mark.parametrize(
    ("engine", "scheduler", "trainer", "message", "exit_code"),
    [
        (Engine(None), Ended(BAD_CONFIG), Ended(LOST), "a = 1", 2),
        (Engine(None), Ended(LOST), Ended(BAD_CONFIG), "a = 1", 2),
        (Engine(None), Ended(LOST), Ended(BAD_CONFIG, after_s=0.3), "a = 1", 2),
        (Engine(BAD_CONFIG, after_s=0.3), Ended(NO_ANSWER), Ended(LOST), "a = 1", 6),
        (Engine(None), Ended(NO_ANSWER), Ended(None), "the engine does not answer", 6),  # it goes on, but is no use
        (Engine(None), Ended(None), Ended(LOST), "the scheduler went away", 5),
    ],
)
def test_the_cause_is_reported_not_its_consequences(monkeypatch, engine, scheduler, trainer, message, exit_code):
    monkeypatch.setattr(local, "CAUSE_WAIT_S", 1.0)
    with pytest.raises(SaoError, match=f"^{message}$") as caught:
        local._check([engine], [scheduler, trainer])
    assert caught.value.exit_code == exit_code


@pytest.mark.parametrize("is_wanted", [True, False])
def test_engines_are_not_missed_once_the_run_shall_stop(monkeypatch, is_wanted):
    """SIGTERM to every process of a job ends the engines at once, the trainer only after it has saved."""
    monkeypatch.setattr(local, "CAUSE_WAIT_S", 0.1)
    stop = SimpleNamespace(is_wanted=is_wanted, check=lambda: None)
    engine = Engine(Failure(EngineError.exit_code, "killed by SIGTERM"))
    with nullcontext() if is_wanted else pytest.raises(EngineError, match="killed by SIGTERM"):
        local._supervise([engine], EndsWell(), EndsWell(), stop)


def test_nothing_is_reported_while_all_is_well():
    local._check([Engine(None)], [Ended(None), Ended(None)])
