"""Megatron tensor name -> HF tensor name(s), as a table. Expert numbers in the names are global, layer numbers too.

MTP layer K of a model with N decoder layers is layer N + K on the HF side. What the table does not know is an error: a
tensor is never skipped silently.
Source: names of megatron-core 0.19 GPTModel (local and transformer-engine modules) and of transformers 5.19.
"""

import re
from dataclasses import dataclass
from typing import Literal

from megatron_sao.convert.family import ModelShape
from megatron_sao.errors import CheckpointError


@dataclass(frozen=True)
class HFNames:
    """Where the rows of one Megatron tensor go.

    kind "plain": hf has one name and the same layout;
    kind "qkv": rows are [q .. q, k, v] per KV group; hf = (q, k, v) names;
    kind "gated": rows are [gate; up] per tensor rank; hf = (gate, up) names.
    """

    kind: Literal["plain", "qkv", "gated"]
    hf: tuple[str, ...]


_OUTSIDE_LAYERS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",  # fused norm (transformer-engine)
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",  # fused norm, dense layer
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",  # a persistent buffer, float32 in every model
}
_GROUPED_QUERIES = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_LATENT = {
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",  # fused norm
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",  # fused norm
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
}
_MEGATRON_INDEXER, _HF_INDEXER = "self_attention.core_attention.indexer.", "self_attn.indexer."
_INDEXER = {
    f"{_MEGATRON_INDEXER}linear_wq_b.weight": f"{_HF_INDEXER}wq_b.weight",
    f"{_MEGATRON_INDEXER}linear_wk.weight": f"{_HF_INDEXER}wk.weight",
    f"{_MEGATRON_INDEXER}k_norm.weight": f"{_HF_INDEXER}k_norm.weight",
    f"{_MEGATRON_INDEXER}k_norm.bias": f"{_HF_INDEXER}k_norm.bias",
    f"{_MEGATRON_INDEXER}linear_weights_proj.weight": f"{_HF_INDEXER}weights_proj.weight",
}
_AROUND_MTP_LAYER = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}
_DECODER_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# Megatron 0.19 calls the layer inside mtp_model_layer; older versions, and its own checkpoints, transformer_layer.
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.(?:(?:mtp_model_layer|transformer_layer)\.(.+)|(.+))")
_QKV = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
_MLP = re.compile(r"mlp\.(shared_experts\.)?linear_fc([12])\.weight")
_EXPERT_MLP = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.weight|linear_fc([12])\.weight(\d+))"
)


def lookup(name: str, shape: ModelShape) -> HFNames:
    """HF names of a Megatron tensor `name` (global layer and expert numbers; MTP layers count from 0).

    Raises: CheckpointError when no row of the table fits.
    """
    if name in _OUTSIDE_LAYERS:
        return HFNames("plain", (_OUTSIDE_LAYERS[name],))
    if found := _DECODER_LAYER.fullmatch(name):
        names = _in_layer(found[2], int(found[1]), shape)
    elif found := _MTP_LAYER.fullmatch(name):
        layer = shape.num_layers + int(found[1])
        if found[2] is not None:
            names = _in_layer(found[2], layer, shape)
        else:
            around = _AROUND_MTP_LAYER.get(found[3])
            names = HFNames("plain", (f"model.layers.{layer}.{around}",)) if around else None
    else:
        names = None
    if names is None:
        raise CheckpointError(f"no HF name for the Megatron tensor {name}: add it to convert/names.py")
    return names


def _in_layer(rest: str, layer: int, shape: ModelShape) -> HFNames | None:
    """HF names of a tensor inside a transformer layer."""
    prefix = f"model.layers.{layer}."
    attention = _LATENT | _INDEXER if shape.mla else _GROUPED_QUERIES
    if plain := (_IN_LAYER | attention).get(rest):
        return HFNames("plain", (prefix + plain,))
    if qkv := _QKV.fullmatch(rest):
        return HFNames("qkv", tuple(f"{prefix}self_attn.{part}_proj.{qkv[1]}" for part in "qkv"))
    if mlp := _MLP.fullmatch(rest):
        return _mlp_names(f"{prefix}mlp.{mlp[1] or ''}", mlp[2])
    if expert := _EXPERT_MLP.fullmatch(rest):
        return _mlp_names(f"{prefix}mlp.experts.{expert[1] or expert[4]}.", expert[2] or expert[3])
    return None


def _mlp_names(place: str, number: str) -> HFNames:
    if number == "1":
        return HFNames("gated", (place + "gate_proj.weight", place + "up_proj.weight"))
    return HFNames("plain", (place + "down_proj.weight",))


_EXPERT = re.compile(r"(\.local_experts\.|\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)(?=\.|$)")


def expert_number(name: str) -> int | None:
    """Expert number in a Megatron name (sequential or grouped modules); None for dense and shared experts."""
    found = _EXPERT.search(name)
    return int(found[2]) if found else None


def with_expert_offset(name: str, offset: int) -> str:
    """The name with its expert number raised by `offset` (local -> global); unchanged where there is none."""
    return _EXPERT.sub(lambda found: f"{found[1]}{int(found[2]) + offset}", name)


_LAYER = re.compile(r"((?:decoder|mtp)\.layers\.(\d+)\.(?:(?:mtp_model_layer|transformer_layer)\.)?)(.+)")
_NORM_ALONE = {  # fused norms by the names that they have where they are modules of their own
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}


def stored_name(name: str, shape: ModelShape) -> str:
    """The name that a tensor has in a distributed checkpoint, whatever modules it comes from: transformer-engine's.

    transformer-engine fuses a norm into the linear layer behind it, local modules keep it apart. megatron-core 0.19
    gives both the same name in a checkpoint for grouped-query attention in dense layers only.

    Args: name: with global layer and expert numbers, as Megatron's sharded_state_dict gives it.
    """
    found = _LAYER.fullmatch(name)
    if not found:
        return name
    prefix, number, rest = found[1], int(found[2]), found[3]
    rest = _NORM_ALONE.get(rest, rest)
    fused = {alone: name for name, alone in _NORM_ALONE.items()}
    if shape.mla:
        del fused["input_layernorm.weight"]
    if not shape.mla or shape.indexer:  # heads have norms of their own; the indexer reads the normed latent
        fused = {alone: name for alone, name in fused.items() if not alone.startswith("self_attention.")}
    if prefix.startswith("mtp.") or not shape.is_dense(number):
        fused.pop("pre_mlp_layernorm.weight")
    return prefix + fused.get(rest, rest)
