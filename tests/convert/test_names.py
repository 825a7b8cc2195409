"""The name table: hand-picked rows, expert numbers, and a refusal for what it does not know."""

import pytest

from megatron_sao.convert.names import HFNames, expert_number, lookup, with_expert_offset
from megatron_sao.errors import CheckpointError

LAYER, HF = "decoder.layers.7.", "model.layers.7."
PLAIN = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    LAYER + "input_layernorm.weight": HF + "input_layernorm.weight",
    LAYER + "self_attention.linear_qkv.layer_norm_weight": HF + "input_layernorm.weight",
    LAYER + "self_attention.q_layernorm.weight": HF + "self_attn.q_norm.weight",
    LAYER + "self_attention.k_layernorm.weight": HF + "self_attn.k_norm.weight",
    LAYER + "self_attention.linear_proj.weight": HF + "self_attn.o_proj.weight",
    LAYER + "pre_mlp_layernorm.weight": HF + "post_attention_layernorm.weight",
    LAYER + "mlp.linear_fc1.layer_norm_weight": HF + "post_attention_layernorm.weight",
    LAYER + "mlp.router.weight": HF + "mlp.gate.weight",
    LAYER + "mlp.linear_fc2.weight": HF + "mlp.down_proj.weight",
    LAYER + "mlp.experts.local_experts.11.linear_fc2.weight": HF + "mlp.experts.11.down_proj.weight",
    LAYER + "mlp.experts.linear_fc2.weight11": HF + "mlp.experts.11.down_proj.weight",
}


@pytest.mark.parametrize("name", PLAIN)
def test_tensors_with_one_name(name):
    assert lookup(name) == HFNames("plain", (PLAIN[name],))


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_attention_projections_split_in_three(what):
    expected = tuple(f"{HF}self_attn.{part}_proj.{what}" for part in "qkv")
    assert lookup(f"{LAYER}self_attention.linear_qkv.{what}") == HFNames("qkv", expected)


@pytest.mark.parametrize(
    "name, place",
    [
        ("mlp.linear_fc1.weight", "mlp."),
        ("mlp.experts.local_experts.11.linear_fc1.weight", "mlp.experts.11."),
        ("mlp.experts.linear_fc1.weight11", "mlp.experts.11."),
    ],
)
def test_gated_projections_split_in_two(name, place):
    expected = HFNames("gated", (HF + place + "gate_proj.weight", HF + place + "up_proj.weight"))
    assert lookup(LAYER + name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.mlp.router.expert_bias",
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc3.weight",
        "decoder.layers.0.self_attention.linear_proj.bias",
        "decoder.layers.x.mlp.router.weight",
        "module.decoder.layers.0.mlp.router.weight",
        "mtp.layers.0.enorm.weight",
        "output_layer.bias",
        "position_embeddings.weight",
        "",
    ],
)
def test_what_the_table_does_not_know_is_refused_by_name(name):
    with pytest.raises(CheckpointError, match="no HF name") as refused:
        lookup(name)
    assert name in str(refused.value)


@pytest.mark.parametrize(
    "name, number",
    [
        ("decoder.layers.12.mlp.experts.local_experts.11.linear_fc1.weight", 11),
        ("decoder.layers.12.mlp.experts.linear_fc1.weight11", 11),
        ("decoder.layers.12.mlp.experts.linear_fc2.weight0", 0),
        ("decoder.layers.12.mlp.shared_experts.linear_fc1.weight", None),
        ("decoder.layers.12.mlp.linear_fc1.weight", None),
        ("decoder.layers.12.mlp.router.weight", None),
        ("decoder.layers.12.self_attention.linear_qkv.weight", None),
    ],
)
def test_expert_numbers_of_both_layouts(name, number):
    assert expert_number(name) == number
    raised = with_expert_offset(name, 100)
    if number is None:
        assert raised == name
    else:
        assert expert_number(raised) == number + 100 and "layers.12." in raised
        assert with_expert_offset(raised, -100) == name


def test_an_offset_of_zero_changes_nothing():
    name = "decoder.layers.12.mlp.experts.local_experts.11.linear_fc1.weight"
    assert with_expert_offset(name, 0) == name
