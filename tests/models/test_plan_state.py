"""The planned weights, gradients and optimizer state against those of real ranks, to the byte."""


import json

import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.convert.expected import expected_tensors
from megatron_sao.convert.family import read_shape
from megatron_sao.models.build import build_model
from megatron_sao.models.groups import freeze, mark_trained
from megatron_sao.models.optimizer import make_trained_model
from megatron_sao.models.plan_state import DataCopies, elements_by_name, shard_elements, state_bytes
from megatron_sao.parallel.fake_world import data_axis_ranks, data_axis_sizes, fake_world
from megatron_sao.parallel.init import start_world
from tests.support.families import make_family_folder
from tests.support.ranks import run_ranks

MOE = dict(
    model_type="qwen3_moe",
    vocab_size=131,  # odd, so that rows are padded under tp2
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
    max_position_embeddings=256,
    rope_theta=10000.0,
    hidden_act="silu",
    tie_word_embeddings=False,
)
TIED = MOE | dict(model_type="qwen3", tie_word_embeddings=True)
LAYOUTS = {
    "1": [],
    "tp2-ep2": ["parallel.tp=2", "parallel.ep=2"],
    "pp2": ["parallel.pp=2"],
    "dp2": ["parallel.dp=2"],
    "cp2": ["parallel.cp=2"],
    "pp2-vpp2": ["parallel.pp=2", "parallel.vpp=2"],
    "dp2-ep2": ["parallel.dp=2", "parallel.ep=2"],
}


def test_the_part_of_one_rank_counts_no_padding():
    """Two buckets [0, 256) and [256, 384) over 2 ranks: rank 0 owns [0, 128) and [256, 320)."""
    spans, buckets = [(0, 100), (128, 200), (256, 300)], [(0, 256), (256, 384)]
    assert shard_elements(spans, buckets, 2, 0) == 100 + 44
    assert shard_elements(spans, buckets, 2, 1) == 72
    assert sum(shard_elements(spans, buckets, 4, rank) for rank in range(4)) == 216


# ---- what a real rank holds ------------------------------------------------------------------------------------


def storage_bytes(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


def measured(hf_config, overrides, role, dtype, with_mtp=False):
    """(weights, gradients, optimizer state) of this real rank after one update, and its ranks on the data axes."""
    config = load_config(None, overrides)
    start_world(config)
    chunks = build_model(role, hf_config, config.parallel, dtype, with_mtp=with_mtp)
    if role == "value":
        freeze(chunks, config.value.groups)
    model = make_trained_model(chunks, config.policy if role == "policy" else config.value)
    model.zero_grad()
    assert model.update()[0]
    weights = [t for chunk in chunks for t in (*chunk.parameters(), *chunk.buffers())]
    gradients = [p.main_grad for chunk in chunks for p in chunk.parameters() if p.requires_grad]
    state = []
    for part in model.optimizer.chained_optimizers:
        state += [t for moments in part.optimizer.state.values() for t in moments.values() if torch.is_tensor(t)]
        masters = [master for group in part.shard_fp32_from_float16_groups for master in group]
        state += [master for master in masters if master is not None]
    return storage_bytes(weights), storage_bytes(gradients), storage_bytes(state), data_axis_ranks()


def planned(hf_config, overrides, role, dtype, axis_ranks, with_mtp=False):
    """The same of each rank, planned in one process; and the elements of all weights of the world by name."""
    config = load_config(None, overrides)
    found, elements = [], {}
    for rank, (dense_rank, expert_rank) in enumerate(axis_ranks):
        with fake_world(config.parallel, rank) as world, torch.device("meta"):
            chunks = build_model(role, hf_config, config.parallel, dtype, with_mtp=with_mtp)
            if role == "value":
                mark_trained(chunks, config.value.groups)
            copies = DataCopies(*data_axis_sizes(), dense_rank, expert_rank)
            state = state_bytes(chunks, copies)
            elements |= elements_by_name(chunks, read_shape(hf_config), world)
            found.append((state.weights, state.gradients, state.optimizer))
    return found, elements


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("role", ["policy", "value"])
def test_the_state_of_every_rank_is_planned_to_the_byte(layout, dtype, role):
    overrides = LAYOUTS[layout]
    found = run_ranks(1 if layout == "1" else 2, measured, MOE, overrides, role, dtype)
    ((expected, elements),) = run_ranks(1, planned, MOE, overrides, role, dtype, [f[3] for f in found])
    assert [f[:3] for f in found] == expected
    total = sum(_count(shape) for shape in expected_tensors(MOE).values())
    head = MOE["vocab_size"] * MOE["hidden_size"]
    assert sum(elements.values()) == (total if role == "policy" else total - head + MOE["hidden_size"])


def test_a_tied_embedding_counts_once_and_its_bucket_is_its_own():
    found = run_ranks(2, measured, TIED, LAYOUTS["pp2"], "policy", torch.float32)
    ((expected, elements),) = run_ranks(1, planned, TIED, LAYOUTS["pp2"], "policy", torch.float32, [(0, 0), (0, 0)])
    assert [f[:3] for f in found] == expected
    assert sum(elements.values()) == sum(_count(shape) for shape in expected_tensors(TIED).values())


@pytest.mark.parametrize("layout", ["tp2-ep2", "pp2"])
@pytest.mark.parametrize("family", ["glm4_moe", "glm_moe_dsa"])
def test_other_families_with_their_mtp_layer(family, layout, tmp_path):
    """Shared experts, router biases in fp32, latent attention, frozen indexers, an embedding on both ends."""
    folder = make_family_folder(family, tmp_path / "model", mtp=True, seed=1)
    hf_config = json.loads((folder / "config.json").read_text())
    found = run_ranks(2, measured, hf_config, LAYOUTS[layout], "policy", torch.bfloat16, True)
    ranks = [f[3] for f in found]
    ((expected, elements),) = run_ranks(
        1, planned, hf_config, LAYOUTS[layout], "policy", torch.bfloat16, ranks, True
    )
    assert [f[:3] for f in found] == expected
    assert sum(elements.values()) == sum(_count(s) for s in expected_tensors(hf_config, with_mtp=True).values())


def test_freezing_is_seen():
    """The negative control of the tests above: the value model of a real rank holds less than the policy."""
    (policy,) = run_ranks(1, measured, MOE, [], "policy", torch.float32)
    (value,) = run_ranks(1, measured, MOE, [], "value", torch.float32)
    assert all(v < p for v, p in zip(value[:3], policy[:3], strict=True))


def _count(shape):
    count = 1
    for size in shape:
        count *= size
    return count
