"""The numbers of a run: one JSON object per line, and TensorBoard.

Owns `metrics.jsonl` and the folder `tensorboard` of a run. A line is
    {"time_s": unix time, "phase": "train", "step": 12, "rollout/pass_rate": 0.5, ...}
Invariants: every line is complete JSON (ASCII; NaN and infinities as the strings "nan", "inf", "-inf") and on its way
to disk when `log` returns; writing never raises because of what a value is; a run that goes on from a checkpoint first
cuts off what was written after it, so that no step is there twice.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from megatron_sao.records import TRAIN

METRICS_FILE = "metrics.jsonl"
CONFIG_HASH = "config_hash"  # in the line of a step: which settings it had; as in the manifest of a checkpoint
TENSORBOARD_FOLDER = "tensorboard"


class MetricsSink:
    """Writes both files of one run. Not for several threads at once."""

    def __init__(self, folder: Path | str, go_on_from: Mapping[str, int] | None = None) -> None:
        """Effect: opens the files in `folder` (which must exist); lines are appended.

        Args:
            go_on_from: what `position` gave in an earlier life of the run: what was written later is cut off first.
        """
        self._folder = folder = Path(folder)
        if go_on_from is not None:
            _cut_off(folder, go_on_from)
        self._jsonl = open(folder / METRICS_FILE, "a", encoding="ascii", newline="\n")
        self._tensorboard = EventFileWriter(str(folder / TENSORBOARD_FOLDER))

    def log(self, step: int, phase: str, metrics: Mapping[str, Any]) -> None:
        """Write one line, and every number of it to TensorBoard.

        Args:
            step: step within the phase.
            phase: PRETRAIN, WARMUP or TRAIN of records.py, or "eval".
            metrics: name -> number (or text, which goes to the JSON only). A `phase`, `step` or `time_s` in it does not
                count.
        """
        record = {**metrics, "time_s": time.time(), "phase": phase, "step": step}
        ordered = {name: record.pop(name) for name in ("time_s", "phase", "step")} | dict(sorted(record.items()))
        self._jsonl.write(json.dumps({name: _json_value(value) for name, value in ordered.items()}) + "\n")
        self._jsonl.flush()
        prefix = "" if phase == TRAIN else f"{phase}/"  # in TensorBoard, other phases are put below their name
        values = [
            Summary.Value(tag=prefix + name, simple_value=float(value))
            for name, value in metrics.items()
            if _is_number(value)
        ]
        self._tensorboard.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._tensorboard.flush()

    def position(self) -> dict[str, int]:
        """The bytes that each file holds now, by its path in the folder."""
        return {str(path.relative_to(self._folder)): path.stat().st_size for path in _files(self._folder)}

    def close(self) -> None:
        """Effect: both files are complete on disk."""
        self._jsonl.close()
        self._tensorboard.close()


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, "nan" and infinities as floats again. An incomplete last line is left out."""
    records = []
    with open(path, encoding="ascii") as file:
        for line in file:
            if line.endswith("\n"):
                records.append({name: _plain_value(value) for name, value in json.loads(line).items()})
    return records


def _files(folder: Path) -> list[Path]:
    return [folder / METRICS_FILE, *sorted((folder / TENSORBOARD_FOLDER).glob("events.*"))]


def _cut_off(folder: Path, position: Mapping[str, int]) -> None:
    """Effect: the files hold what they held at `position`, whole lines; files of TensorBoard made later are gone.

    TensorBoard's own way, a session that purges all steps from a given one on, would also hide earlier phases: each
    phase counts its steps anew.
    """
    for path in _files(folder):
        size = position.get(str(path.relative_to(folder)))
        if size is not None and path.exists() and path.stat().st_size > size:
            os.truncate(path, size)
        elif size is None and path.name != METRICS_FILE:
            path.unlink()
    path = folder / METRICS_FILE
    if path.exists() and (lines := path.read_bytes()) and not lines.endswith(b"\n"):
        os.truncate(path, lines.rfind(b"\n") + 1)  # its end was lost with the machine


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)


def _json_value(value: Any) -> Any:
    """What JSON can hold: numpy scalars become Python's, non-finite floats text, anything else its description."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if not _is_number(value):
        return repr(value)
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _plain_value(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value
