"""Which tensors a HF model folder must hold, from its `config.json` alone: a lack shows before anything is built."""

from collections.abc import Mapping
from typing import Any

from megatron_sao.convert.family import ModelShape, read_shape, required
from megatron_sao.errors import CheckpointError

_NUM_SHOWN = 3


def expected_tensors(hf_config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor of the model. Raises: CheckpointError, as `read_shape`."""
    shape = read_shape(hf_config)
    expected = {
        "model.embed_tokens.weight": (shape.vocab, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    if not shape.is_tied:
        expected["lm_head.weight"] = (shape.vocab, shape.hidden)
    for layer in range(shape.num_layers):
        tensors = _attention(shape, bool(hf_config.get("attention_bias"))) | _mlp(shape, hf_config)
        expected |= {f"model.layers.{layer}.{name}": size for name, size in tensors.items()}
    return expected


def check_tensors(found: Mapping[str, tuple[int, ...]], hf_config: dict[str, Any], where: Any) -> None:
    """Every tensor of the model is there and has its shape; what is there besides is not looked at.

    Args:
        found: HF name -> shape of what the folder holds.
        where: the folder, for messages.
    Raises: CheckpointError naming tensors, expected and found shapes.
    """
    faults = []
    for name, size in expected_tensors(hf_config).items():
        if name not in found:
            faults.append(f"lacks the tensor {name} of shape {list(size)}")
        elif tuple(found[name]) != size:
            faults.append(f"holds {name} with shape {list(found[name])}, but config.json says {list(size)}")
    if faults:
        rest = f", and {len(faults) - _NUM_SHOWN} more" if len(faults) > _NUM_SHOWN else ""
        raise CheckpointError(f"the model folder {where} {', '.join(faults[:_NUM_SHOWN])}{rest}")


def _attention(shape: ModelShape, has_bias: bool) -> dict[str, tuple[int, ...]]:
    rows = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_groups, "v_proj": shape.num_kv_groups}
    tensors: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (shape.hidden,)}
    for name, num_heads in rows.items():
        tensors[f"self_attn.{name}.weight"] = (num_heads * shape.head_dim, shape.hidden)
        if has_bias:
            tensors[f"self_attn.{name}.bias"] = (num_heads * shape.head_dim,)
    return tensors | {
        "self_attn.q_norm.weight": (shape.head_dim,),
        "self_attn.k_norm.weight": (shape.head_dim,),
        "self_attn.o_proj.weight": (shape.hidden, shape.num_heads * shape.head_dim),
    }


def _mlp(shape: ModelShape, hf_config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {"post_attention_layernorm.weight": (shape.hidden,)}
    if not shape.num_experts:
        return tensors | _gated("mlp", shape.hidden, required(hf_config, "intermediate_size"))
    tensors["mlp.gate.weight"] = (shape.num_experts, shape.hidden)
    for expert in range(shape.num_experts):
        tensors |= _gated(f"mlp.experts.{expert}", shape.hidden, required(hf_config, "moe_intermediate_size"))
    return tensors


def _gated(place: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{place}.gate_proj.weight": (inner, hidden),
        f"{place}.up_proj.weight": (inner, hidden),
        f"{place}.down_proj.weight": (hidden, inner),
    }
