"""What is read from config.json: sizes, the rotary base, the number of experts; conflicts and gaps are errors."""

import pytest

from megatron_sao.convert.family import ModelShape, read_shape, required, rope_base
from megatron_sao.errors import CheckpointError

QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
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


def test_sizes_by_hand():
    assert read_shape(QWEN3_MOE) == ModelShape("qwen3_moe", 48, 2048, 32, 4, 128, 128, 151936, False)
    assert read_shape(QWEN3) == ModelShape("qwen3", 48, 2048, 32, 4, 128, 0, 151936, True)


def test_heads_of_hidden_size_over_their_number_unless_said():
    assert read_shape(QWEN3_MOE | {"head_dim": None}).head_dim == 64


@pytest.mark.parametrize("family", ["glm4_moe", "glm_moe_dsa", "deepseek_v3", "qwen2_moe", "llama", None])
def test_a_family_without_a_table_is_refused(family):
    with pytest.raises(CheckpointError, match="no weight table; known: qwen3_moe, qwen3"):
        read_shape(QWEN3_MOE | {"model_type": family})


@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"]
)
@pytest.mark.parametrize("gap", ["absent", "null"])
def test_a_missing_field_is_named(name, gap):
    config = dict(QWEN3_MOE)
    if gap == "absent":
        del config[name]
    else:
        config[name] = None
    with pytest.raises(CheckpointError, match=f"qwen3_moe lacks '{name}'"):
        read_shape(config)


def test_a_required_field_may_be_zero_or_false():
    assert required({"a": 0}, "a") == 0 and required({"a": False}, "a") is False


@pytest.mark.parametrize(
    "field, value",
    [
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("decoder_sparse_step", 2),
        ("mlp_only_layers", [0]),
        ("rope_scaling", {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}),
        ("rope_scaling", {"rope_type": "linear", "factor": 2}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ],
)
def test_a_feature_that_is_not_built_is_refused_and_not_ignored(field, value):
    with pytest.raises(CheckpointError, match=f"{field}.*is not built here"):
        read_shape(QWEN3_MOE | {field: value})


def test_what_newer_transformers_write_is_accepted():
    newer = QWEN3_MOE | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 1.0},
        "mlp_only_layers": None,
        "rope_scaling": {},
    }
    assert read_shape(newer) == read_shape(QWEN3_MOE)


# ---- the number of experts -------------------------------------------------------------------------------------


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


# ---- the rotary base -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, base",
    [
        ({"rope_theta": 1000000, "rope_scaling": None}, 1e6),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}, 1e6),
        ({"rope_theta": 8000000, "rope_parameters": {"rope_type": "default"}}, 8e6),
        ({"rope_theta": 1000000, "rope_parameters": {"rope_theta": 1000000.0}}, 1e6),
        ({"rope_theta": 1000000, "rope_parameters": None}, 1e6),
    ],
    ids=str,
)
def test_the_rotary_base_from_either_place(config, base):
    assert rope_base(config) == base and isinstance(rope_base(config), float)


def test_two_rotary_bases_are_a_conflict():
    with pytest.raises(CheckpointError, match="rope_theta = 10000, rope_parameters.rope_theta = 1000000"):
        rope_base({"rope_theta": 10000, "rope_parameters": {"rope_theta": 1000000}})


@pytest.mark.parametrize("config", [{}, {"rope_parameters": {"rope_type": "default"}}, {"rope_theta": None}], ids=str)
def test_no_rotary_base_is_an_error_and_not_10000(config):
    with pytest.raises(CheckpointError, match="nothing for the rotary base"):
        rope_base(config)
