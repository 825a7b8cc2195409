"""What is said where a folder lacks something. (What it must hold, for every family: test_tables.py.)"""

import pytest

from megatron_sao.convert.expected import check_tensors, expected_tensors
from megatron_sao.errors import CheckpointError


SMALL = {
    "model_type": "qwen3", "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "hidden_size": 6,
    "num_hidden_layers": 1, "vocab_size": 10, "intermediate_size": 5,
}  # fmt: skip


def test_names_the_missing_tensor_and_its_shape():
    held = expected_tensors(SMALL)
    del held["model.layers.0.mlp.down_proj.weight"]
    message = r"folder here lacks the tensor model.layers.0.mlp.down_proj.weight of shape \[6, 5\]$"
    with pytest.raises(CheckpointError, match=message):
        check_tensors(held, SMALL, "here")


def test_names_both_shapes_of_a_tensor_of_another_model():
    held = expected_tensors(SMALL) | {"model.layers.0.self_attn.k_proj.weight": (8, 6)}
    with pytest.raises(CheckpointError, match=r"k_proj.weight with shape \[8, 6\], but config.json says \[4, 6\]$"):
        check_tensors(held, SMALL, "here")


def test_counts_what_it_does_not_list():
    with pytest.raises(CheckpointError, match=r"lacks the tensor model.embed_tokens.weight .*, and 11 more$"):
        check_tensors({}, SMALL, "here")


def test_does_not_mind_more():
    check_tensors(expected_tensors(SMALL) | {"value_head.weight": (1, 6)}, SMALL, "here")
