"""`python -m megatron_sao.cli.plan` as a user starts it."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
import megatron_sao.train.plan  # noqa: F401  before the forks
from megatron_sao.cli.plan import EXIT_DOES_NOT_FIT, main
from megatron_sao.errors import SaoError
from tests.support.ranks import run_ranks

CLONE = Path(__file__).parents[2]
CONFIGS = CLONE / "configs"

TINY = dict(
    model_type="qwen3_moe",
    vocab_size=131,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    rms_norm_eps=1e-6,
    max_position_embeddings=4096,
    rope_theta=10000.0,
    hidden_act="silu",
    tie_word_embeddings=False,
)


def plan(*arguments):
    """-> (exit code, what it printed) of one command, in a fork of this process: the heavy imports are paid once."""
    ((code, text),) = run_ranks(1, _main, [str(argument) for argument in arguments], timeout_s=120)
    return code, text


def _main(arguments):
    os.chdir(CLONE)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            code = main(arguments)
        except SaoError as error:
            return error.exit_code, str(error)
    return code, printed.getvalue()


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "{tmp_path}"\n[warm_start]\nenabled = false\n')
    return path


def cells(text, row_starts_with):
    """Numbers in the rows of a table that begin so."""
    rows = [line for line in text.splitlines() if re.match(rf"│ {row_starts_with} +│", line)]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


LARGE = {  # configuration -> GPUs that its first line names, parameters of its model
    "qwen3_30b_a3b": (16, 30_532_122_624),
    "glm4.5_355b_a32b": (128, 352_797_829_024),
    "glm5.2_744b_a40b": (256, 743_377_019_904),
}


@pytest.mark.parametrize("name", LARGE)
def test_the_configurations_of_large_models_fit_as_they_say(name):
    num_gpus, num_parameters = LARGE[name]
    path = CONFIGS / f"{name}.toml"
    code, text = plan("--config", path)
    assert code == 0, text
    assert f" {num_gpus} GPUs for the trainer: tp " in text
    assert f" {num_gpus} GPUs of 80 GB for the trainer" in path.read_text().splitlines()[0]
    assert f"policy {num_parameters:,}; config.json implies {num_parameters:,} (+0.000%)" in text
    assert "\nFITS: with the sleeping model offloaded" in text
    needed = re.search(r"FITS: .*: ([\d.]+) GiB of 74 GiB", text)[1]
    assert f"{needed} of 80" in path.read_text().replace("\n# ", " ")
    assert ("CONDITION" in text) == (name == "glm5.2_744b_a40b")


def test_744b_parameters_are_planned_by_one_small_process():
    """As a user starts it: at most 120 s and 8 GB, of which most are imports."""
    started_s = time.monotonic()
    command = [sys.executable, "-m", "megatron_sao.cli.plan", "--config", "configs/glm5.2_744b_a40b.toml"]
    process = subprocess.Popen(command, cwd=CLONE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, text
    assert "stages 4/4" in text and "FITS" in text and "Warning" not in text
    assert usage.ru_maxrss * 1024 < 8e9 and usage.ru_utime + usage.ru_stime < 120
    print(f"{time.monotonic() - started_s:.0f} s, {usage.ru_maxrss / 2**20:.1f} GiB")


def test_a_run_that_does_not_fit_says_which_rank_is_worst(tiny):
    code, text = plan(tiny, "--parallel.pp", 2, "--gpu-gib", 1, "--reserve-gib", 0.9999)
    assert code == EXIT_DOES_NOT_FIT
    assert re.search(r"DOES NOT FIT: with both models resident the worst rank is [01] \(stage [01]\)", text)


def test_frozen_groups_and_interleaving_change_what_is_printed(tiny):
    _, plain = plan(tiny, "--parallel.pp", 2)
    _, trained = plan(tiny, "--parallel.pp", 2, "--value.groups.attention.trained", "true", "--parallel.vpp", 2)
    assert ["0-1"] == [row[2] for row in cells(plain, "0") if "-" in row[2]][:1]
    assert ["0-0, 2-2"] == [row[2] for row in cells(trained, "0") if "-" in row[2]][:1]

    def frozen(text):
        return int(re.search(r"of them frozen ([\d,]+)", text)[1].replace(",", ""))

    # Frozen either way: the embedding and the norms before the experts and the head. A layer's attention: its norm,
    # q (4 heads of 16), k and v (2 each), the norms of q and k, the output projection.
    assert frozen(trained) == 131 * 32 + (4 + 1) * 32
    attention = 4 * (32 + 32 * 16 * (4 + 2 + 2) + 2 * 16 + 4 * 16 * 32)
    assert frozen(plain) == frozen(trained) + attention
    assert "1F1B" in plain and "interleaved, 2 chunks" in trained


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--parallel.pp", 3], "parallel.pp = 3 does not divide the model's num_hidden_layers = 4"),
        (["--parallel.tp", 4], "parallel.tp = 4 does not divide the model's num_key_value_heads = 2"),
        (["--parallel.ep", 8, "--parallel.dp", 8], "parallel.ep = 8 does not divide the model's num_experts = 4"),
        (["--parallel.ep", 4], "parallel.ep * etp = 4 * 1 = 4 does not divide parallel.tp * cp * dp = 1 * 1 * 1 = 1"),
        (["--parallel.pp", 2, "--parallel.vpp", 4], "parallel.vpp = 4 does not divide the 2 layers of a stage"),
        (["--mean-tokens", 1000], "--mean-tokens 1000 is not between 1 and sampling.max_trajectory_tokens = 128"),
        (["--gpu-gib", 4], "--reserve-gib 6 leaves nothing of --gpu-gib 4"),
        (["--gpu-gib", "much"], "--gpu-gib much is no positive number"),
        (["--model.path", "/nowhere"], "cannot read /nowhere/config.json"),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(tiny, arguments, expected):
    code, errors = plan(tiny, *arguments)
    assert code == 2 and expected in errors


def test_a_stage_that_starts_without_an_indexer_is_refused():
    stages = ["--parallel.first_stage_layers", 19, "--parallel.last_stage_layers", 19]
    code, errors = plan("--config", CONFIGS / "glm5.2_744b_a40b.toml", *stages)
    assert code == 2
    assert "pipeline stage 1 starts on layer 19, but" in errors and "may start: 0, 1, 2, 6, 10" in errors


def test_a_push_is_predicted_from_the_plan_that_the_trainer_makes(tiny):
    """All four ranks of TP2 x EP2 x DP2 hold something of their own; the two workers of an engine take half of most."""
    layout = ["--parallel.tp", 2, "--parallel.ep", 2, "--parallel.dp", 2, "--engine.count", 2]
    code, text = plan(tiny, "--push", *layout, "--engine.tensor_parallel", 2, "--link-gbps", 8)
    assert code == 0, text
    assert "one push: 4 trainer ranks (tp 2 x pp 1 x cp 1 x dp 2, ep 2 x etp 1) to 2 engines of 2 workers" in text
    assert "8 Gb/s each way for each of them" in text and "\ncritical path: " in text
    ((_, least, mean, most, *_),) = cells(text, "sent by a trainer rank")
    assert 0 <= float(least) <= float(mean) <= float(most)
    assert 1 <= float(re.search(r"most loaded / mean = ([\d.]+)", text)[1]) < 1.5
    code, errors = plan(tiny, "--push", "--link-gbps", "fast")
    assert code == 2 and "--link-gbps fast is no positive number" in errors


def test_the_push_of_744b_parameters_is_balanced_and_planned_by_one_small_process():
    """As a user starts it: at most 120 s and 8 GB."""
    command = [sys.executable, "-m", "megatron_sao.cli.plan", "--config", "configs/glm5.2_744b_a40b.toml", "--push"]
    process = subprocess.Popen(command, cwd=CLONE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, text
    assert "256 trainer ranks" in text and "4 engines of 32 workers; 400 Gb/s" in text
    assert 1 <= float(re.search(r"most loaded / mean = ([\d.]+)", text)[1]) <= 1.15
    assert usage.ru_maxrss * 1024 < 8e9 and usage.ru_utime + usage.ru_stime < 120
    print(f"{usage.ru_utime + usage.ru_stime:.0f} s, {usage.ru_maxrss / 2**20:.1f} GiB\n{text}")
