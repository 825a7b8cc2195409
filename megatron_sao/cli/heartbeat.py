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
    """Looks at a heart again and again."""

    def __init__(self, run_folder: Path):
        self._path = run_folder / HEARTBEAT_FILE
        self._seen = self._look()
        self._changed_s = time.monotonic()

    def silent_s(self) -> float:
        """For how long it is known not to have beaten, at least."""
        now = self._look()
        if now not in (None, self._seen):
            self._seen, self._changed_s = now, time.monotonic()
        return time.monotonic() - self._changed_s

    def _look(self) -> str | None:
        try:
            return self._path.read_text(encoding="utf-8")
        except OSError:
            return None


def beats(run_folder: Path) -> bool:
    """Whether a heart beats there. Takes as long as a beat, or `WATCH_S` where none does."""
    watch = HeartWatch(run_folder)
    before = 0.0
    while (silent_s := watch.silent_s()) >= before:
        if silent_s > WATCH_S:
            return False
        before = silent_s
        time.sleep(BEAT_S / 5)
    return True
