"""A run folder between the attempts of its run."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_sao.cli import files
from megatron_sao.cli.run_folder import RunStart, clear_attempt, make_run_folder, read_start, write_start
from megatron_sao.errors import ConfigError


def test_a_new_run_moves_an_earlier_one_of_its_name_aside(tmp_path):
    path = tmp_path / "runs" / "local"
    assert make_run_folder(path) is None
    for number in (1, 2):
        (path / "mine").write_text(f"run {number}")
        assert make_run_folder(path).name == f"local.{number}"
        assert list(path.iterdir()) == []
    assert (tmp_path / "runs" / "local.2" / "mine").read_text() == "run 2"


@pytest.mark.parametrize("checkpoint", [None, "checkpoints/step-000040"])
def test_what_an_attempt_starts_from(tmp_path, checkpoint):
    start = RunStart(tmp_path / "model", tmp_path / checkpoint if checkpoint else None)
    write_start(tmp_path, start)
    assert read_start(tmp_path) == start


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"model": "m"}'])
def test_a_folder_that_nobody_prepared_says_what_would(tmp_path, content):
    if content is not None:
        (tmp_path / files.RUN_FILE).write_text(content)
    with pytest.raises(ConfigError, match="cli.prepare"):
        read_start(tmp_path)


def test_what_an_attempt_starts_from_is_replaced_as_a_whole(tmp_path, monkeypatch):
    """A job that is killed while it prepares is queued again, and must still find that the run is its own."""
    before = RunStart(tmp_path / "model", None, job="4711")
    write_start(tmp_path, before)
    monkeypatch.setattr(Path, "replace", lambda path, target: None)
    write_start(tmp_path, replace(before, resume=tmp_path / "checkpoints" / "step-000020"))
    clear_attempt(tmp_path)
    assert read_start(tmp_path) == before


def test_the_next_attempt_takes_nothing_of_the_one_before_for_its_own(tmp_path):
    for name in (files.ADDRESS_FILE, files.HEARTBEAT_FILE, files.STOP_FILE, files.SUMMARY_FILE, files.RESULT_FILE):
        (tmp_path / name).write_text("old")
    (tmp_path / files.LEDGER_FILE).write_text("book")
    (tmp_path / files.ENGINES_FOLDER).mkdir()
    (tmp_path / files.ENGINES_FOLDER / "engine-0.json").write_text("old")
    for attempt in (1, 2):
        (tmp_path / files.LOGS_FOLDER).mkdir()
        (tmp_path / files.LOGS_FOLDER / "trainer.log").write_text(f"attempt {attempt}")
        clear_attempt(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(
        [files.LEDGER_FILE, files.ENGINES_FOLDER, "logs.1", "logs.2", "trainer.log", "trainer.log"]
    )
    assert (tmp_path / "logs.1" / "trainer.log").read_text() == "attempt 1"
