"""Whether the scheduler of a run lives, for hosts that cannot see its processes: by a number in the run folder that it
counts up. No clock is compared with another: who wants to know looks twice.
"""

import threading
import time
from pathlib import Path

from megatron_sao.cli.files import HEARTBEAT_FILE

BEAT_S = 1.0
WATCH_S = 6.0  # after which a number that stands still is nobody's


class Heart:
    """Beats from its making until it is closed, in a thread: also while this process is busy."""

    def __init__(self, run_folder: Path):
        self._path = run_folder / HEARTBEAT_FILE
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Effect: it stands still, and its file is gone."""
        self._is_closed.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        number = 0
        while not self._is_closed.is_set():
            number += 1
            try:
                # Written where it stands, not replaced: who opens it on another host then sees what is in it now.
                self._path.write_text(f"{number}\n", encoding="utf-8")
            except OSError:
                pass  # a full disk ends the run with a better message elsewhere
            self._is_closed.wait(BEAT_S)


class HeartWatch:
    """Looks at a heart again and again, from its making on."""

    def __init__(self, run_folder: Path):
        self._run_folder = run_folder
        self._seen = _look(run_folder)
        self._looked_s = time.monotonic()
        self._silent_s = 0.0

    def silent_s(self) -> float:
        """For how long it has not beaten. While this process stands still itself (a file system that hangs for both)
        no more than one beat counts."""
        number, now_s = _look(self._run_folder), time.monotonic()
        self._silent_s += min(now_s - self._looked_s, BEAT_S)
        self._looked_s = now_s
        if number not in (None, self._seen):
            self._seen, self._silent_s = number, 0.0
        return self._silent_s


def beats(run_folder: Path) -> bool:
    """Whether a heart beats there. Takes as long as a beat, or `WATCH_S` where none does."""
    first, deadline = _look(run_folder), time.monotonic() + WATCH_S
    while time.monotonic() < deadline:
        time.sleep(BEAT_S / 5)
        if _look(run_folder) not in (None, first):
            return True
    return False


def _look(run_folder: Path) -> str | None:
    try:
        return (run_folder / HEARTBEAT_FILE).read_text(encoding="utf-8")
    except OSError:
        return None
