"""The book of issued prompts: each one comes out exactly once.

Owns the file `ledger.sqlite` of a run. A prompt is issued once and then moves along

    in_flight -> buffered -> training -> trained
        |            |           |
        +------------+-----------+-----> dropped (with a reason)

Invariants: no prompt_id is issued twice; no state is entered from a wrong one (an answer that comes twice is an error);
issued = trained + dropped + in flight, where "in flight" at the end of a run covers the three states on the way.
Every change is on disk before the call returns, so that a killed scheduler leaves a true book.
"""

import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from megatron_sao.errors import ProtocolError
from megatron_sao.records import Prompt, decode, encode

IN_FLIGHT = "in_flight"
BUFFERED = "buffered"
TRAINING = "training"
TRAINED = "trained"
DROPPED = "dropped"
OPEN_STATES = (IN_FLIGHT, BUFFERED, TRAINING)

STALE = "stale"
NO_ACTION = "no_action_token"
NO_SIGNAL = "no_signal"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS prompts (
    number INTEGER PRIMARY KEY,        -- order of issue
    prompt_id TEXT NOT NULL UNIQUE,
    prompt BLOB NOT NULL,              -- records.Prompt, so that a restart can issue it again
    state TEXT NOT NULL,
    is_finished INTEGER NOT NULL DEFAULT 0,  -- 1 = its episode came to an end by itself
    phase TEXT,                        -- of the step that took it
    step INTEGER,
    reason TEXT                        -- why it was dropped
);
"""


class LedgerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many prompts stand where. issued = trained + dropped + in_flight + buffered + training."""

    issued: int
    in_flight: int
    buffered: int
    training: int
    trained: int
    dropped: int
    dropped_by_reason: dict[str, int]


class Ledger:
    """The book, one SQLite file. Used by one process at a time."""

    def __init__(self, path: Path | str) -> None:
        """Open or create the book. Effect: creates the file; an existing one is continued."""
        self._path = str(path)
        self._db = sqlite3.connect(self._path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        # Survives a killed process. A power cut may lose the last moments, never the consistency of the file.
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute(_SCHEMA)
        self._states = {}
        self._reasons: Counter[str] = Counter()
        for prompt_id, state, reason in self._db.execute("SELECT prompt_id, state, reason FROM prompts"):
            self._states[prompt_id] = state
            if state == DROPPED:
                self._reasons[reason] += 1
        self._counts = Counter(self._states.values())

    @property
    def num_issued(self) -> int:
        """Prompts issued so far."""
        return len(self._states)

    def issue(self, prompt: Prompt) -> None:
        """Enter a prompt as in flight. Raises ProtocolError if this prompt_id was issued before."""
        if prompt.prompt_id in self._states:
            raise ProtocolError(
                f"prompt {prompt.prompt_id} was issued before (it is {self._states[prompt.prompt_id]}); "
                "a prompt source must give each prompt of a run its own prompt_id"
            )
        self._db.execute(
            "INSERT INTO prompts (prompt_id, prompt, state) VALUES (?, ?, ?)",
            (prompt.prompt_id, encode(prompt), IN_FLIGHT),
        )
        self._states[prompt.prompt_id] = IN_FLIGHT
        self._counts[IN_FLIGHT] += 1

    def finish(self, prompt_id: str) -> None:
        """Its episode ended with a trajectory: in flight -> buffered."""
        self._move([prompt_id], (IN_FLIGHT,), BUFFERED, is_finished=1)

    def take(self, prompt_ids: Iterable[str], *, phase: str, step: int) -> None:
        """A step got these trajectories: buffered -> training. All or none."""
        self._move(prompt_ids, (BUFFERED,), TRAINING, phase=phase, step=step)

    def train(self, prompt_ids: Iterable[str]) -> None:
        """The step reported that it trained on them: training -> trained. All or none."""
        self._move(prompt_ids, (TRAINING,), TRAINED)

    def drop(self, prompt_id: str, reason: str, *, is_finished: bool = True) -> None:
        """Nothing was or will be trained on it, for this reason. `is_finished` = its episode came to an end."""
        self._move([prompt_id], OPEN_STATES, DROPPED, reason=reason, is_finished=int(is_finished))
        self._reasons[reason] += 1

    def state(self, prompt_id: str) -> str:
        """Where a prompt stands. Raises ProtocolError if it was never issued."""
        if prompt_id not in self._states:
            raise ProtocolError(f"prompt {prompt_id} was never issued by this run")
        return self._states[prompt_id]

    def is_finished(self, prompt_id: str) -> bool:
        """Whether its episode came to an end by itself (also if it was dropped afterwards)."""
        row = self._db.execute("SELECT is_finished FROM prompts WHERE prompt_id = ?", (prompt_id,)).fetchone()
        return bool(row and row[0])

    def put_back(self, kept_ids: Iterable[str]) -> list[Prompt]:
        """After a restart: what was on the way is in flight again, unless its finished trajectory was kept.

        Args:
            kept_ids: buffered prompts whose trajectories are at hand.

        Returns:
            The prompts in flight, in order of issue: they are to be played again, before any new one is issued.

        Raises:
            ProtocolError: a kept one is not buffered.
        """
        kept_ids = set(kept_ids)
        for prompt_id in kept_ids:
            if self.state(prompt_id) != BUFFERED:
                raise ProtocolError(f"a trajectory of prompt {prompt_id} was kept, but {self._path} says that it is "
                                    f"{self.state(prompt_id)}: they are not of the same moment")
        lost_ids = [i for i, state in self._states.items() if state in (BUFFERED, TRAINING) and i not in kept_ids]
        self._move(lost_ids, (BUFFERED, TRAINING), IN_FLIGHT, is_finished=0, phase=None, step=None)
        rows = self._db.execute("SELECT prompt FROM prompts WHERE state = ? ORDER BY number", (IN_FLIGHT,))
        return [decode(raw, Prompt) for (raw,) in rows]

    def freeze(self) -> "FrozenLedger":
        """The book as of now; entries made later are not in it. Takes no time, however long the book is."""
        return FrozenLedger(self._path)

    def counts(self) -> LedgerCounts:
        """The totals now."""
        return LedgerCounts(
            issued=self.num_issued,
            in_flight=self._counts[IN_FLIGHT],
            buffered=self._counts[BUFFERED],
            training=self._counts[TRAINING],
            trained=self._counts[TRAINED],
            dropped=self._counts[DROPPED],
            dropped_by_reason=dict(sorted(self._reasons.items())),
        )

    def check(self) -> LedgerCounts:
        """Compare the file with what was counted on the way. Raises ProtocolError when the book does not balance."""
        counts = self.counts()
        on_disk = Counter(dict(self._db.execute("SELECT state, COUNT(*) FROM prompts GROUP BY state")))
        accounted = sum(on_disk.values())
        if on_disk != +self._counts or accounted != counts.issued or sum(self._reasons.values()) != counts.dropped:
            raise ProtocolError(
                f"{self._path} does not balance: issued {counts.issued}, counted {dict(+self._counts)}, "
                f"in the file {dict(on_disk)}, dropped by reason {dict(self._reasons)}"
            )
        return counts

    def close(self) -> None:
        """Effect: closes the file."""
        self._db.close()

    def _move(self, prompt_ids: Iterable[str], allowed: tuple[str, ...], state: str, **columns: object) -> None:
        prompt_ids = list(prompt_ids)
        for prompt_id in prompt_ids:
            if self.state(prompt_id) not in allowed:
                raise ProtocolError(
                    f"prompt {prompt_id} cannot become {state}: it is {self.state(prompt_id)}, "
                    f"must be {' or '.join(allowed)}; did something answer for it twice?"
                )
        if len(set(prompt_ids)) != len(prompt_ids):
            raise ProtocolError(f"the same prompt is named twice to become {state}: {prompt_ids}")
        columns = {"state": state, **columns}
        assignments = ", ".join(f"{name} = ?" for name in columns)
        self._db.execute("BEGIN")
        self._db.executemany(
            f"UPDATE prompts SET {assignments} WHERE prompt_id = ?",
            [(*columns.values(), prompt_id) for prompt_id in prompt_ids],
        )
        self._db.execute("COMMIT")
        for prompt_id in prompt_ids:
            self._counts[self._states[prompt_id]] -= 1
            self._counts[state] += 1
            self._states[prompt_id] = state


def restore_ledger(saved: Path, path: Path) -> None:
    """Effect: the book at `path`, which nobody has open, is the saved one again; what was entered later is gone."""
    copy = path.with_name(f"{path.name}.partial")
    shutil.copyfile(saved, copy)
    for ending in ("-wal", "-shm"):  # entries of a killed process, which would be taken for the copy's
        path.with_name(path.name + ending).unlink(missing_ok=True)
    copy.replace(path)


class FrozenLedger:
    """The book as of one moment, while the book itself goes on. `write` it once, from any thread."""

    def __init__(self, path: str) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        # An open read of a database with a write-ahead log keeps seeing the state in which it began.
        self._db.execute("BEGIN")
        self._db.execute("SELECT 1 FROM prompts LIMIT 1").fetchall()

    def write(self, path: Path) -> None:
        """Effect: `path` is a book of its own, one file; whatever was there is replaced."""
        path.unlink(missing_ok=True)
        copy = sqlite3.connect(path)
        try:
            self._db.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # else whoever opens it looks for the log beside it
        finally:
            copy.close()
            self._db.close()
