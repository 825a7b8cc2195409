"""What is made ready before the processes of a run start, and how a run is resumed."""

import json
import shutil
import socket
import threading
from pathlib import Path

import pytest
import zmq

from megatron_sao.checkpoints import CONFIG_FILE, MANIFEST_FILE, Manifest, checksum, write_manifest
from megatron_sao.cli import files, heartbeat, preflight
from megatron_sao.cli.options import parse_options
from megatron_sao.cli.prepare import SWITCHES, prepare
from megatron_sao.cli.run_folder import announce_scheduler, announced_scheduler, read_start
from megatron_sao.config import load_config
from megatron_sao.errors import ConfigError


@pytest.fixture
def attempt(tmp_path, tiny_folder):
    """Prepares the run tmp_path/runs/mine of a tiny model with these switches; -> (run folder, what it said)."""

    def prepare_with(*switches: str, model: Path | None = tiny_folder) -> tuple[Path, list[str]]:
        argv = ["--run.folder", str(tmp_path / "runs"), "--run.name", "mine", *switches]
        if model:  # else it is the demonstration's
            argv += ["--model.path", str(model), "--warm_start.enabled", "false"]
        options = parse_options(argv, about="", switches=SWITCHES)
        said = []
        return prepare(options.load_config(), options, said.append), said

    return prepare_with


def add_checkpoint(run_folder: Path, step: int, name: str = "") -> Path:
    folder = run_folder / files.CHECKPOINTS_FOLDER / (name or f"step-{step:06d}")
    folder.mkdir(parents=True)
    (folder / MANIFEST_FILE).write_text("{}")
    (folder / CONFIG_FILE).write_text((run_folder / files.CONFIG_FILE).read_text())
    return folder


def test_a_new_run_gets_its_configuration_and_its_model(attempt, tiny_folder):
    folder, said = attempt()
    assert load_config(folder / files.CONFIG_FILE).run.name == "mine"
    start = read_start(folder)
    assert (start.model, start.resume) == (tiny_folder, None)
    assert said == []


def test_a_second_new_run_moves_the_first_aside_with_its_checkpoints(attempt):
    folder, _ = attempt()
    add_checkpoint(folder, 40)
    again, said = attempt()
    assert again == folder and not (folder / files.CHECKPOINTS_FOLDER).exists()
    assert (folder.with_name("mine.1") / files.CHECKPOINTS_FOLDER / "step-000040").is_dir()
    assert "moved to mine.1" in said[0]


@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_new_run_reads_nothing_that_it_would_move_aside(attempt, tmp_path, tiny_folder, through_a_link):
    folder, _ = attempt()
    export = shutil.copytree(tiny_folder, folder / "export")
    if through_a_link:
        export = tmp_path / "link"
        export.symlink_to(folder / "export")
    prompts = ("--task.prompts_file", str(folder / "prompts.jsonl"))
    with pytest.raises(ConfigError, match="give the run another run.name, or copy this elsewhere") as caught:
        attempt(*prompts, model=export)
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["model.path", "task.prompts_file"]
    with pytest.raises(ConfigError, match="^warm_start.cache_folder = "):
        attempt("--warm_start.cache_folder", str(folder / "cache"), model=None)
    assert (folder / "export").is_dir() and not folder.with_name("mine.1").exists()


@pytest.mark.parametrize("switch", ["--resume", "--resume-or-start"])
def test_a_resumed_run_goes_on_in_its_folder_from_the_newest_whole_checkpoint(attempt, switch):
    folder, _ = attempt()
    add_checkpoint(folder, 20)
    newest = add_checkpoint(folder, 40)
    add_checkpoint(folder, 60, "step-000060.partial")
    (folder / files.LEDGER_FILE).write_text("book")
    (folder / files.STOP_FILE).write_text("of the attempt before")
    again, said = attempt(switch)
    assert again == folder and read_start(folder).resume == newest
    assert (folder / files.LEDGER_FILE).read_text() == "book"
    assert not (folder / files.STOP_FILE).exists()
    assert "step-000040" in said[-1]


@pytest.mark.parametrize("switch", ["--resume", "--resume-or-start"])
def test_a_run_killed_while_it_replaced_its_only_checkpoint_goes_on_from_it(attempt, switch):
    folder, _ = attempt()
    whole = add_checkpoint(folder, 20)
    write_manifest(whole, Manifest(20, 20, None, "", 0.0, {CONFIG_FILE: checksum(whole / CONFIG_FILE)}))
    whole.rename(whole.with_name("step-000020.old"))
    add_checkpoint(folder, 20, "step-000020.partial")
    attempt(switch)
    assert read_start(folder).resume == whole and whole.is_dir()


@pytest.mark.parametrize("switches", [(), ("--resume",)])
def test_a_run_that_goes_on_is_left_alone(attempt, monkeypatch, switches):
    monkeypatch.setattr(preflight, "ENDS_WITHIN_S", 0.1)
    monkeypatch.setattr(heartbeat, "WATCH_S", 0.1)
    folder, _ = attempt()
    add_checkpoint(folder, 20)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as scheduler:
        port = scheduler.bind_to_random_port("tcp://127.0.0.1")
        announce_scheduler(folder, f"tcp://127.0.0.1:{port}")
        with pytest.raises(ConfigError, match="goes on: its scheduler answers at tcp://127.0.0.1"):
            attempt(*switches)
        assert announced_scheduler(folder) and not folder.with_name("mine.1").exists()
    with socket.create_server(("127.0.0.1", port)) as other:  # has the port of the scheduler that has ended
        other.settimeout(30)
        threading.Thread(target=lambda: other.accept()[0].sendall(b"SSH-2.0"), daemon=True).start()
        attempt(*switches)
    assert announced_scheduler(folder) is None


@pytest.mark.parametrize("switches", [(), ("--resume",)])
def test_a_run_whose_scheduler_lives_where_this_host_does_not_reach_is_left_alone(attempt, monkeypatch, switches):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    monkeypatch.setattr(heartbeat, "WATCH_S", 1.0)
    folder, _ = attempt()
    add_checkpoint(folder, 20)
    announce_scheduler(folder, "tcp://127.0.0.1:9")  # of another host: nobody listens here
    heart = heartbeat.Heart(folder)
    with pytest.raises(ConfigError, match=f"goes on: its scheduler lives on the host {socket.gethostname()}; end it"):
        attempt(*switches)
    assert announced_scheduler(folder) and not folder.with_name("mine.1").exists()
    heart.close()
    attempt(*switches)
    assert announced_scheduler(folder) is None and not (folder / files.HEARTBEAT_FILE).exists()


@pytest.mark.parametrize("exists", [False, True])
def test_resuming_what_has_saved_nothing_is_an_error_that_changes_nothing(attempt, tmp_path, exists):
    if exists:
        folder, _ = attempt()
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="holds no finished checkpoint" if exists else "does not exist"):
        attempt("--resume")
    if exists:
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    else:
        assert not (tmp_path / "runs" / "mine").exists()


@pytest.mark.parametrize("switch", ["--resume-or-start", "--requeued"])
def test_a_requeued_run_that_has_saved_nothing_begins_again(attempt, monkeypatch, switch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    attempt(switch)
    folder, said = attempt(switch)
    assert read_start(folder).resume is None and "moved to mine.1" in said[0]


def test_a_requeued_job_goes_on_with_its_own_run_and_leaves_an_earlier_one_of_that_name_alone(attempt, monkeypatch):
    """A job may be queued again before it has prepared anything."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    folder, _ = attempt()
    earlier = add_checkpoint(folder, 500)
    assert attempt("--requeued") and read_start(folder).resume == earlier
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    _, said = attempt("--requeued")
    assert read_start(folder).resume is None and "moved to mine.1" in said[0]
    own = add_checkpoint(folder, 20)
    assert attempt("--requeued") and read_start(folder).resume == own


def test_a_requeued_job_says_that_it_is_one(attempt, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match="--requeued is for a job of SLURM's; SLURM_JOB_ID is not set"):
        attempt("--requeued")


def test_what_has_changed_is_said_and_what_must_not_is_refused(attempt):
    folder, _ = attempt()
    add_checkpoint(folder, 20)
    _, said = attempt("--resume", "--run.steps", "500")
    assert any("run.steps" in line and "500" in line for line in said)
    with pytest.raises(ConfigError, match="run.seed"):
        attempt("--resume", "--run.seed", "9")


def test_a_resumed_run_keeps_its_model_however_it_is_written(attempt, tmp_path, tiny_folder):
    folder, _ = attempt()
    add_checkpoint(folder, 20)
    (tmp_path / "link").symlink_to(tiny_folder)
    attempt("--resume", model=tmp_path / "link")
    assert read_start(folder).model == tiny_folder


def test_a_resumed_run_makes_its_demonstration_model_again_only_where_it_is_gone(
    attempt, tmp_path, tiny_folder, monkeypatch
):
    made = [shutil.copytree(tiny_folder, tmp_path / name) for name in ("first", "second")]
    monkeypatch.setattr("megatron_sao.train.warm_start.prepare_demonstration_model", lambda *_: made.pop(0))
    folder, _ = attempt(model=None)
    add_checkpoint(folder, 20)
    attempt("--resume", model=None)
    assert read_start(folder).model == tmp_path / "first"
    shutil.rmtree(tmp_path / "first")
    attempt("--resume", model=None)
    assert read_start(folder).model == tmp_path / "second"


def test_both_ways_of_resuming_at_once_are_refused(attempt):
    with pytest.raises(ConfigError, match="choose one"):
        attempt("--resume", "--resume-or-start")


def test_paths_in_run_json_hold_wherever_a_process_starts(attempt):
    folder, _ = attempt()
    assert all(Path(path).is_absolute() for path in json.loads((folder / files.RUN_FILE).read_text()).values() if path)
