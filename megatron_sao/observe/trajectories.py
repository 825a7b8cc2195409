"""Trajectories of one step as one Parquet file, for reading and for replaying.

Invariants: token ids and the other arrays are stored unchanged and are the truth; the text is decoded for people only
and may hold escapes (a lone surrogate becomes \\udXXX), so it is never tokenised again. A file is whole or absent.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_sao.records import Prompt, Trajectory

TRAJECTORIES_FOLDER = "trajectories"

_ARRAYS = {
    "token_ids": (pa.int64(), np.int64),
    "action_mask": (pa.bool_(), np.bool_),
    "logp_sampler": (pa.float32(), np.float32),
    "reward_t": (pa.float32(), np.float32),
    "version_t": (pa.int32(), np.int32),
    "turn_t": (pa.int32(), np.int32),
}

SCHEMA = pa.schema(
    [
        ("phase", pa.string()),
        ("step", pa.int64()),
        ("prompt_id", pa.string()),
        ("environment", pa.string()),
        ("domain", pa.string()),
        ("reward", pa.float64()),
        ("is_cut", pa.bool_()),
        ("num_action_tokens", pa.int64()),
        ("oldest_version", pa.int64()),
        ("text", pa.string()),
        ("task", pa.string()),  # JSON
        ("metrics", pa.string()),  # JSON
        ("started_s", pa.float64()),
        ("finished_s", pa.float64()),
        *((name, pa.list_(kind)) for name, (kind, _) in _ARRAYS.items()),
    ]
)


def trajectories_path(run_folder: Path | str, phase: str, step: int) -> Path:
    """runs/NAME/trajectories/train-000012.parquet."""
    return Path(run_folder) / TRAJECTORIES_FOLDER / f"{phase}-{step:06d}.parquet"


def write_trajectories(
    path: Path | str,
    trajectories: Sequence[Trajectory],
    *,
    phase: str,
    step: int,
    decode: Callable[[list[int]], str],
) -> None:
    """Write one file, one row per trajectory.

    Args:
        path: where; its folder is made, an old file is replaced.
        trajectories: the rows, in order.
        phase, step: where they were trained on.
        decode: token ids -> text; if it fails the text says so.

    Effect: `path` exists and is whole afterwards, or is what it was before.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([_row(t, phase, step, decode) for t in trajectories], schema=SCHEMA)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(table, temporary, compression="zstd")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_trajectories_after(run_folder: Path | str, last_steps: Mapping[str, int]) -> None:
    """Effect: of the files of each phase those stay that are of its last step, given here, or of one before it."""
    for path in (Path(run_folder) / TRAJECTORIES_FOLDER).glob("*-*.parquet"):
        phase, _, step = path.stem.rpartition("-")
        if step.isdecimal() and int(step) > last_steps.get(phase, -1):
            path.unlink()


def read_trajectories(path: Path | str) -> list[Trajectory]:
    """The trajectories of a file, arrays bit for bit as they were written."""
    return [_trajectory(row) for row in pq.read_table(path, schema=SCHEMA).to_pylist()]


def printable(text: str) -> str:
    """Text that UTF-8 can hold: lone surrogates as escapes, everything else unchanged."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _row(trajectory: Trajectory, phase: str, step: int, decode: Callable[[list[int]], str]) -> dict:
    return {
        "phase": phase,
        "step": step,
        "prompt_id": printable(trajectory.prompt.prompt_id),
        "environment": trajectory.prompt.environment,
        "domain": trajectory.prompt.domain,
        "reward": trajectory.reward,
        "is_cut": trajectory.is_cut,
        "num_action_tokens": trajectory.num_action_tokens,
        "oldest_version": trajectory.oldest_version,
        "text": _text(trajectory, decode),
        "task": json.dumps(trajectory.prompt.task),  # ASCII: surrogates come back as they were
        "metrics": json.dumps(trajectory.metrics),
        "started_s": trajectory.started_s,
        "finished_s": trajectory.finished_s,
        **{name: getattr(trajectory, name) for name in _ARRAYS},
    }


def _text(trajectory: Trajectory, decode: Callable[[list[int]], str]) -> str:
    try:
        return printable(decode(trajectory.token_ids.tolist()))
    except Exception as error:  # text is a convenience: a tokenizer's fault must not lose the ids
        return f"<the tokens cannot be decoded: {error!r}>"


def _trajectory(row: dict) -> Trajectory:
    prompt = Prompt(
        prompt_id=row["prompt_id"],
        environment=row["environment"],
        domain=row["domain"],
        task=json.loads(row["task"]),
    )
    return Trajectory(
        prompt=prompt,
        reward=row["reward"],
        is_cut=row["is_cut"],
        started_s=row["started_s"],
        finished_s=row["finished_s"],
        metrics=json.loads(row["metrics"]),
        **{name: np.array(row[name], kind) for name, (_, kind) in _ARRAYS.items()},
    )
