"""The cost of a trajectory by its length, against the operations that transformers' own models perform."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_sao.models.cost import trajectory_cost
from tests.support.families import make_family_folder, read_config, reference

FAMILIES = ("qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3")


def multiply_adds(model, length: int) -> int:
    counter = FlopCounterMode(display=False)  # knows plain products only, no fused attention
    with counter, torch.no_grad():
        model(torch.arange(length)[None], use_cache=False)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("family", FAMILIES)
def test_cost_counts_the_multiply_adds_of_a_forward_pass(tmp_path, family):
    folder = make_family_folder(family, tmp_path / family, mtp=False, seed=0)
    cost, model = trajectory_cost(read_config(folder)), reference(folder)
    model.set_attn_implementation("eager")
    if family != "qwen3":
        model.set_experts_implementation("eager")
    for length in (8, 64):
        # Eager attention computes a full square; the cost counts the half of it that a causal one needs.
        assert multiply_adds(model, length) == cost.of(length) + cost.per_pair * length**2


def test_a_tied_embedding_counts_once_as_the_output_layer(tmp_path):
    own = make_family_folder("qwen3", tmp_path / "own", mtp=False, seed=0)
    tied = make_family_folder("qwen3", tmp_path / "tied", mtp=False, seed=0, tie_word_embeddings=True)
    assert trajectory_cost(read_config(own)) == trajectory_cost(read_config(tied))


def test_mtp_layers_cost_nothing_here(tmp_path):
    without = make_family_folder("glm4_moe", tmp_path / "a", mtp=False, seed=0)
    counted = make_family_folder("glm4_moe", tmp_path / "b", mtp=True, seed=0)
    assert trajectory_cost(read_config(without)) == trajectory_cost(read_config(counted))
