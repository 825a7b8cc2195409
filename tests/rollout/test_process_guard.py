"""The guard: what it runs, and whatever that started, never outlives the program that wanted it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

CLONE = str(Path(__file__).resolve().parents[2])

# Starts a process in a session of its own (as torchrun does with its ranks) that ignores SIGTERM, and says its pid.
STUBBORN = """
import subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
"""


@pytest.fixture
def guarded():
    started = []

    def start(code: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_sao.rollout.process_guard", sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": CLONE},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.stdin.close()
        process.wait(20)


def _is_gone(pid: int, timeout_s: float = 10.0) -> bool:
    """Whether the process ends within the time; a zombie that init has not collected yet counts as gone."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("code", "status"),
    [("", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_ends_with_the_status_of_its_command(guarded, code, status):
    assert guarded(code).wait(20) == status


def test_kills_what_the_command_left_behind(guarded):
    process = guarded(STUBBORN + "sys.exit(7)")
    pid = int(process.stdout.readline())
    assert process.wait(20) == 7
    assert _is_gone(pid)


def test_kills_everything_when_the_pipe_of_its_parent_closes(guarded):
    process = guarded(STUBBORN + "time.sleep(60)")
    pid = int(process.stdout.readline())
    process.stdin.close()
    assert process.wait(20) == 128 + signal.SIGKILL
    assert _is_gone(pid)


def test_kills_everything_when_the_command_is_killed(guarded):
    process = guarded(STUBBORN + "import os; print(os.getpid(), flush=True); time.sleep(60)")
    pid, command = int(process.stdout.readline()), int(process.stdout.readline())
    os.kill(command, signal.SIGKILL)
    assert process.wait(20) == 128 + signal.SIGKILL
    assert _is_gone(pid)


def test_passes_sigterm_on_to_the_command(guarded):
    process = guarded("import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
                      "print('ready', flush=True); time.sleep(60)")  # fmt: skip
    process.stdout.readline()
    process.terminate()
    assert process.wait(20) == 3


def test_refuses_to_run_inside_a_foreign_process_group():
    done = subprocess.run(
        [sys.executable, "-m", "megatron_sao.rollout.process_guard", "true"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": CLONE},
        process_group=os.getpgrp(),
    )
    assert done.returncode == 2
    assert b"leader of a session" in done.stderr
