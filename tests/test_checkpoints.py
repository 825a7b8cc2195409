"""Checkpoint folders: what counts as finished, what is named when it is damaged, what is kept."""

import errno
import json
import os
import shutil
import zlib
from pathlib import Path

import pytest

from megatron_sao import checkpoints
from megatron_sao.checkpoints import ChecksummedFile, Keep, Manifest, StoredFile
from megatron_sao.errors import CheckpointError


def write(folder, step, pass_rate=None):
    """A whole checkpoint with two files."""
    partial = checkpoints.begin(folder, step)
    (partial / "policy").mkdir()
    with ChecksummedFile(partial / "policy" / "part") as file:
        file.write(b"weights of ")
        file.write(memoryview(str(step).encode()))
    (partial / "config.toml").write_text("[run]\n")
    manifest = Manifest(
        step=step,
        policy_version=step,
        pass_rate=pass_rate,
        config_hash=checkpoints.config_hash("[run]\n"),
        seconds=0.5,
        files=checkpoints.checksums(partial, {"policy/part": file.stored}),
    )
    checkpoints.write_manifest(partial, manifest)
    return checkpoints.give_name(partial)


def names(paths):
    return [path.name for path in paths]


def test_a_checkpoint_is_what_was_written(tmp_path):
    path = write(tmp_path, 40, pass_rate=0.5)
    manifest = checkpoints.read_manifest(path)
    assert manifest.files["policy/part"] == StoredFile(13, zlib.crc32(b"weights of 40"))
    assert manifest.files.keys() == {"policy/part", "config.toml"} and manifest.num_bytes == 19
    assert (manifest.step, manifest.pass_rate, manifest.seconds) == (40, 0.5, 0.5)
    checkpoints.check_sizes(path, manifest)
    checkpoints.check_contents(path, manifest)


def test_the_newest_is_the_one_of_the_last_step(tmp_path):
    assert checkpoints.newest(tmp_path / "absent") is None and checkpoints.newest(tmp_path) is None
    for step in (1000000, 40, 999999):
        write(tmp_path, step)
    assert names(checkpoints.finished(tmp_path)) == ["step-000040", "step-999999", "step-1000000"]
    assert checkpoints.newest(tmp_path).name == "step-1000000"


def test_what_is_not_finished_is_never_taken_for_a_checkpoint(tmp_path):
    whole = write(tmp_path, 0)
    checkpoints.begin(tmp_path, 20)
    (tmp_path / "step-000010.old").mkdir()
    (tmp_path / "step-000030").mkdir()  # somebody's copy that was cut off
    (tmp_path / "notes").mkdir()
    assert checkpoints.finished(tmp_path) == [whole]
    assert names(sorted(checkpoints.remove_leftovers(tmp_path))) == ["step-000010.old", "step-000020.partial"]
    assert names(sorted(tmp_path.iterdir())) == ["notes", "step-000000", "step-000030"]


@pytest.mark.parametrize("step", [0, 20])
def test_the_next_save_removes_what_a_killed_one_left(tmp_path, step):
    (checkpoints.begin(tmp_path, step) / "half").write_text("half")
    write(tmp_path, 40)
    assert names(tmp_path.iterdir()) == ["step-000040"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    write(tmp_path, 40, pass_rate=0.1)
    write(tmp_path, 40, pass_rate=0.2)
    assert names(tmp_path.iterdir()) == ["step-000040"]
    assert checkpoints.read_manifest(tmp_path / "step-000040").pass_rate == 0.2


def test_a_checkpoint_that_is_replaced_goes_after_the_new_one_has_its_name(tmp_path, monkeypatch):
    write(tmp_path, 40, pass_rate=0.1)
    rmtree, seen = shutil.rmtree, []

    def watched(path, **options):
        seen.append(checkpoints.read_manifest(checkpoints.newest(tmp_path)).pass_rate)
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", watched)
    write(tmp_path, 40, pass_rate=0.2)
    assert seen == [0.2], "killed while the old one is removed, the run has the new one"


class Killed(BaseException):
    """At once, as by SIGKILL."""


@pytest.mark.parametrize("num_renames, num_later", [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)])
def test_a_run_killed_while_a_checkpoint_is_replaced_has_one_of_both(tmp_path, monkeypatch, num_renames, num_later):
    """Killed after so many renames of the save, and while leftovers are removed after so many effects of that."""
    write(tmp_path, 40, pass_rate=0.1)
    rename, rmtree = Path.rename, shutil.rmtree

    def killed_after(number, doing):
        calls = iter(range(number))

        def call(*arguments, **options):
            if next(calls, None) is None:
                raise Killed
            return doing(*arguments, **options)

        return call

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "rename", killed_after(num_renames, rename))
        patch.setattr(shutil, "rmtree", killed_after(0, rmtree))
        write(tmp_path, 40, pass_rate=0.2)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        counted = killed_after(num_later, lambda doing, *a, **o: doing(*a, **o))
        patch.setattr(Path, "rename", lambda *a: counted(rename, *a))
        patch.setattr(shutil, "rmtree", lambda *a, **o: counted(rmtree, *a, **o))
        checkpoints.remove_leftovers(tmp_path)
        raise Killed
    checkpoints.remove_leftovers(tmp_path)
    assert names(tmp_path.iterdir()) == ["step-000040"]
    manifest = checkpoints.read_manifest(tmp_path / "step-000040")
    assert manifest.pass_rate == (0.2 if num_renames == 2 else 0.1)
    checkpoints.check_contents(tmp_path / "step-000040", manifest)


def test_what_was_superseded_or_is_half_removed_is_not_put_back(tmp_path):
    write(tmp_path, 40)
    write(tmp_path, 60).rename(tmp_path / "step-000060.gone")
    half = write(tmp_path, 80).rename(tmp_path / "step-000080.old")
    (half / "policy" / "part").unlink()
    assert checkpoints.put_back_replaced(tmp_path) == []
    checkpoints.remove_leftovers(tmp_path)
    assert names(tmp_path.iterdir()) == ["step-000040"]


def test_an_old_checkpoint_that_cannot_be_removed_yet_is_no_fault_of_the_save(tmp_path, monkeypatch):
    for step in (20, 40):
        write(tmp_path, step)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOTEMPTY, "read on NFS")))
        assert kept(tmp_path, 40) == [40]
    assert names(sorted(tmp_path.iterdir())) == ["step-000020.gone", "step-000040"]
    write(tmp_path, 60)
    assert names(sorted(tmp_path.iterdir())) == ["step-000040", "step-000060"]


def damage(path, how):
    raw = path.read_bytes()
    path.unlink()
    if how == "flipped":
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    elif how == "cut":
        path.write_bytes(raw[:-1])


@pytest.mark.parametrize(
    "how, said",
    [
        ("missing", "policy/part is missing (expected 13 bytes)"),
        ("cut", "policy/part has 12 bytes, expected 13"),
        ("flipped", f"expected {zlib.crc32(b'weights of 40'):08x}: damaged"),
    ],
)
def test_a_damaged_file_is_named_with_what_was_expected_and_found(tmp_path, how, said):
    path = write(tmp_path, 40)
    damage(path / "policy" / "part", how)
    manifest = checkpoints.read_manifest(path)
    with pytest.raises(CheckpointError, match="is not what was written") as caught:
        checkpoints.check_sizes(path, manifest)
        checkpoints.check_contents(path, manifest)
    assert said in str(caught.value) and str(path / "policy/part") in str(caught.value)
    assert "config.toml" not in str(caught.value)


def test_a_manifest_that_cannot_be_read_is_named(tmp_path):
    path = write(tmp_path, 40)
    manifest = path / "checkpoint.json"
    fields = json.loads(manifest.read_text())
    for text, said in (
        (json.dumps(fields | {"format": 2}), "has format 2, this program reads format 1"),
        (json.dumps(fields | {"step": None, "more": 1}), "cannot be read"),
        (json.dumps(fields)[:-20], "cannot be read"),
        (None, "is no checkpoint: it has no checkpoint.json"),
    ):
        manifest.unlink()
        if text is not None:
            manifest.write_text(text)
        with pytest.raises(CheckpointError, match=said):
            checkpoints.read_manifest(path)


def kept(folder, newest_step, last=1, every=0, best=0):
    checkpoints.remove_superseded(folder, Keep(last, every, best), newest_step)
    return [checkpoints.step_of(path) for path in checkpoints.finished(folder)]


def test_the_last_ones_are_kept(tmp_path):
    for step in (10, 20, 30, 40):
        write(tmp_path, step)
    assert kept(tmp_path, 40, last=3) == [20, 30, 40]
    assert kept(tmp_path, 40) == [40]
    assert names(tmp_path.iterdir()) == ["step-000040"]


def test_multiples_and_the_best_are_kept_besides(tmp_path):
    rates = {10: 0.3, 20: 0.8, 30: None, 40: 0.7, 50: 0.8, 60: 0.1}
    for step, rate in rates.items():
        write(tmp_path, step, rate)
    assert kept(tmp_path, 60, every=30, best=2) == [20, 30, 50, 60]
    assert kept(tmp_path, 60, best=1) == [50, 60], "of equal ones the later"
    (tmp_path / "step-000050" / "checkpoint.json").write_text("{")
    assert kept(tmp_path, 60, best=1) == [60], "a damaged one is not the best"


def test_later_steps_of_a_course_that_was_left_go(tmp_path):
    for step in (40, 50, 60, 80):
        write(tmp_path, step, 0.9)
    assert kept(tmp_path, 50, last=2, every=20, best=4) == [40, 50]
