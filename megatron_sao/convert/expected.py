"""Which tensors a HF model folder must hold, from its `config.json` alone: a lack shows before anything is built."""

from collections.abc import Mapping
from typing import Any

from megatron_sao.convert.family import ModelShape, read_shape
from megatron_sao.errors import CheckpointError

_NUM_SHOWN = 3


def expected_tensors(hf_config: dict[str, Any], *, with_mtp: bool = False) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor of the model.

    Args:
        with_mtp: the MTP layers that the config counts, too.
    Raises: CheckpointError, as `read_shape`.
    """
    shape = read_shape(hf_config)
    expected = {
        "model.embed_tokens.weight": (shape.vocab, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    if not shape.is_tied:
        expected["lm_head.weight"] = (shape.vocab, shape.hidden)
    for layer in range(shape.num_layers + (shape.num_mtp_layers if with_mtp else 0)):
        tensors = _norms(shape) | (_latent_attention(shape) if shape.mla else _grouped_attention(shape))
        if shape.has_indexer(layer):
            tensors |= _indexer(shape)
        tensors |= _gated("mlp", shape.hidden, shape.ffn) if shape.is_dense(layer) else _experts(shape)
        if layer >= shape.num_layers:
            tensors |= _around_mtp_layer(shape)
        expected |= {f"model.layers.{layer}.{name}": size for name, size in tensors.items()}
    return expected


def check_tensors(
    found: Mapping[str, tuple[int, ...]], hf_config: dict[str, Any], where: Any, *, with_mtp: bool = False
) -> None:
    """Every tensor of the model is there and has its shape; what is there besides is not looked at.

    Args:
        found: HF name -> shape of what the folder holds.
        where: the folder, for messages.
        with_mtp: the MTP layers must be there, too.
    Raises: CheckpointError naming tensors, expected and found shapes.
    """
    faults = []
    for name, size in expected_tensors(hf_config, with_mtp=with_mtp).items():
        if name not in found:
            faults.append(f"lacks the tensor {name} of shape {list(size)}")
        elif tuple(found[name]) != size:
            faults.append(f"holds {name} with shape {list(found[name])}, but config.json says {list(size)}")
    if faults:
        rest = f", and {len(faults) - _NUM_SHOWN} more" if len(faults) > _NUM_SHOWN else ""
        raise CheckpointError(f"the model folder {where} {', '.join(faults[:_NUM_SHOWN])}{rest}")


def _norms(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    return {"input_layernorm.weight": (shape.hidden,), "post_attention_layernorm.weight": (shape.hidden,)}


def _grouped_attention(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {}
    for part, num_heads in (("q", shape.num_heads), ("k", shape.num_kv_groups), ("v", shape.num_kv_groups)):
        tensors[f"self_attn.{part}_proj.weight"] = (num_heads * shape.head_dim, shape.hidden)
        if shape.has_qkv_bias:
            tensors[f"self_attn.{part}_proj.bias"] = (num_heads * shape.head_dim,)
    if shape.has_qk_norm:
        tensors |= {"self_attn.q_norm.weight": (shape.head_dim,), "self_attn.k_norm.weight": (shape.head_dim,)}
    return tensors | {"self_attn.o_proj.weight": (shape.hidden, shape.num_heads * shape.head_dim)}


def _latent_attention(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    mla, heads = shape.mla, shape.num_heads
    assert mla is not None
    return {
        "self_attn.q_a_proj.weight": (mla.q_rank, shape.hidden),
        "self_attn.q_a_layernorm.weight": (mla.q_rank,),
        "self_attn.q_b_proj.weight": (heads * shape.head_dim, mla.q_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (mla.kv_rank + mla.rope_dim, shape.hidden),
        "self_attn.kv_a_layernorm.weight": (mla.kv_rank,),
        "self_attn.kv_b_proj.weight": (heads * (mla.nope_dim + mla.v_dim), mla.kv_rank),
        "self_attn.o_proj.weight": (shape.hidden, heads * mla.v_dim),
    }


def _indexer(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    indexer, mla = shape.indexer, shape.mla
    assert indexer is not None and mla is not None
    return {
        "self_attn.indexer.wq_b.weight": (indexer.num_heads * indexer.head_dim, mla.q_rank),
        "self_attn.indexer.wk.weight": (indexer.head_dim, shape.hidden),
        "self_attn.indexer.k_norm.weight": (indexer.head_dim,),
        "self_attn.indexer.k_norm.bias": (indexer.head_dim,),
        "self_attn.indexer.weights_proj.weight": (indexer.num_heads, shape.hidden),
    }


def _experts(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (shape.num_experts, shape.hidden)}
    if shape.has_router_bias:
        tensors["mlp.gate.e_score_correction_bias"] = (shape.num_experts,)
    if shape.num_shared:
        tensors |= _gated("mlp.shared_experts", shape.hidden, shape.num_shared * shape.expert_ffn)
    for expert in range(shape.num_experts):
        tensors |= _gated(f"mlp.experts.{expert}", shape.hidden, shape.expert_ffn)
    return tensors


def _around_mtp_layer(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    norms = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    return {"eh_proj.weight": (shape.hidden, 2 * shape.hidden)} | dict.fromkeys(norms, (shape.hidden,))


def _gated(place: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{place}.gate_proj.weight": (inner, hidden),
        f"{place}.up_proj.weight": (inner, hidden),
        f"{place}.down_proj.weight": (hidden, inner),
    }
