"""Run one command and make sure that neither it nor anything it started outlives the program that wanted it.

    python -m megatron_sao.rollout.process_guard COMMAND ARG...      (stdin: a pipe that the parent holds open)

A parent that is killed cannot clean up, vLLM asked to end while it starts may wait for ever, and torchrun puts each
rank into a session of its own, out of reach of a signal to its process group. So this small process adopts every orphan
below it, starts the command and waits: when the command ends, it kills what the command left behind and ends with the
same exit code; when the pipe closes, because the parent is gone or wants it so, it kills everything. SIGTERM is passed
on to the command. Linux only; it starts in a moment and takes a few MB.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_KILL_TIMEOUT_S = 5.0


def main(command: list[str]) -> int:
    """Run `command`. Returns: its exit code, 128 + n if signal n killed it. Must lead its own process group."""
    if os.getpgrp() != os.getpid():
        print("process_guard must be started as the leader of a session (start_new_session=True)", file=sys.stderr)
        return 2
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # an orphan's new parent is this process, not init
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        threading.Thread(target=_end_with_parent, daemon=True).start()
        status = child.wait()
    finally:
        _kill_descendants()
    return status if status >= 0 else 128 - status


def _end_with_parent() -> None:
    while os.read(0, 1):  # nobody writes; an empty read means that the other end is closed
        pass
    _kill_descendants()
    os._exit(128 + signal.SIGKILL)


def _kill_descendants() -> None:
    """Effect: SIGKILL to all processes below this one, in whatever group or session, until none lives."""
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while time.monotonic() < deadline and (living := _living_descendants()):
        for process in living:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.02)


def _living_descendants() -> list[psutil.Process]:
    living = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
