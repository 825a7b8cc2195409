"""The name table: hand-picked rows, expert numbers (CKP-08), MTP (CKP-06), and a refusal for what it does not know."""

import pytest

from megatron_sao.convert import names
from megatron_sao.convert.family import IndexerShape, MLAShape, ModelShape
from megatron_sao.convert.names import HFNames, expert_number, with_expert_offset
from megatron_sao.errors import CheckpointError

GROUPED = ModelShape(
    family="glm4_moe", num_layers=4, hidden=1, num_heads=1, num_kv_groups=1, head_dim=1, vocab=1, is_tied=False,
    ffn=1, num_dense_layers=0,
)  # fmt: skip
LATENT = ModelShape(**vars(GROUPED) | {"family": "glm_moe_dsa", "mla": MLAShape(1, 1, 1, 1, 1)})


def lookup(name, shape=GROUPED):
    return names.lookup(name, shape)


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
    LAYER + "mlp.router.expert_bias": HF + "mlp.gate.e_score_correction_bias",
    LAYER + "mlp.shared_experts.linear_fc2.weight": HF + "mlp.shared_experts.down_proj.weight",
}
ATTENTION, HF_ATTENTION = LAYER + "self_attention.", HF + "self_attn."
INDEXER, HF_INDEXER = ATTENTION + "core_attention.indexer.", HF_ATTENTION + "indexer."
PLAIN_LATENT = {
    ATTENTION + "linear_q_down_proj.weight": HF_ATTENTION + "q_a_proj.weight",
    ATTENTION + "q_layernorm.weight": HF_ATTENTION + "q_a_layernorm.weight",
    ATTENTION + "linear_q_up_proj.layer_norm_weight": HF_ATTENTION + "q_a_layernorm.weight",
    ATTENTION + "linear_q_up_proj.weight": HF_ATTENTION + "q_b_proj.weight",
    ATTENTION + "linear_kv_down_proj.weight": HF_ATTENTION + "kv_a_proj_with_mqa.weight",
    ATTENTION + "kv_layernorm.weight": HF_ATTENTION + "kv_a_layernorm.weight",
    ATTENTION + "linear_kv_up_proj.layer_norm_weight": HF_ATTENTION + "kv_a_layernorm.weight",
    ATTENTION + "linear_kv_up_proj.weight": HF_ATTENTION + "kv_b_proj.weight",
    ATTENTION + "linear_proj.weight": HF_ATTENTION + "o_proj.weight",
    INDEXER + "linear_wq_b.weight": HF_INDEXER + "wq_b.weight",
    INDEXER + "linear_wk.weight": HF_INDEXER + "wk.weight",
    INDEXER + "k_norm.weight": HF_INDEXER + "k_norm.weight",
    INDEXER + "k_norm.bias": HF_INDEXER + "k_norm.bias",
    INDEXER + "linear_weights_proj.weight": HF_INDEXER + "weights_proj.weight",
}
MTP = {  # of a model with 4 layers
    "mtp.layers.0.enorm.weight": "model.layers.4.enorm.weight",
    "mtp.layers.0.hnorm.weight": "model.layers.4.hnorm.weight",
    "mtp.layers.0.eh_proj.weight": "model.layers.4.eh_proj.weight",
    "mtp.layers.0.final_layernorm.weight": "model.layers.4.shared_head.norm.weight",
    "mtp.layers.0.transformer_layer.mlp.router.weight": "model.layers.4.mlp.gate.weight",
    "mtp.layers.0.mtp_model_layer.mlp.router.weight": "model.layers.4.mlp.gate.weight",
    "mtp.layers.1.mtp_model_layer.mlp.experts.local_experts.3.linear_fc2.weight": (
        "model.layers.5.mlp.experts.3.down_proj.weight"
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_tensors_with_one_name(name):
    assert lookup(name) == HFNames("plain", (PLAIN[name],))


@pytest.mark.parametrize("name", PLAIN_LATENT)
def test_tensors_of_latent_attention_and_its_indexer(name):
    assert lookup(name, LATENT) == HFNames("plain", (PLAIN_LATENT[name],))


@pytest.mark.parametrize("name", MTP)
def test_mtp_layers_come_after_the_last_one_under_both_names(name):
    assert lookup(name) == HFNames("plain", (MTP[name],))
    qkv = lookup("mtp.layers.0.mtp_model_layer.self_attention.linear_qkv.weight")
    assert qkv == lookup("decoder.layers.4.self_attention.linear_qkv.weight")


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_attention_projections_split_in_three(what):
    expected = tuple(f"{HF}self_attn.{part}_proj.{what}" for part in "qkv")
    assert lookup(f"{LAYER}self_attention.linear_qkv.{what}") == HFNames("qkv", expected)


@pytest.mark.parametrize(
    "name, place",
    [
        ("mlp.linear_fc1.weight", "mlp."),
        ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts."),
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
        "decoder.layers.0.mlp.router.bias",
        "decoder.layers.0.mlp.shared_experts.gate_weight",
        "decoder.layers.0.mlp.linear_fc3.weight",
        "decoder.layers.0.mlp.linear_fc1.weight3",
        "decoder.layers.0.mlp.experts.linear_fc1.weight",
        "decoder.layers.0.self_attention.linear_q_down_proj.weight",
        "decoder.layers.0.enorm.weight",
        "decoder.layers.0.self_attention.linear_proj.bias",
        "decoder.layers.x.mlp.router.weight",
        "module.decoder.layers.0.mlp.router.weight",
        "mtp.layers.0.norm.weight",
        "mtp.layers.0.mlp.router.weight",
        "mtp.layers.0.mtp_model_layer.enorm.weight",
        "mtp.final_layernorm.weight",
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


def test_norms_of_queries_are_of_heads_or_of_the_latent():
    name = "decoder.layers.0.self_attention.q_layernorm.weight"
    assert lookup(name, GROUPED).hf == ("model.layers.0.self_attn.q_norm.weight",)
    assert lookup(name, LATENT).hf == ("model.layers.0.self_attn.q_a_layernorm.weight",)
    with pytest.raises(CheckpointError, match="no HF name"):
        lookup("decoder.layers.0.self_attention.k_layernorm.weight", LATENT)


# What transformer-engine's modules call the norms, per kind of model and layer; ours are always apart.
ALONE = ("input_layernorm", "pre_mlp_layernorm", "self_attention.q_layernorm", "self_attention.kv_layernorm")
INDEXED = ModelShape(**vars(LATENT) | {"indexer": IndexerShape(1, 1, 1, (True,) * 4)})
DENSE_FIRST = {"num_dense_layers": 1}
FUSED_QKV, FUSED_MLP = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
FUSED_LATENTS = [f"self_attention.linear_{part}_up_proj.layer_norm_weight" for part in ("q", "kv")]
APART = [f"{name}.weight" for name in ALONE]


@pytest.mark.parametrize(
    ("shape", "dense"),
    [
        (GROUPED, [FUSED_QKV, FUSED_MLP, *APART[2:]]),
        (LATENT, [APART[0], FUSED_MLP, *FUSED_LATENTS]),
        (INDEXED, [APART[0], FUSED_MLP, *APART[2:]]),
    ],
    ids=["grouped queries", "latent", "latent with indexers"],
)
def test_a_norm_has_one_name_in_a_checkpoint_whatever_modules_it_comes_from(shape, dense):
    shape = ModelShape(**vars(shape) | DENSE_FIRST)
    sparse = [dense[0], APART[1], *dense[2:]]
    fused = [FUSED_QKV, FUSED_MLP, *FUSED_LATENTS]
    for prefix, expected in (
        ("decoder.layers.0.", dense),
        ("decoder.layers.1.", sparse),
        ("mtp.layers.0.transformer_layer.", sparse),
    ):
        for given in (APART, fused):
            assert [names.stored_name(prefix + name, shape) for name in given] == [prefix + name for name in expected]
    for name in ("embedding.word_embeddings.weight", "mtp.layers.0.enorm.weight", "decoder.layers.1.mlp.router.weight"):
        assert names.stored_name(name, shape) == name
