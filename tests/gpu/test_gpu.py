"""Runs the prepared check where there is a GPU; its formula for FLOPs is checked everywhere."""

import subprocess
import sys

import pytest
import torch

from tests.gpu.check_gpu import stack_config, training_flops


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine")
def test_the_prepared_check_finds_no_fault():
    command = [sys.executable, "-m", "tests.gpu.check_gpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("GPU ") and "faults=0" in done.stdout


def test_flops_of_a_step_worked_by_hand():
    """One layer, hidden 8, 2 heads of 4, 1 key-value head, 2 of 4 experts of width 6, vocabulary 10.

    Per token: q 8x8 + k 8x4 + v 8x4 + o 8x8 = 192; router 8x4 = 32; experts 2 * 3 * 8x6 = 288; head 8x10 = 80: 592.
    Attention over T tokens: 2 heads * (4 + 4) * T^2 / 2 = 8 T^2. Trajectories of 3 and 1 tokens:
    592 * 4 + 8 * (9 + 1) = 2448 multiply-adds forward; times 2 FLOPs, times 3 for forward and backward.
    """
    shape = stack_config(is_small=True) | dict(
        vocab_size=10,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=6,
    )
    assert training_flops(shape, [3, 1]) == 6 * 2448


def test_the_measured_stack_has_between_one_and_two_billion_parameters():
    shape = stack_config(is_small=False)
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    experts = shape["num_experts"] * 3 * hidden * shape["moe_intermediate_size"]
    attention = 2 * hidden * shape["head_dim"] * (shape["num_attention_heads"] + shape["num_key_value_heads"])
    total = layers * (experts + attention) + 2 * shape["vocab_size"] * hidden
    assert 1e9 < total < 2e9
