"""Run one command and make sure that it does not outlive the program that wanted it.

    python -m megatron_sao.rollout.process_guard COMMAND ARG...      (stdin: a pipe that the parent holds open)

A parent that is killed cannot clean up, and vLLM asked to end while it starts may wait for ever. So this small process
leads a process group, starts the command in it and waits: when the command ends, it ends with the same exit code; when
the pipe closes, because the parent is gone in whatever way, it kills the whole group. SIGTERM is passed on to the
command. Standard library only: it starts in a moment and takes a few MB.
"""

import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> int:
    """Run `command`. Returns: its exit code, 128 + n if signal n killed it. Must lead its own process group."""
    if os.getpgrp() != os.getpid():
        print("process_guard must be started as the leader of a session (start_new_session=True)", file=sys.stderr)
        return 2
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    threading.Thread(target=_kill_group_with_parent, daemon=True).start()
    status = child.wait()
    return status if status >= 0 else 128 - status


def _kill_group_with_parent() -> None:
    while os.read(0, 1):  # nobody writes; an empty read means that the other end is closed
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)  # this process included


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
