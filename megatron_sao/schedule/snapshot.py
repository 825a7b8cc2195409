"""The scheduler's part of a checkpoint: what it takes to go on with each prompt where it stood.

    ledger.sqlite           the book, with what was in flight, buffered, trained and dropped
    trajectories.msgpack    the finished trajectories that wait, in order; each as 8 bytes of length and its record
    state.json              `SchedulerState`: position of the prompts, version, totals; written last

Invariants:
- all three are of one moment, the one at which the trainer asked, however long writing takes and whatever finishes
  meanwhile: a position is never saved without the prompts that were issued up to it and are still on the way;
- every file is on disk before `write` returns; reading changes nothing in the folder.
"""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megatron_sao.errors import CheckpointError
from megatron_sao.records import Trajectory, decode, encode
from megatron_sao.schedule.ledger import FrozenLedger
from megatron_sao.schedule.totals import Totals

FORMAT = 1
LEDGER_FILE = "ledger.sqlite"
TRAJECTORIES_FILE = "trajectories.msgpack"
STATE_FILE = "state.json"

_LENGTH_BYTES = 8  # little endian


class SchedulerState(msgspec.Struct, frozen=True, kw_only=True):
    """What is neither in the ledger nor a trajectory."""

    format: int = FORMAT
    step: int  # after which the checkpoint was taken
    policy_version: int
    prompts: dict[str, int]  # position of the prompt source
    num_trajectories: int  # in the file beside
    totals: Totals
    observer: dict[str, Any]  # what the observer needs to go on from here


@dataclass(frozen=True)
class Snapshot:
    """The state of one moment, not yet written."""

    state: SchedulerState
    trajectories: Sequence[Trajectory]
    ledger: FrozenLedger

    def write(self, folder: Path) -> None:
        """Effect: the files are on disk in `folder`, which exists; an earlier attempt's are replaced.

        Raises: CheckpointError when they cannot be written, for example on a full disk.
        """
        try:
            self._write(folder)
        except (OSError, sqlite3.Error) as error:
            raise CheckpointError(f"the scheduler's part of a checkpoint cannot go to {folder}: {error}") from error

    def _write(self, folder: Path) -> None:
        self.ledger.write(folder / LEDGER_FILE)
        _sync(folder / LEDGER_FILE)
        with open(folder / TRAJECTORIES_FILE, "wb") as file:
            for trajectory in self.trajectories:
                raw = encode(trajectory)
                file.write(len(raw).to_bytes(_LENGTH_BYTES, "little"))
                file.write(raw)
        _sync(folder / TRAJECTORIES_FILE)
        (folder / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(self.state)))
        _sync(folder / STATE_FILE)
        _sync(folder)


@dataclass(frozen=True)
class SavedSchedule:
    """A snapshot that was read. The ledger is to be copied before it is opened: opening one writes."""

    state: SchedulerState
    trajectories: Sequence[Trajectory]
    ledger_path: Path


def read_snapshot(folder: Path) -> SavedSchedule:
    """What `Snapshot.write` left in `folder`. Raises: CheckpointError naming the file that is missing or damaged."""
    for name in (STATE_FILE, LEDGER_FILE, TRAJECTORIES_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing: this is no whole checkpoint of a scheduler")
    path = folder / STATE_FILE
    try:
        state = msgspec.json.decode(path.read_bytes(), type=SchedulerState)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if state.format != FORMAT:
        raise CheckpointError(f"{path} is of format {state.format}, this version reads format {FORMAT}")
    trajectories = list(_trajectories(folder / TRAJECTORIES_FILE))
    if len(trajectories) != state.num_trajectories:
        raise CheckpointError(f"{folder / TRAJECTORIES_FILE} holds {len(trajectories)} trajectories, "
                              f"{STATE_FILE} says {state.num_trajectories}")
    return SavedSchedule(state, trajectories, folder / LEDGER_FILE)


def _trajectories(path: Path) -> Iterator[Trajectory]:
    with open(path, "rb") as file:
        while head := file.read(_LENGTH_BYTES):
            length = int.from_bytes(head, "little")
            raw = file.read(length)
            try:
                yield decode(raw, Trajectory)
            except (msgspec.DecodeError, ValueError, TypeError) as error:
                raise CheckpointError(f"{path} is damaged before byte {file.tell()}: {error}") from error


def _sync(path: Path) -> None:
    """Effect: a file's content, or a folder's list of files, is on disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
