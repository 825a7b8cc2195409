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


LARGE = {  # configuration -> GPUs of trainer and engines that its first line names, parameters of its model
    "qwen3_30b_a3b_8_8": (8, 8, 30_532_122_624),
    "qwen3_30b_a3b_64_32": (64, 32, 30_532_122_624),
    "glm4.5_355b_a32b": (128, 64, 352_797_829_024),
    "glm5.2_744b_a40b": (256, 128, 743_377_019_904),
}
LARGEST = "glm5.2_744b_a40b"


def check_large(name, text):
    """The plan is as the configuration's first lines say."""
    trainer, rollout, num_parameters = LARGE[name]
    first, *rest = (CONFIGS / f"{name}.toml").read_text().split("\n")
    assert f" {trainer} GPUs for the trainer: tp " in text
    assert re.search(rf" {trainer} GPUs of 80 GB for the trainer .*, {rollout} (of 141 GB|more) for \d+ engines", first)
    assert f"policy {num_parameters:,}; config.json implies {num_parameters:,} (+0.000%)" in text
    needed = re.search(r"\nFITS: with .*: ([\d.]+) GiB of 74 GiB", text)[1]
    assert f" {needed} of 80" in " ".join(rest).replace(" # ", " ")
    assert ("CONDITION" in text) == (name == LARGEST)
    assert "Places of the 8 GPUs of each trainer node" in text and "WARNING: tp" not in text
    assert "\nENGINES FIT: a worker needs " in text and "ONLY PLANNED" not in text


@pytest.mark.parametrize("name", [name for name in LARGE if name != LARGEST])
def test_the_configurations_of_large_models_fit_as_they_say(name):
    code, text = plan("--config", CONFIGS / f"{name}.toml")
    assert code == 0, text
    check_large(name, text)


def test_744b_parameters_are_planned_by_one_small_process():
    """As a user starts it: at most 120 s and 8 GB, of which most are imports."""
    started_s = time.monotonic()
    command = [sys.executable, "-m", "megatron_sao.cli.plan", "--config", f"configs/{LARGEST}.toml"]
    process = subprocess.Popen(command, cwd=CLONE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, text
    assert "stages 4/4" in text and "Warning" not in text
    check_large(LARGEST, text)
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


NODES = ["trainer_nodes", "trainer_gpus_per_node", "rollout_nodes", "rollout_gpus_per_node"]


def placed(*numbers):
    return [word for name, number in zip(NODES, numbers) for word in (f"--placement.{name}", number)]


def test_the_plan_shows_what_lies_on_which_node_and_warns_of_what_crosses_them(tiny):
    layout = ["--parallel.tp", 2, "--parallel.dp", 2, "--parallel.pp", 2, "--parallel.ep", 4, "--engine.count", 2]
    code, text = plan(tiny, *layout, *placed(4, 2, 1, 2))
    assert code == 0, text
    assert [row[:7] for row in cells(text, "[0-3]")][-4:] == [
        ["0", "0-1", "0", "0", "0", "0-1", "0-1"],
        ["1", "2-3", "0", "1", "0", "0-1", "2-3"],
        ["2", "4-5", "1", "0", "0", "0-1", "0-1"],
        ["3", "6-7", "1", "1", "0", "0-1", "2-3"],
    ]
    assert "groups within a node: tp; over several (how many): dp (2), pp (2), ep (2)" in text
    assert "WARNING: ep = 4 crosses nodes of 2 GPUs" in text and "WARNING: tp" not in text
    assert "2 engine(s) of 1 GPU(s) on 1 more node(s), 2 on each" in text
    _, text = plan(tiny, *layout, *placed(8, 1, 1, 2))
    assert "WARNING: tp = 2 crosses nodes of 1 GPUs: every layer's matrices wait for the network; lower" in text


def test_engines_must_fit_their_gpus_and_hold_one_sequence(tiny):
    code, text = plan(tiny, "--placement.rollout_gpu_gib", 6.01)
    assert code == EXIT_DOES_NOT_FIT and "\nFITS: " in text
    assert "ENGINES DO NOT FIT: a worker needs 0.2 GiB of 0.01 (6.01 less a reserve of 6)" in text
    code, text = plan(tiny, "--engine.kv_cache_bytes", 256 * 1024 - 1, "--engine.max_model_len", 256)
    assert code == EXIT_DOES_NOT_FIT  # a token takes 4 layers x 2 x 2 heads x 16 x 4 bytes
    assert "ENGINES DO NOT START: vLLM asks for a cache of engine.max_model_len = 256 tokens" in text


def test_trainer_and_engines_in_turns_on_the_same_gpus_are_planned_only(tiny):
    together = ["--placement.mode", "colocated", "--parallel.dp", 2, "--engine.count", 2]
    code, text = plan(tiny, *together, *placed(1, 2))
    assert code == 0, text
    assert re.search(r"COLOCATED FITS: the trainer at work .*, engines at work .*, a push .* of 74; whoever", text)
    assert "2 engine(s) of 1 GPU(s) on the trainer's nodes, 2 on each" in text
    assert 'ONLY PLANNED: placement.mode = "colocated" can be planned' in text
    # 64 MiB of cache and 2 buckets of 64 MiB twice: more than what is left for whoever is at work.
    code, text = plan(tiny, *together, *placed(1, 2), "--gpu-gib", 6.2)
    assert code == EXIT_DOES_NOT_FIT and "COLOCATED DOES NOT FIT" in text


def test_a_value_model_on_ranks_of_its_own_is_planned_only(tiny):
    code, text = plan(tiny, "--placement.value_model", "own_ranks", "--parallel.dp", 2, *placed(2, 2, 1, 1))
    assert code == 0, text
    assert "Each model on its own ranks, GiB" in text and "host memory" not in text
    assert "2 GPUs for the policy and as many for the value model: tp 1" in text
    assert "the same again on nodes 1 to 1 for the value model" in text
    assert "\nFITS: with each model on ranks of its own the worst rank is" in text
    assert 'ONLY PLANNED: placement.value_model = "own_ranks" can be planned' in text


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
    assert "256 trainer ranks" in text and "16 engines of 8 workers (tp 8, whole experts on each); 400 Gb/s" in text
    assert 1 <= float(re.search(r"most loaded / mean = ([\d.]+)", text)[1]) <= 1.15
    assert usage.ru_maxrss * 1024 < 8e9 and usage.ru_utime + usage.ru_stime < 120
    print(f"{usage.ru_utime + usage.ru_stime:.0f} s, {usage.ru_maxrss / 2**20:.1f} GiB\n{text}")
