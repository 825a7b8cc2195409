"""Faults of the user and of the machine: one clear message, a bad exit code, soon, nothing half-written, nothing left.

What can be seen before anything starts is seen within seconds; what dies in the middle of a run is in `test_resume.py`.
"""

import json
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megatron_sao.cli.run_folder import RunStart, write_start
from tests.support.local_run import (
    CLONE,
    ENGINE,
    SMALL_RUN,
    TORCHRUN,
    TRAINER_RANK,
    LocalRun,
    MarkedCommand,
)

END_WITHIN_S = 30.0  # from the fault to the end of the last process
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def start(tmp_path):
    """Starts runs and ends whatever is left of them afterwards."""
    runs = []

    def start_run(*arguments: str, **options) -> LocalRun:
        runs.append(LocalRun(tmp_path, *arguments, **options))
        return runs[-1]

    yield start_run
    for run in runs:
        run.close()


def check_end(run: MarkedCommand, *words: str, exit_code: int, since_s: float | None = None) -> str:
    """The run ends in time with `exit_code`, one message that holds `words`, and no process. -> the message."""
    since_s = run.started_s if since_s is None else since_s
    found = run.wait(END_WITHIN_S + 30)  # a longer wait than allowed, so that a slow end shows as one
    seconds = time.monotonic() - since_s
    print(f"ended {seconds:.1f} s after the fault:\n{run.output}")  # pytest -rP shows it
    assert found == exit_code, run.output
    assert run.processes() == []
    assert "Traceback" not in run.output
    before, *messages = run.output.split("\nerror: ")
    assert len(messages) == 1, run.output
    for word in words:
        assert word in messages[0], run.output
    assert seconds <= END_WITHIN_S
    return messages[0]


def check_interrupted(run: LocalRun, since_s: float) -> None:
    assert run.wait(END_WITHIN_S + 30) == 130
    seconds = time.monotonic() - since_s
    print(f"ended {seconds:.1f} s after the signal:\n{run.output}")
    assert seconds <= END_WITHIN_S
    assert run.processes() == []
    assert "Traceback" not in run.output
    assert run.output.splitlines()[-1] == "interrupted"


# ---- before anything starts ------------------------------------------------------------------------------------


def check_refused(run: LocalRun, *words: str, exit_code: int) -> None:
    """As `check_end`; and neither a run folder nor anything else was written, no process started."""
    check_end(run, *words, exit_code=exit_code)
    assert "[local]" not in run.output
    assert not run.folder.parent.exists()


def no_warm_start(folder: Path) -> list[str]:
    return ["--model.path", str(folder), "--warm_start.enabled", "false"]


def test_all_faults_of_a_configuration_are_reported_together(start):
    run = start(
        "--algo.gama", "0.9", "--policy.batch_trajectories", "16", "--run.steps", "many", "--parallel.tp", "3",
        "--value.warmup-steps", "2",
    )  # fmt: skip
    check_refused(
        run,
        "7 faults",
        "algo.gama", "algo.gamma",  # the nearest name
        "policy.batch_trajectories", "schedule.batch_trajectories",  # the section where it belongs
        "run.steps = 'many' must be an integer",
        "parallel.tp = 3 does not divide warm_start.heads = 4; use 1, 2 or 4",
        "parallel.ep * etp = 2 * 1 = 2 does not divide parallel.tp * cp * dp = 3",
        "value.warmup-steps", "value.warmup_steps",
        exit_code=2,
    )  # fmt: skip


def test_a_configuration_file_that_is_none(start, tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("[run]\nsteps = 5\nsteps = 6\n")
    check_refused(start(config=path), f"{path} line 3", "given twice", exit_code=2)
    absent = tmp_path / "absent.toml"
    check_refused(start(config=absent, name="second"), f"cannot read the configuration file {absent}", exit_code=2)


@pytest.fixture
def broken_folder(tiny_folder, tmp_path) -> Path:
    """A copy of a good model folder, to be broken."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def remove_config(folder: Path) -> list[str]:
    (folder / "config.json").unlink()
    return ["config.json is missing"]


def break_config(folder: Path) -> list[str]:
    (folder / "config.json").write_text('{"architectures": [')
    return ["config.json cannot be read as JSON"]


def change_experts(folder: Path) -> list[str]:
    config = json.loads((folder / "config.json").read_text())
    name = "num_experts" if "num_experts" in config else "num_local_experts"
    (folder / "config.json").write_text(json.dumps(config | {name: 7}))
    return ["parallel.ep = 2 does not divide", "= 7; use 1 or 7"]


def truncate_weights(folder: Path) -> list[str]:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 1000)
    return [WEIGHTS, "truncated"]


def empty_weights(folder: Path) -> list[str]:
    (folder / WEIGHTS).write_bytes(b"")
    return [WEIGHTS, "no safetensors file"]


def remove_weights(folder: Path) -> list[str]:
    (folder / WEIGHTS).unlink()
    return [WEIGHTS, "missing"]


def remove_a_tensor(folder: Path) -> list[str]:
    name = "model.layers.3.mlp.experts.7.down_proj.weight"
    weights = load_file(folder / WEIGHTS)
    del weights[name]
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return [f"lacks the tensor {name} of shape [64, 32]"]


def change_hidden_size(folder: Path) -> list[str]:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 96}))
    return ["model.embed_tokens.weight with shape [128, 64], but config.json says [128, 96]"]


def name_a_missing_shard(folder: Path) -> list[str]:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}))
    return ["model-00002-of-00002.safetensors is missing"]


def name_a_missing_tensor(folder: Path) -> list[str]:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.layers.9.mlp.gate.weight": WEIGHTS}}))
    return ["model.layers.9.mlp.gate.weight"]


def remove_tokenizer(folder: Path) -> list[str]:
    (folder / "tokenizer.json").unlink()
    return ["has no tokenizer"]


@pytest.mark.parametrize(
    "fault",
    [remove_config, break_config, truncate_weights, empty_weights, remove_weights, remove_a_tensor,
     change_hidden_size, name_a_missing_shard, name_a_missing_tensor, remove_tokenizer],
)  # fmt: skip
def test_a_broken_model_folder(start, broken_folder, fault):
    words = fault(broken_folder)
    check_refused(start(*no_warm_start(broken_folder)), str(broken_folder), *words, exit_code=4)


def test_a_missing_model_folder(start, tmp_path):
    folder = tmp_path / "absent"
    check_refused(start(*no_warm_start(folder)), f"{folder} does not exist", "model.path", exit_code=4)


def test_a_model_that_the_layout_does_not_divide(start, broken_folder):
    words = change_experts(broken_folder)
    check_refused(start(*no_warm_start(broken_folder)), *words, exit_code=2)


def test_a_malformed_line_of_a_prompt_file(start, tiny_folder, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "12"}\n{"prompt": "34", }\n')
    run = start(*no_warm_start(tiny_folder), "--task.prompts_file", str(path))
    check_refused(run, f"{path} line 2", "not JSON", "task.on_bad_line", exit_code=3)


def test_an_environment_that_does_not_exist(start, tiny_folder):
    run = start(*no_warm_start(tiny_folder), "--task.environment", "calculater")
    check_refused(run, "calculater", "did you mean calculator?", exit_code=2)


@pytest.mark.parametrize("key", ["engine.port", "schedule.port"])
def test_a_port_in_use(start, tiny_folder, key):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        run = start(*no_warm_start(tiny_folder), f"--{key}", str(port))
        check_refused(run, f"127.0.0.1:{port}", "in use", key, exit_code=2)


def test_an_address_of_another_machine(start, tiny_folder):
    run = start(*no_warm_start(tiny_folder), "--engine.host", "192.0.2.1")  # reserved for documentation
    check_refused(run, "192.0.2.1:0", "assign requested address", "engine.host", exit_code=2)


def test_a_run_folder_that_cannot_be(start, tiny_folder, tmp_path):
    (tmp_path / "runs").write_text("a file, not a folder")
    run = start(*no_warm_start(tiny_folder))
    check_end(run, "run.folder", exit_code=2)
    assert "[local]" not in run.output


# ---- the trainer alone, under real torchrun --------------------------------------------------------------------


@pytest.fixture
def torchrun(tmp_path):
    started = []

    def start_trainer(num_ranks: int, model: Path) -> MarkedCommand:
        config = tmp_path / "config.toml"
        config.write_text(SMALL_RUN.read_text().replace("enabled = true", "enabled = false").replace(
            'path = ""', f"path = {json.dumps(str(model))}"))  # fmt: skip
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        command += ["-m", "megatron_sao.cli.train", str(config), "--run-folder", str(tmp_path)]
        write_start(tmp_path, RunStart(model, resume=None))
        env = {"PYTHONPATH": str(CLONE), "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
        started.append(MarkedCommand(command, tmp_path / "torchrun.terminal", env))
        return started[-1]

    yield start_trainer
    for command in started:
        command.close()


def check_torchrun_refuses(command: MarkedCommand, *words: str) -> None:
    """One message of ours; torchrun adds a report of its own below, which is not ours to hide."""
    assert command.wait(END_WITHIN_S + 30) == 1
    seconds = time.monotonic() - command.started_s
    print(f"ended after {seconds:.1f} s:\n{command.output}")
    assert seconds <= END_WITHIN_S
    assert command.processes() == []
    ours = [line for line in command.output.splitlines() if line.startswith("error: ")]
    assert len(ours) == 1, command.output
    for word in words:
        assert word in ours[0]


def test_a_world_of_another_size(torchrun, tiny_folder):
    command = torchrun(3, tiny_folder)
    check_torchrun_refuses(command, "tp * pp * cp * dp = 2 * 1 * 1 * 1 = 2", "started with 3 ranks", "start 2")


def test_a_folder_without_one_of_the_tensors(torchrun, broken_folder):
    (fault,) = remove_a_tensor(broken_folder)
    check_torchrun_refuses(torchrun(2, broken_folder), fault)


# ---- while everything starts -----------------------------------------------------------------------------------


def wait_until_started(run: LocalRun) -> None:
    """Engine and ranks are there, in the middle of their imports."""
    deadline = time.monotonic() + 60
    while not (run.processes(ENGINE) and run.processes(TORCHRUN) and len(run.processes(TRAINER_RANK)) == 2):
        assert time.monotonic() < deadline, run.output
        time.sleep(0.2)


def test_prompts_that_leave_no_room_for_an_answer(start, tiny_folder, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{number:020}"}}\n' for number in range(40)))
    limits = ["--sampling.max_trajectory_tokens", "10", "--sampling.max_tokens_per_turn", "4"]
    run = start(*no_warm_start(tiny_folder), "--task.prompts_file", str(path), *limits)
    words = ["the scheduler failed", "all 40 prompts have more than 9 tokens", "sampling.max_trajectory_tokens"]
    check_end(run, *words, exit_code=3)


def test_ctrl_c_twice_while_everything_starts(start, tiny_folder):
    run = start(*no_warm_start(tiny_folder))
    wait_until_started(run)
    for _ in range(2):  # the first asks, the second insists
        run.send(signal.SIGINT)
        run.wait_for("[local] SIGINT: the run finishes its step", timeout_s=10)
    check_interrupted(run, time.monotonic())


def test_a_launcher_that_is_killed_takes_everything_along(start, tiny_folder):
    run = start(*no_warm_start(tiny_folder))
    wait_until_started(run)
    run.send(signal.SIGKILL)
    killed_s = time.monotonic()
    while run.processes() and time.monotonic() < killed_s + END_WITHIN_S:
        time.sleep(0.1)
    assert run.processes() == []
