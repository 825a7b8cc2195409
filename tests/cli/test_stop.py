"""Signals that ask a run to save and end: real processes, real signals, and torchrun as the launchers start it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_sao.cli.stop import StopOnSignal, ask_to_stop
from megatron_sao.cli.trainer_process import WITHOUT_SIGTERM
from megatron_sao.errors import SaoError

WAIT_S = 60.0

# A rank: says that it is there, and lives until it is ended; rank 1 fails once the file `fail` exists.
RANK = """
import os, sys, time
from pathlib import Path
from megatron_sao.cli.stop import stop_on_sigterm
folder = Path(sys.argv[1])
stop_on_sigterm(folder)
rank = os.environ.get("RANK", "0")
(folder / f"rank-{rank}").write_text(str(os.getpid()))
while not (rank == "1" and (folder / "fail").exists()):
    time.sleep(0.02)
sys.exit(3)
"""

# Starts a rank, and sends it SIGTERM once the file `end` exists; ends with the rank's status.
PARENT = """
import subprocess, sys, time
from pathlib import Path
rank = subprocess.Popen([sys.executable, *sys.argv[2:], sys.argv[1]])
while rank.poll() is None:
    if (Path(sys.argv[1]) / "end").exists():
        rank.terminate()
    time.sleep(0.02)
print(rank.returncode)
"""


def wait_until(is_true, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def pid_of(folder: Path, rank: int = 0) -> int:
    path = folder / f"rank-{rank}"
    wait_until(lambda: path.exists() and path.read_text(), f"rank {rank} has not come")
    return int(path.read_text())


@pytest.fixture
def start(tmp_path):
    """Starts a program given by its text, with the folder as its first argument."""
    started = []

    def start_program(*command: str) -> subprocess.Popen:
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start_program
    for process in started:
        living = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        for child in living:
            child.kill()
        process.communicate()


def start_rank_below_parent(start, tmp_path) -> subprocess.Popen:
    (tmp_path / "rank.py").write_text(RANK)
    return start(sys.executable, "-c", PARENT, str(tmp_path), str(tmp_path / "rank.py"))


def test_the_parent_ends_a_rank_at_once(start, tmp_path):
    parent = start_rank_below_parent(start, tmp_path)
    pid_of(tmp_path)
    (tmp_path / "end").touch()
    assert parent.communicate(timeout=WAIT_S)[0].splitlines()[-1] == str(-signal.SIGTERM)
    assert not (tmp_path / "stop").exists()


def test_anybody_else_asks_to_stop_and_the_second_time_ends_the_rank(start, tmp_path):
    parent = start_rank_below_parent(start, tmp_path)
    os.kill(pid_of(tmp_path), signal.SIGTERM)
    wait_until((tmp_path / "stop").exists, "no file stop")
    assert parent.poll() is None
    os.kill(pid_of(tmp_path), signal.SIGTERM)
    output = parent.communicate(timeout=WAIT_S)[0].splitlines()
    assert output == ["SIGTERM: trainer rank 0 asks the run to save and end", str(-signal.SIGTERM)]
    assert (tmp_path / "stop").read_text().startswith("SIGTERM to trainer rank 0 on ")


def test_a_signal_to_every_process_leaves_torchrun_and_its_ranks_at_work(start, tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    torchrun = start(*WITHOUT_SIGTERM, sys.executable, "-m", "torch.distributed.run", "--standalone",
                     "--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT", "--nproc-per-node", "2",
                     str(tmp_path / "rank.py"), str(tmp_path))  # fmt: skip
    ranks = [pid_of(tmp_path, 0), pid_of(tmp_path, 1)]
    for pid in (torchrun.pid, *ranks):
        os.kill(pid, signal.SIGTERM)
    wait_until((tmp_path / "stop").exists, "no file stop")
    assert torchrun.poll() is None
    assert all(psutil.pid_exists(pid) for pid in ranks)
    (tmp_path / "fail").touch()  # now a rank does fail, and torchrun has to end the other one
    output = torchrun.communicate(timeout=WAIT_S)[0]
    assert torchrun.returncode == 1
    assert "exitcode  : 3 " in output
    assert not any(psutil.pid_exists(pid) for pid in ranks)


# ---- whoever supervises ------------------------------------------------------------------------------------------


@pytest.fixture
def handlers():
    """The signals' meaning is put back afterwards."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_supervisor_asks_first_and_interrupts_then(handlers, tmp_path, number):
    said = []
    stop = StopOnSignal(tmp_path, 100.0, said.append)
    stop.check()
    signal.raise_signal(number)
    stop.check()
    assert (tmp_path / "stop").read_text().startswith(f"{signal.Signals(number).name} to a supervisor on ")
    assert len(said) == 1 and "within 100 s" in said[0]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_the_grace_ends(handlers, tmp_path):
    stop = StopOnSignal(tmp_path, 0.0, lambda said: None)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SaoError, match=r"checkpoint\.stop_grace_s = 0 s"):
        stop.check()


def test_the_first_reason_stays(tmp_path):
    ask_to_stop(tmp_path, "the first")
    ask_to_stop(tmp_path, "the second")
    assert (tmp_path / "stop").read_text() == "the first\n"
