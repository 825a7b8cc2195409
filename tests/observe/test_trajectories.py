"""Trajectory files: ids are the truth, text never breaks them, a file is whole or absent."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_sao.observe.trajectories import (
    printable,
    read_trajectories,
    remove_trajectories_after,
    trajectories_path,
    write_trajectories,
)
from megatron_sao.records import Prompt
from tests.schedule.support import make_trajectory

ARRAYS = ("token_ids", "action_mask", "logp_sampler", "reward_t", "version_t", "turn_t")


def test_arrays_and_fields_come_back_unchanged(tmp_path):
    path = trajectories_path(tmp_path, "train", 12)
    given = [
        make_trajectory("a", versions=(0, 1, 1), reward=1.0, metrics={"tool_calls": 2.0}),
        make_trajectory("b", versions=(7,), reward=0.1, is_cut=True, num_observation=5),
    ]
    write_trajectories(path, given, phase="train", step=12, decode=str)
    assert path.name == "train-000012.parquet"
    for one, other in zip(read_trajectories(path), given, strict=True):
        for name in ("prompt", "reward", "is_cut", "metrics", "started_s", "finished_s"):
            assert getattr(one, name) == getattr(other, name)
        for name in ARRAYS:
            assert getattr(one, name).dtype == getattr(other, name).dtype
            assert np.array_equal(getattr(one, name), getattr(other, name))
    assert [path.name for path in path.parent.iterdir()] == ["train-000012.parquet"]


def test_what_was_written_after_a_checkpoint_goes_when_a_run_goes_back_to_it(tmp_path):
    for phase, step in (("train", 39), ("train", 40), ("train", 41), ("eval-step-40", 38), ("eval-step-50", 48)):
        write_trajectories(trajectories_path(tmp_path, phase, step), [], phase=phase, step=step, decode=str)
    mine = tmp_path / "trajectories" / "best-ones.parquet"
    mine.touch()
    remove_trajectories_after(tmp_path, {"train": 40, "eval-step-40": 38})
    left = sorted(path.name for path in mine.parent.iterdir())
    assert left == [mine.name, "eval-step-40-000038.parquet", "train-000039.parquet", "train-000040.parquet"]
    remove_trajectories_after(tmp_path / "without", {})


@pytest.mark.parametrize("text", ["a\ud83d b", "nul\0byte", "😀 four bytes", "line\u2028separator", "\udfff", ""])
def test_any_text_can_be_written(tmp_path, text):  # INP-06
    prompt = Prompt(prompt_id="p\ud800", environment="test", domain="agentic", task={"question": text})
    trajectory = make_trajectory(prompt=prompt)
    path = tmp_path / "x.parquet"
    write_trajectories(path, [trajectory], phase="train", step=0, decode=lambda ids: text)
    (back,) = read_trajectories(path)
    assert np.array_equal(back.token_ids, trajectory.token_ids)
    assert back.prompt.task == {"question": text}
    assert pq.read_table(path)["text"].to_pylist() == [printable(text)]


def test_only_lone_surrogates_are_escaped():
    assert printable("a\ud83d b") == "a\\ud83d b"
    assert printable("😀\0\u2028é") == "😀\0\u2028é"


def test_a_tokenizer_that_fails_loses_no_ids(tmp_path):
    def decode(ids):
        raise OverflowError("id out of range")

    path = tmp_path / "x.parquet"
    write_trajectories(path, [make_trajectory("a")], phase="train", step=0, decode=decode)
    assert len(read_trajectories(path)) == 1
    assert "cannot be decoded" in pq.read_table(path)["text"].to_pylist()[0]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.parquet"
    write_trajectories(path, [make_trajectory("a")], phase="train", step=0, decode=str)
    with pytest.raises(Exception):
        write_trajectories(path, [make_trajectory("b", reward="no number")], phase="train", step=0, decode=str)
    assert read_trajectories(path)[0].prompt.prompt_id == "a"
    assert [p.name for p in tmp_path.iterdir()] == ["x.parquet"]


def test_ids_beyond_32_bits_and_special_floats(tmp_path):
    logp = np.array([0.0, -np.inf, -0.0], np.float32)
    trajectory = make_trajectory("a", logp_sampler=logp, token_ids=np.array([0, 2**40, 5]))
    path = tmp_path / "x.parquet"
    write_trajectories(path, [trajectory], phase="train", step=0, decode=str)
    (back,) = read_trajectories(path)
    assert back.token_ids.tolist() == [0, 2**40, 5]
    assert back.logp_sampler.tobytes() == logp.tobytes()
