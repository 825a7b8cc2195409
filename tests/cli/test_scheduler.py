"""The scheduler's command from its arguments to its files, with a fake engine and a trainer in threads."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from megatron_sao.checkpoints import SCHEDULER_FOLDER, Manifest, checksums, config_hash, write_manifest
from megatron_sao.cli import arrivals
from megatron_sao.cli.run_folder import (
    RunStart,
    announce_scheduler,
    announced_scheduler,
    clear_attempt,
    register_engine,
    write_start,
)
from megatron_sao.cli.scheduler import main
from megatron_sao.config import load_config, to_toml
from megatron_sao.errors import CheckpointError, ConfigError, DataError, EngineError, ProtocolError
from megatron_sao.observe.metrics import read_metrics
from megatron_sao.observe.trajectories import read_trajectories
from megatron_sao.records import (
    STOPPED,
    EvalRequest,
    Goodbye,
    Hello,
    NeedBatch,
    PushDone,
    PushRequest,
    SaveState,
    StopWanted,
)
from megatron_sao.schedule.snapshot import read_snapshot
from megatron_sao.transport.channel import TrainerChannel
from tests.rollout.conftest import SHORT_TEMPLATE, character_tokenizer
from tests.schedule.fake_engine import FakeEngine
from tests.schedule.harness import finish, hello, push, report, save, states, take, train, wait_for

SETTINGS = [
    "--schedule.batch_trajectories=4",
    "--schedule.max_in_flight=6",
    "--run.steps=3",
    "--task.num_eval_prompts=5",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    character_tokenizer(["<user>", "<tool>", "<assistant>", "<end>"], SHORT_TEMPLATE, "<end>").save_pretrained(folder)
    return folder


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "runs" / "test"
    folder.mkdir(parents=True)
    return folder


@contextmanager
def running_engine(**given):
    """A fake engine in a thread of its own."""
    engine, ready, over = FakeEngine(**given), threading.Event(), threading.Event()

    async def serve():
        await engine.start()
        ready.set()
        await asyncio.to_thread(over.wait)
        await engine.stop()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield engine
    finally:
        over.set()
        thread.join(10)


def arguments(run_folder, model, url, *more) -> list[str]:
    return ["--run-folder", str(run_folder), "--model", str(model), "--engines", url, *SETTINGS, *more]


def is_ready(run_folder) -> bool:
    scheduler = announced_scheduler(run_folder)
    return scheduler is not None and scheduler.is_ready


def trainer_that(act, run_folder, over: threading.Event | None = None):
    """What a trainer does that waits for the scheduler, until `over`, and then acts."""

    def trainer():
        while not is_ready(run_folder):  # as long as the scheduler needs to come up, however loaded the machine is
            if over and over.wait(0.02):
                return
        channel = TrainerChannel(announced_scheduler(run_folder).address, timeout_s=60)
        try:
            act(channel)
        except ProtocolError:
            pass  # the scheduler's side is what these tests look at
        finally:
            channel.close()  # whatever happened: the scheduler sees it, and ends

    return trainer


def run_with_trainer(act, argv: list[str], run_folder) -> None:
    """`main(argv)` beside a trainer that does `act(channel)`. Raises what `main` raises."""
    over = threading.Event()
    thread = threading.Thread(target=trainer_that(act, run_folder, over))
    thread.start()
    try:
        main(argv)
    finally:
        over.set()
        thread.join(60)


def test_a_run_leaves_its_files(run_folder, model, capfd):
    def act(channel):
        hello(channel)
        channel.request(EvalRequest(name="before"))
        take(channel, 0, 0, phase="value_pretrain", num=9)
        report(channel, 1, 0, phase="value_pretrain")
        train(channel, 3)
        finish(channel)

    with running_engine() as engine:
        run_with_trainer(act, arguments(run_folder, model, engine.url), run_folder)

    summary = json.loads((run_folder / "scheduler_summary.json").read_text())
    assert (summary["outcome"], summary["trained"], summary["num_pushes"]) == ("finished", 9 + 3 * 4, 3)
    assert summary["issued"] == summary["trained"] + summary["dropped"] + summary["in_flight"]
    assert summary["result"] == {"pass_rate_after": 0.9}
    lines = read_metrics(run_folder / "metrics.jsonl")
    assert [(line["phase"], line["step"]) for line in lines] == [
        ("eval", 0), ("value_pretrain", 1), ("train", 0), ("train", 1), ("train", 2)
    ]
    assert [line["schedule/policy_version"] for line in lines if line["phase"] == "train"] == [0, 1, 2]
    settings = config_hash(to_toml(load_config(None, [setting.removeprefix("--") for setting in SETTINGS])))
    assert {line["config_hash"] for line in lines if line["phase"] != "eval"} == {settings}
    files = {path.name: len(read_trajectories(path)) for path in (run_folder / "trajectories").iterdir()}
    assert files == {"eval-before-000000.parquet": 5, "value_pretrain-000001.parquet": 9,
                     **{f"train-{step:06d}.parquet": 4 for step in range(3)}}
    (one, *_) = read_trajectories(run_folder / "trajectories" / "train-000002.parquet")
    assert one.prompt.environment == "calculator" and one.prompt.prompt_id.startswith("train/e0/")
    assert (run_folder / "report.png").stat().st_size > 10_000
    assert any((run_folder / "tensorboard").iterdir())
    assert "train 3/3" in capfd.readouterr().out


def test_a_trainer_that_does_not_come_is_waited_for_as_long_as_is_configured(run_folder, model):
    with running_engine() as engine:
        with pytest.raises(ProtocolError, match=r"no trainer said Hello within 1 s \(parallel.start_timeout_s\)"):
            main(arguments(run_folder, model, engine.url, "--parallel.start_timeout_s=1"))
    assert summary_of(run_folder)["outcome"].startswith("no trainer said Hello")


def test_an_engine_that_dies_in_the_middle(run_folder, model):
    def act(channel):
        hello(channel)
        take(channel, 0, 0)
        engine.kill()
        report(channel, 0, 0)
        take(channel, 1, 0)
        take(channel, 2, 0)

    with running_engine() as engine:
        with pytest.raises(EngineError, match="has the engine died"):
            run_with_trainer(act, arguments(run_folder, model, engine.url, "--engine.start_timeout_s=3"), run_folder)
    summary = json.loads((run_folder / "scheduler_summary.json").read_text())
    assert "has the engine died" in summary["outcome"]
    assert summary["issued"] == summary["trained"] + summary["dropped"] + summary["in_flight"]


def test_a_run_begins_without_an_engine_that_does_not_come(run_folder, model):
    def act(channel):
        hello(channel)
        train(channel, 3)
        finish(channel)

    with running_engine() as engine:
        urls = f"{engine.url},http://127.0.0.1:9"
        run_with_trainer(act, arguments(run_folder, model, urls, "--engine.start_timeout_s=1"), run_folder)
        assert engine.version == "3"
    summary = json.loads((run_folder / "scheduler_summary.json").read_text())
    assert (summary["outcome"], summary["num_pushes"], summary["engines_taken_out"]) == ("finished", 3, 0)


def test_what_the_command_line_does_not_say_stands_in_the_run_folder(run_folder, model, monkeypatch):
    """Model and engines; one of these registers only after the run has begun, and the next push takes it in."""
    monkeypatch.setattr(arrivals, "LATE_LOOK_EVERY_S", 0.02)
    versions = []

    def act(channel):
        hello(channel)
        train(channel, 1)
        versions.append(late.version)
        register_engine(run_folder, 1, late.url)
        version = 1
        while late.version == "default" and version < 500:
            take(channel, version, version)
            version += 1
            push(channel, version)
            report(channel, version - 1, version)
        versions.append(late.version == prompt.version == str(version))
        finish(channel)

    write_start(run_folder, RunStart(model, None))
    with running_engine() as prompt, running_engine() as late:
        register_engine(run_folder, 0, prompt.url)
        (run_folder / "engines" / "engine-1.json").write_text('{"url": "htt')  # just being written
        argv = ["--run-folder", str(run_folder), *SETTINGS, "--engine.count=2", "--engine.start_timeout_s=1"]
        run_with_trainer(act, argv, run_folder)
    assert versions == ["default", True]
    assert summary_of(run_folder)["outcome"] == "finished"


def refused(run_folder, expected: type, words: str, argv: list[str]) -> None:
    """The command fails with this message and leaves nothing behind."""
    before = sorted(run_folder.iterdir()) if run_folder.exists() else None
    with pytest.raises(expected, match=words):
        main(argv)
    assert (sorted(run_folder.iterdir()) if run_folder.exists() else None) == before


def test_nothing_is_written_when_it_cannot_start(run_folder, model, tmp_path):
    dead = "http://127.0.0.1:9"
    refused(run_folder, ConfigError, "--run-folder is missing", ["--model", str(model)])
    refused(run_folder, ConfigError, "is no prepared run folder", ["--run-folder", str(run_folder)])
    unregistered = ["--run-folder", str(run_folder), "--model", str(model), "--engine.start_timeout_s=0.5"]
    refused(run_folder, EngineError, "no answer from engine 0 .no .*engines/engine-0.json", unregistered)
    refused(run_folder, ConfigError, "is no folder", arguments(run_folder / "absent", model, dead))
    refused(run_folder, ConfigError, "is no folder", arguments(run_folder, tmp_path / "absent", dead))
    refused(run_folder, ConfigError, "tokenizer in .* cannot be read", arguments(run_folder, run_folder, dead))
    impatient = arguments(run_folder, model, dead, "--engine.start_timeout_s=0.5")
    refused(run_folder, EngineError, "no answer from the engine at .*:9", impatient)
    broken = tmp_path / "prompts.jsonl"
    broken.write_text('{"prompt": "a"}\n{"prompt": \n')
    given = arguments(run_folder, model, dead, f"--task.prompts_file={broken}")
    refused(run_folder, DataError, "prompts.jsonl line 2", given)


def test_a_port_in_use(run_folder, model):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        given = arguments(run_folder, model, "http://127.0.0.1:9", f"--schedule.port={port}")
        refused(run_folder, ConfigError, f"{port}.*schedule.port", given)


@contextmanager
def scheduler_process(run_folder, argv: list[str]):
    """The command as a process of its own, from the moment that it is ready. Killed at the end if it still runs."""
    command = [sys.executable, "-m", "megatron_sao.cli.scheduler", *argv]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not is_ready(run_folder) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.communicate()


def summary_of(run_folder) -> dict:
    return json.loads((run_folder / "scheduler_summary.json").read_text())


def test_a_second_termination_ends_it_at_once_with_a_message_and_a_summary(run_folder, model):
    """The first one asks the run to stop, for which the scheduler gives a trainer that is late some time."""
    with running_engine() as engine, scheduler_process(run_folder, arguments(run_folder, model, engine.url)) as process:
        deadline = time.monotonic() + 60
        while not (run_folder / "scheduler_summary.json").exists() and time.monotonic() < deadline:
            process.terminate()  # those that follow soon count as the same
            time.sleep(0.5)
        said = process.stderr.read()
        process.wait(60)
    assert process.returncode == ProtocolError.exit_code
    assert "error: the scheduler was stopped before the run was over" in said and "Traceback" not in said
    assert summary_of(run_folder)["outcome"] == "stopped from outside"
    assert (run_folder / "stop").read_text().startswith("SIGTERM to the scheduler on ")


def test_the_file_stop_ends_a_run_before_its_end(run_folder, model):
    def act(channel):
        hello(channel)
        channel.request(EvalRequest(name="before"))
        train(channel, 1)
        take(channel, 1, 1)
        engine.hold = True
        (run_folder / "stop").touch()
        answers.append(channel.request(EvalRequest(name="x")))
        answers.append(channel.request(PushRequest(policy_version=2, has_group=True)))
        report(channel, 1, 2)
        answers.append(channel.request(NeedBatch(step=2, phase="train", num_trajectories=4, policy_version=2)))
        checkpoint(channel, 1, run_folder / "checkpoints" / "step-000001")
        channel.request(Goodbye(reason=STOPPED))

    answers = []
    with running_engine() as engine:
        run_with_trainer(act, arguments(run_folder, model, engine.url), run_folder)
        assert engine.version == "1"
    summary = summary_of(run_folder)
    assert (summary["outcome"], summary["trained"], summary["policy_version"]) == ("stopped", 8, 2)
    wish = StopWanted(reason=f"the file {run_folder / 'stop'}")
    assert answers == [wish, PushDone(policy_version=2, metrics={}), wish]
    assert not (run_folder / "greedy.json").exists()
    assert (run_folder / "report.png").exists()


def checkpoint(channel, step: int, folder):
    """A whole one, as far as the scheduler is concerned."""
    save(channel, step, folder / SCHEDULER_FOLDER)
    files = checksums(folder, {})
    write_manifest(folder, Manifest(step, step, pass_rate=None, config_hash="", seconds=0.0, files=files))
    return folder


def test_a_run_that_is_killed_while_it_saves_goes_on_from_the_checkpoint_before(run_folder, model):
    """kill -9 between two files of a checkpoint; meanwhile the scheduler has gone on serving episodes."""
    partial = run_folder / "checkpoints" / "step-000002.partial"

    def act(channel):
        hello(channel)
        channel.request(EvalRequest(name="before"))
        train(channel, 1)
        checkpoint(channel, 1, run_folder / "checkpoints" / "step-000001")
        take(channel, 1, 1)
        push(channel, 2)
        report(channel, 1, 2)
        (partial / SCHEDULER_FOLDER).mkdir(parents=True)
        os.mkfifo(partial / SCHEDULER_FOLDER / "trajectories.msgpack")  # opening it waits for a reader
        channel.request(SaveState(step=2, folder=str(partial / SCHEDULER_FOLDER)))

    with running_engine() as engine:
        argv = arguments(run_folder, model, engine.url)
        with scheduler_process(run_folder, argv) as process:
            trainer = threading.Thread(target=trainer_that(act, run_folder), daemon=True)
            trainer.start()
            wait_for(lambda: (partial / SCHEDULER_FOLDER / "ledger.sqlite").exists())
            process.kill()
            trainer.join(30)
    with pytest.raises(CheckpointError, match="state.json is missing"):
        read_snapshot(partial / SCHEDULER_FOLDER)

    def goes_on(channel):
        hello(channel, Hello(policy_version=1, num_trainer_ranks=2, plan=b"plan", plan_hash="h"))
        for step in (1, 2):
            take(channel, step, step)
            push(channel, step + 1)
            report(channel, step, step + 1)
        finish(channel)

    before = read_metrics(run_folder / "metrics.jsonl")
    assert [(line["phase"], line["step"]) for line in before] == [("eval", 0), ("train", 0), ("train", 1)]
    clear_attempt(run_folder)
    later = run_folder / "trajectories" / "train-000007.parquet"  # of a step that the rest of the run does not reach
    later.touch()
    with running_engine() as engine:
        given = arguments(run_folder, model, engine.url, "--resume", str(run_folder / "checkpoints" / "step-000001"))
        run_with_trainer(goes_on, given, run_folder)
    after = read_metrics(run_folder / "metrics.jsonl")
    assert [(line["phase"], line["step"]) for line in after] == [("eval", 0), *(("train", step) for step in range(3))]
    assert after[:2] == before[:2] and after[2] != before[2]
    assert not later.exists()
    summary = summary_of(run_folder)
    assert (summary["outcome"], summary["trained"], summary["policy_version"]) == ("finished", 12, 3)
    rows = list(states(run_folder / "ledger.sqlite"))
    assert rows == [f"train/e0/{number}" for number in range(len(rows))]
    assert summary["issued"] == summary["trained"] + summary["dropped"] + summary["in_flight"]


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_written(run_folder, model, tmp_path):
    def act(channel):
        hello(channel)
        checkpoint(channel, 0, saved)
        finish(channel)

    saved = tmp_path / "saved"
    with running_engine() as engine:
        run_with_trainer(act, arguments(run_folder, model, engine.url), run_folder)
        empty = tmp_path / "empty"
        empty.mkdir()
        given = arguments(empty, model, engine.url, "--resume", str(saved))
        refused(empty, DataError, "same task and run.seed", [*given, "--run.seed=7"])
        refused(empty, CheckpointError, "is no checkpoint", [*given[:-1], str(tmp_path / "absent")])
        path = saved / SCHEDULER_FOLDER / "ledger.sqlite"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        refused(empty, CheckpointError, "ledger.sqlite has the CRC-32", given)
        path.write_bytes(b"")
        refused(empty, CheckpointError, "ledger.sqlite has 0 bytes", given)


def test_a_folder_that_holds_a_run_is_not_touched(run_folder, model):
    (run_folder / "ledger.sqlite").write_bytes(b"an earlier run")
    refused(run_folder, ConfigError, "already holds a run", arguments(run_folder, model, "http://127.0.0.1:9"))
    assert (run_folder / "ledger.sqlite").read_bytes() == b"an earlier run"


@pytest.mark.parametrize("left", ["scheduler.json", "scheduler_summary.json"])
def test_a_folder_that_has_had_its_scheduler_has_to_be_prepared_again(run_folder, model, left):
    """Started once more as it is, a run would go back to the checkpoint that `run.json` names, and later ones be lost."""
    write_start(run_folder, RunStart(model, run_folder / "checkpoints" / "step-000020"))
    (run_folder / left).write_text("{}")
    refused(run_folder, ConfigError, f"{left}.*prepare CONFIG --resume", ["--run-folder", str(run_folder), *SETTINGS])


def test_a_second_scheduler_is_refused_while_the_first_one_waits_for_its_engine(run_folder, model):
    """As of a run that was submitted twice: both are on the way before one of them can be asked."""
    argv = arguments(run_folder, model, "http://127.0.0.1:9", "--engine.start_timeout_s=60")
    command = [sys.executable, "-m", "megatron_sao.cli.scheduler", *argv]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as first:
        try:
            wait_for(lambda: announced_scheduler(run_folder) is not None)
            told = announced_scheduler(run_folder)
            assert not told.is_ready
            with pytest.raises(FileExistsError):  # one that had looked before the first one came
                announce_scheduler(run_folder, "tcp://127.0.0.1:1")
            refused(run_folder, ConfigError, "scheduler.json.*prepare CONFIG --resume", argv)
            assert announced_scheduler(run_folder) == told and first.poll() is None
        finally:
            first.kill()
