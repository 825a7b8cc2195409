"""What is read from config.json: sizes, rotary positions, experts, indexers; conflicts and gaps are errors."""

from dataclasses import replace

import pytest

from megatron_sao.config.parallel import Parallel
from megatron_sao.convert.family import (
    IndexerShape,
    MLAShape,
    ModelShape,
    Rope,
    Yarn,
    check_engine_reads_alike,
    check_stage_starts,
    layers_that_may_start_a_stage,
    read_rope,
    read_shape,
    required,
    rope_base,
)
from megatron_sao.errors import CheckpointError, ConfigError

QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 1000000.0,
    "rope_scaling": None,
}
QWEN3 = QWEN3_MOE | {"model_type": "qwen3", "num_experts": None, "tie_word_embeddings": True}
ROUTER_BIAS = {
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
}
GLM45 = ROUTER_BIAS | {
    "model_type": "glm4_moe",
    "num_hidden_layers": 92,
    "hidden_size": 5120,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 151552,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000,
    "rope_scaling": None,
}
DEEPSEEK = ROUTER_BIAS | {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "vocab_size": 129280,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
GLM5 = DEEPSEEK | {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "intermediate_size": 12288,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "vocab_size": 154880,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "rope_theta": None,
}
GLM52 = GLM5 | {"index_topk_freq": 4, "index_skip_topk_offset": 3}


def test_sizes_of_qwen3_by_hand():
    moe = ModelShape(
        family="qwen3_moe", num_layers=48, hidden=2048, num_heads=32, num_kv_groups=4, head_dim=128, vocab=151936,
        is_tied=False, ffn=6144, num_dense_layers=0, has_qk_norm=True, num_experts=128, expert_ffn=768,
    )  # fmt: skip
    assert read_shape(QWEN3_MOE) == moe
    dense = replace(moe, family="qwen3", is_tied=True, num_dense_layers=48, num_experts=0, expert_ffn=0)
    assert read_shape(QWEN3) == dense


def test_sizes_of_glm45_by_hand():
    shape = ModelShape(
        family="glm4_moe", num_layers=92, hidden=5120, num_heads=96, num_kv_groups=8, head_dim=128, vocab=151552,
        is_tied=False, ffn=12288, num_dense_layers=3, has_qkv_bias=True, has_qk_norm=True, num_experts=160,
        expert_ffn=1536, num_shared=1, has_router_bias=True, num_mtp_layers=1,
    )  # fmt: skip
    assert read_shape(GLM45) == shape
    assert [shape.is_dense(layer) for layer in (0, 2, 3, 91, 92)] == [True, True, False, False, False]
    assert not any(shape.has_indexer(layer) for layer in (0, 91, 92))
    air = read_shape(GLM45 | {"use_qk_norm": False, "attention_bias": False})
    assert not air.has_qk_norm and not air.has_qkv_bias


def test_sizes_of_latent_attention_by_hand():
    deepseek, glm5 = read_shape(DEEPSEEK), read_shape(GLM5)
    assert deepseek.mla == MLAShape(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    assert glm5.mla == MLAShape(q_rank=2048, kv_rank=512, nope_dim=192, rope_dim=64, v_dim=256)
    assert (deepseek.head_dim, glm5.head_dim) == (192, 256)  # not the config's "head_dim", 64
    assert deepseek.indexer is None and glm5.indexer == IndexerShape(32, 128, 2048, 78 * (True,))
    assert (deepseek.num_experts, deepseek.num_dense_layers, deepseek.num_shared) == (256, 3, 1)


def test_heads_of_hidden_size_over_their_number_unless_said():
    assert read_shape(QWEN3_MOE | {"head_dim": None}).head_dim == 64


@pytest.mark.parametrize("family", ["qwen2_moe", "glm4", "deepseek_v2", "llama", None])
def test_a_family_without_a_table_is_refused(family):
    with pytest.raises(CheckpointError, match="table; known: qwen3, qwen3_moe, glm4_moe, deepseek_v3, glm_moe_dsa"):
        read_shape(QWEN3_MOE | {"model_type": family})


@pytest.mark.parametrize(
    "config, name",
    [(QWEN3_MOE, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")]
    + [(QWEN3_MOE, name) for name in ("vocab_size", "intermediate_size", "moe_intermediate_size")]
    + [(GLM45, name) for name in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "use_qk_norm")]
    + [(GLM45, "first_k_dense_replace"), (GLM45, "attention_bias")]
    + [(DEEPSEEK, name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    + [(GLM5, name) for name in ("index_n_heads", "index_head_dim", "index_topk")],
)
@pytest.mark.parametrize("gap", ["absent", "null"])
def test_a_missing_field_is_named(config, name, gap):
    config = dict(config)
    if gap == "absent":
        del config[name]
    else:
        config[name] = None
    with pytest.raises(CheckpointError, match=f"{config['model_type']} lacks '{name}'"):
        read_shape(config)


def test_a_required_field_may_be_zero_or_false():
    assert required({"a": 0}, "a") == 0 and required({"a": False}, "a") is False


YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "config, field, value",
    [
        (QWEN3_MOE, "hidden_act", "gelu"),
        (QWEN3_MOE, "use_sliding_window", True),
        (QWEN3_MOE, "decoder_sparse_step", 2),
        (QWEN3_MOE, "mlp_only_layers", [0]),
        (QWEN3_MOE, "attention_bias", True),
        (QWEN3_MOE, "rope_scaling", {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}),
        (QWEN3_MOE, "rope_scaling", {"rope_type": "linear", "factor": 2}),
        (QWEN3_MOE, "rope_parameters", YARN | {"rope_theta": 1000000.0}),
        (QWEN3_MOE, "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        (QWEN3_MOE, "quantization_config", {"quant_method": "fp8"}),
        (GLM45, "rope_scaling", YARN),
        (GLM45, "norm_topk_prob", False),
        (GLM45, "n_shared_experts", 0),
        (GLM45, "mlp_layer_types", ["sparse"] + 91 * ["dense"]),
        (DEEPSEEK, "attention_bias", True),
        (DEEPSEEK, "norm_topk_prob", False),
        (DEEPSEEK, "scoring_func", "softmax"),
        (DEEPSEEK, "topk_method", "greedy"),
        (DEEPSEEK, "moe_layer_freq", 2),
        (DEEPSEEK, "q_lora_rank", None),
        (DEEPSEEK, "num_key_value_heads", 64),
        (DEEPSEEK, "num_experts_per_tok", 1),
        (DEEPSEEK, "num_experts_per_tok", 2),
        (DEEPSEEK, "num_experts_per_tok", 12),
        (DEEPSEEK, "rope_interleave", False),
        (DEEPSEEK, "quantization_config", {"quant_method": "fp8"}),
        (DEEPSEEK, "rope_scaling", {"type": "linear", "factor": 2}),
        (GLM5, "rope_parameters", YARN | {"rope_theta": 1000000.0}),
        (GLM5, "indexer_rope_interleave", False),
        (GLM5, "mlp_bias", True),
        (QWEN3_MOE, "rope_parameters", YARN | {"rope_type": None, "type": "yarn", "rope_theta": 1000000.0}),
        (QWEN3_MOE, "rope_scaling", {"type": "default", "partial_rotary_factor": 0.5}),
        (DEEPSEEK, "rope_scaling", DEEPSEEK["rope_scaling"] | {"truncate": False}),
    ],
    ids=str,
)
def test_a_feature_that_is_not_built_is_refused_and_not_ignored(config, field, value):
    read_shape(config)
    with pytest.raises(CheckpointError, match=f"{field}.*is not built"):
        read_shape(config | {field: value})


@pytest.mark.parametrize("groups, chosen, topk", [(8, 4, 9), (8, 1, 2), (4, 4, 6), (1, 1, 3), (None, None, 8)])
def test_groups_that_megatron_scores_as_the_engine_does(groups, chosen, topk):
    read_shape(DEEPSEEK | {"n_group": groups, "topk_group": chosen, "num_experts_per_tok": topk})


@pytest.mark.parametrize("groups, chosen", [(7, 4), (2, 4)])
def test_groups_that_do_not_exist(groups, chosen):
    with pytest.raises(CheckpointError, match=f"= 256 cannot stand in n_group = {groups} of which topk_group = 4"):
        read_shape(DEEPSEEK | {"n_group": groups, "topk_group": chosen})


@pytest.mark.parametrize("said, built", [({}, 0), ({"num_mtp_layers": 2}, 2), ({"num_nextn_predict_layers": 0}, 0)])
def test_mtp_layers_are_those_that_the_folder_counts(said, built):
    """Absent is none: the default of the config's class says 1 for models that have none."""
    assert read_shape(GLM45 | {"num_nextn_predict_layers": None} | said).num_mtp_layers == built


def test_two_numbers_of_mtp_layers_are_a_conflict():
    with pytest.raises(CheckpointError, match="for the number of MTP layers"):
        read_shape(GLM45 | {"num_mtp_layers": 2})


# ---- dense first layers ----------------------------------------------------------------------------------------


def test_dense_layers_from_either_place():
    kinds = 3 * ["dense"] + 75 * ["sparse"]
    assert read_shape(GLM5 | {"mlp_layer_types": kinds}).num_dense_layers == 3
    assert read_shape(GLM5 | {"mlp_layer_types": kinds, "first_k_dense_replace": None}).num_dense_layers == 3
    assert read_shape(GLM5 | {"first_k_dense_replace": 100}).num_dense_layers == 78  # as transformers


def test_two_numbers_of_dense_layers_are_a_conflict():
    kinds = 2 * ["dense"] + 76 * ["sparse"]
    with pytest.raises(CheckpointError, match="first_k_dense_replace = 3, but mlp_layer_types begins with 2 dense"):
        read_shape(GLM5 | {"mlp_layer_types": kinds})


# ---- indexers --------------------------------------------------------------------------------------------------


def full_layers(config):
    return [layer for layer, full in enumerate(read_shape(config).indexer.is_full) if full]


def test_a_schedule_of_indexers_by_hand():
    """GLM-5.2, counted from 1: layers 1, 2, 3, 7, 11, ..., 75 compute, the others share."""
    assert full_layers(GLM52) == [0, 1, *range(2, 78, 4)]
    shape = read_shape(GLM52)
    assert shape.has_indexer(74) and not shape.has_indexer(77) and shape.has_indexer(78)  # 78: the MTP layer


def test_an_absent_offset_is_2_and_not_0():
    config = GLM5 | {"num_hidden_layers": 6, "index_topk_freq": 2}
    assert full_layers(config) == [0, 1, 3, 5] == full_layers(config | {"index_skip_topk_offset": 2})
    assert full_layers(config | {"index_skip_topk_offset": 3}) == [0, 1, 2, 4]


SIX = GLM5 | {"num_hidden_layers": 6}
IRREGULAR = ["full", "full", "shared", "full", "shared", "shared"]


@pytest.mark.parametrize(
    "said",
    [
        {"indexer_types": IRREGULAR},
        {"index_topk_pattern": "FFSFSS"},
        {"index_topk_pattern": IRREGULAR},
        {"indexer_types": IRREGULAR, "index_topk_pattern": "FFSFSS"},
        {"indexer_types": [*IRREGULAR, "full"]},  # the MTP layer, too
    ],
    ids=str,
)
def test_an_irregular_list_is_honoured(said):
    assert full_layers(SIX | said) == [0, 1, 3]


def test_a_list_and_a_schedule_that_agree():
    assert full_layers(SIX | {"index_topk_freq": 2, "indexer_types": "FFSFSF"}) == [0, 1, 3, 5]


@pytest.mark.parametrize(
    "said, message",
    [
        ({"indexer_types": IRREGULAR, "index_topk_freq": 2}, "indexer of layer 5 .indexer_types: shared, index_topk_f"),
        ({"indexer_types": IRREGULAR, "index_topk_freq": 1}, "indexer of layer 2"),
        ({"indexer_types": IRREGULAR, "index_topk_pattern": "FFSFSF"}, "indexer of layer 5"),
        ({"indexer_types": IRREGULAR[:5]}, "speaks of 5 layers, num_hidden_layers is 6"),
        ({"indexer_types": IRREGULAR + 2 * ["full"]}, "speaks of 8 layers"),
        ({"indexer_types": ["half", *IRREGULAR[1:]]}, "holds 'half'; allowed: full, F, shared, S"),
        ({"index_topk_pattern": "SFFFFF"}, "the first layer shares an indexer"),
    ],
    ids=str,
)
def test_lists_of_indexers_that_make_no_sense(said, message):
    with pytest.raises(CheckpointError, match=message):
        read_shape(SIX | said)


ROPE = {"indexer_rope_interleave": True}


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"index_topk_freq": 2},
        {"index_topk_freq": 2, "index_skip_topk_offset": 3},
        {"indexer_types": IRREGULAR, "index_topk_pattern": "FFSFSS"},
    ],
    ids=str,
)
def test_a_folder_that_the_engine_reads_alike(said):
    check_engine_reads_alike(SIX | ROPE | said)


@pytest.mark.parametrize(
    "said, message",
    [
        (ROPE | {"indexer_types": IRREGULAR}, "build the indexer of layer 2, .*index_topk_pattern = 'FFSFSS'"),
        (ROPE | {"index_topk_pattern": IRREGULAR}, "build the indexer of layer 2, .*index_topk_pattern = 'FFSFSS'"),
        ({}, "lacks indexer_rope_interleave"),
    ],
    ids=str,
)
def test_a_folder_that_the_engine_would_read_otherwise_is_refused(said, message):
    with pytest.raises(CheckpointError, match=message):
        check_engine_reads_alike(SIX | said)


def test_what_newer_transformers_write_is_accepted():
    newer = QWEN3_MOE | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 1.0},
        "mlp_only_layers": None,
        "rope_scaling": {},
    }
    assert read_shape(newer) == read_shape(QWEN3_MOE)


# ---- the number of experts (CKP-04) ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"num_experts": 160, "num_local_experts": None},
        {"num_experts": None, "num_local_experts": 160},
        {"num_experts": 160, "num_local_experts": 160},
    ],
    ids=str,
)
def test_the_number_of_experts_from_either_name(fields):
    assert read_shape(QWEN3_MOE | fields).num_experts == 160


def test_two_numbers_of_experts_are_a_conflict():
    with pytest.raises(CheckpointError, match="num_experts = 256, num_local_experts = 160 for the number of experts"):
        read_shape(QWEN3_MOE | {"num_experts": 256, "num_local_experts": 160})


def test_no_number_of_experts_is_an_error_and_not_a_class_default():
    with pytest.raises(CheckpointError, match="nothing for the number of experts"):
        read_shape(QWEN3_MOE | {"num_experts": None})


def test_a_class_default_does_not_shadow_the_number_of_routed_experts():
    assert read_shape(GLM5 | {"num_experts": 256, "n_routed_experts": 160}).num_experts == 160


# ---- rotary positions (CKP-03) ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, base",
    [
        ({"rope_theta": 1000000, "rope_scaling": None}, 1e6),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}, 1e6),
        ({"rope_theta": 8000000, "rope_parameters": {"rope_type": "default"}}, 8e6),
        ({"rope_theta": 1000000, "rope_parameters": {"rope_theta": 1000000.0}}, 1e6),
        ({"rope_theta": 1000000, "rope_parameters": None}, 1e6),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 1000000}}, 1e6),
    ],
    ids=str,
)
def test_the_rotary_base_from_either_place(config, base):
    assert rope_base(config) == base and isinstance(rope_base(config), float)


def test_two_rotary_bases_are_a_conflict():
    with pytest.raises(CheckpointError, match="rope_theta = 10000, rope_parameters.rope_theta = 1000000"):
        rope_base({"rope_theta": 10000, "rope_parameters": {"rope_theta": 1000000}})
    with pytest.raises(CheckpointError, match="rope_theta = 10000, rope_scaling.rope_theta = 1000000"):
        rope_base({"rope_theta": 10000, "rope_scaling": {"rope_theta": 1000000}})


@pytest.mark.parametrize("config", [{}, {"rope_parameters": {"rope_type": "default"}}, {"rope_theta": None}], ids=str)
def test_no_rotary_base_is_an_error_and_not_10000(config):
    with pytest.raises(CheckpointError, match="nothing for the rotary base"):
        rope_base(config)


def test_yarn_is_read_whole_from_either_place():
    stretched = Rope(base=1e4, share=1.0, yarn=Yarn(40.0, 4096, 32.0, 1.0, 1.0, 1.0))
    assert read_rope(DEEPSEEK) == stretched
    fields = DEEPSEEK["rope_scaling"] | {"rope_type": "yarn", "rope_theta": 10000}
    moved = {"rope_theta": None, "rope_scaling": None, "rope_parameters": fields}
    assert read_rope(DEEPSEEK | moved) == stretched
    assert read_rope({"rope_theta": 1000000, "rope_scaling": None}) == Rope(1e6, 1.0, None)


@pytest.mark.parametrize("gap", ["factor", "original_max_position_embeddings", "mscale", "mscale_all_dim"])
def test_yarn_has_no_default_for_what_decides_its_scale(gap):
    scaling = {name: value for name, value in DEEPSEEK["rope_scaling"].items() if name != gap}
    with pytest.raises(CheckpointError, match=f"nothing for {gap}"):
        read_rope(DEEPSEEK | {"rope_scaling": scaling})


def test_the_rotated_share_of_a_head_from_either_place():
    assert read_rope(GLM45).share == 0.5
    moved = {"partial_rotary_factor": None, "rope_parameters": {"partial_rotary_factor": 0.5}}
    assert read_rope(GLM45 | moved).share == 0.5
    moved = {"partial_rotary_factor": None, "rope_scaling": {"partial_rotary_factor": 0.5}}
    assert read_rope(GLM45 | moved).share == 0.5
    with pytest.raises(CheckpointError, match="= 0.5, rope_scaling.partial_rotary_factor = 0.25 for the rotated share"):
        read_rope(GLM45 | {"rope_scaling": {"partial_rotary_factor": 0.25}})
    with pytest.raises(CheckpointError, match="nothing for the rotated share of a head"):
        read_shape(GLM45 | {"partial_rotary_factor": None})


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("config", [QWEN3, GLM45, DEEPSEEK, GLM5], ids=lambda config: config["model_type"])
def test_a_rotary_field_that_nobody_here_reads_is_refused_by_its_name(config, place):
    held = config.get(place) or {}
    read_shape(config | {place: held | {"short_factor": None}})
    with pytest.raises(CheckpointError, match=f"{place}.short_factor = .2.0. is not known here.*; known: rope_type, "):
        read_shape(config | {place: held | {"short_factor": [2.0]}})
    with pytest.raises(CheckpointError, match=f"{place} = 'yarn' is no object"):
        read_shape(config | {place: "yarn"})


# ---- pipeline stages ---------------------------------------------------------------------------------------------


def test_a_stage_may_start_on_any_layer_but_one_that_shares_an_indexer():
    shape = read_shape(GLM5 | {"num_hidden_layers": 8, "indexer_types": list("FFSFSSFS")})
    assert [layer for layer, may in enumerate(layers_that_may_start_a_stage(shape)) if may] == [0, 1, 3, 6]
    assert layers_that_may_start_a_stage(read_shape(DEEPSEEK)) == (True,) * DEEPSEEK["num_hidden_layers"]


def test_every_stage_that_starts_wrong_is_named_with_the_layers_that_may():
    shape = read_shape(GLM5 | {"num_hidden_layers": 6, "indexer_types": list("FFSFSS")})
    with pytest.raises(ConfigError) as fault:
        check_stage_starts(shape, Parallel(pp=3))
    for line, stage, layer in zip(str(fault.value).splitlines(), (1, 2), (2, 4), strict=True):
        assert f"pipeline stage {stage} starts on layer {layer}," in line and "may start: 0, 1, 3;" in line
    check_stage_starts(shape, Parallel(pp=2))
    with pytest.raises(ConfigError, match="does not divide"):
        check_stage_starts(shape, Parallel(pp=4))


def test_chunks_of_interleaved_stages_start_right_too():
    """Two stages of two chunks."""
    whole = read_shape(GLM5 | {"num_hidden_layers": 8, "indexer_types": list("FSFSFSFS")})
    check_stage_starts(whole, Parallel(pp=2, vpp=2))
    cut = read_shape(GLM5 | {"num_hidden_layers": 8, "indexer_types": list("FSFSFSSS")})
    with pytest.raises(ConfigError, match="pipeline stage 1, chunk 1, starts on layer 6,"):
        check_stage_starts(cut, Parallel(pp=2, vpp=2))


def test_78_layers_that_share_by_fours_can_be_cut_where_an_indexer_stands():
    shape = read_shape(GLM52)
    check_stage_starts(shape, Parallel(pp=8, first_stage_layers=10, last_stage_layers=20))  # 10, 18, .. 58
    with pytest.raises(ConfigError, match="starts on layer 39, .* may start: 0, 1, 2, 6, 10, "):
        check_stage_starts(shape, Parallel(pp=2))
