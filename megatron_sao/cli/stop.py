"""How a run is told to save and end: by the file `stop` in its folder, which the scheduler looks for.

Signals make that file. A program that supervises others makes it at the first SIGTERM or Ctrl-C, and gives up at the
second. A trainer rank gets SIGTERM from two sides, and the sender tells which is meant: torchrun, its parent, ends
the rank because another one has failed; anybody else (SLURM signals every process of a job) wants the run to end.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megatron_sao.cli.files import STOP_FILE
from megatron_sao.errors import SaoError


def ask_to_stop(run_folder: Path, reason: str) -> None:
    """Effect: the file `stop` says that the run shall save and end, and who wants it; the first one's reason stays."""
    try:
        with open(run_folder / STOP_FILE, "x", encoding="utf-8") as file:
            file.write(reason + "\n")
    except FileExistsError:
        pass


def reason_to_stop(run_folder: Path) -> str | None:
    """Who wants the run to stop; None = nobody."""
    try:
        text = (run_folder / STOP_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    return text.strip() or f"the file {run_folder / STOP_FILE}"


class StopOnSignal:
    """From its making on, the first SIGTERM or Ctrl-C asks the run to stop and the second is a KeyboardInterrupt.

    Made in the main thread by a program that supervises processes of a run.
    """

    def __init__(self, run_folder: Path, grace_s: float, say: Callable[[str], None]):
        """Args:
            run_folder: of the run.
            grace_s: time the run has to save and end.
            say: tells the user.
        """
        self._run_folder, self._grace_s, self._say = run_folder, grace_s, say
        self._deadline: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    @property
    def is_wanted(self) -> bool:
        """Somebody, on whatever host, wants the run to stop."""
        return reason_to_stop(self._run_folder) is not None

    def check(self) -> None:
        """Raises: SaoError when the run was asked to stop and still goes on after `grace_s`."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise SaoError(
                f"the run was asked to stop and has not ended within checkpoint.stop_grace_s = {self._grace_s:.0f} s;"
                " it is ended as it is, and --resume goes on from the checkpoint before"
            )

    def _handle(self, number: int, frame: object) -> None:
        if self._deadline is not None:
            raise KeyboardInterrupt
        self._deadline = time.monotonic() + self._grace_s
        name = signal.Signals(number).name
        ask_to_stop(self._run_folder, f"{name} to a supervisor on {socket.gethostname()}")
        self._say(f"{name}: the run finishes its step, saves and ends within {self._grace_s:.0f} s; once more: at once")


def stop_on_sigterm(run_folder: Path) -> None:
    """Call first of all in a trainer rank's main thread, before any other thread begins.

    Effect: SIGTERM is blocked in this process and waited for by a thread. From the parent, or a second time, it ends
    the process at once, as it would have without this. From anybody else the first one makes the file `stop`.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_wait_for_sigterm, args=(run_folder,), name="sigterm", daemon=True).start()


def _wait_for_sigterm(run_folder: Path) -> None:
    if signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        rank = os.environ.get("RANK", "0")
        print(f"SIGTERM: trainer rank {rank} asks the run to save and end", flush=True)
        ask_to_stop(run_folder, f"SIGTERM to trainer rank {rank} on {socket.gethostname()}")
        signal.sigwaitinfo({signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.raise_signal(signal.SIGTERM)
