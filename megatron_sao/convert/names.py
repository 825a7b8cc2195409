"""Megatron parameter name -> HF tensor name(s), as a table. Layer and expert numbers in the names are global.

`lookup` is the only function. What it does not know is an error: a tensor is never skipped silently.
Source: names of megatron-core 0.19 GPTModel (local and transformer-engine modules) and of transformers 5.19.
"""

import re
from dataclasses import dataclass
from typing import Literal

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
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",  # fused norm, dense layer
    "mlp.router.weight": "mlp.gate.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_QKV = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
_MLP = re.compile(r"mlp\.(?:experts\.local_experts\.(\d+)\.|experts\.)?linear_fc([12])\.weight(\d+)?")


def lookup(name: str) -> HFNames:
    """HF names of a Megatron tensor `name` (global layer and expert numbers).

    Raises: CheckpointError when no row of the table fits.
    """
    if name in _OUTSIDE_LAYERS:
        return HFNames("plain", (_OUTSIDE_LAYERS[name],))
    layer = _LAYER.fullmatch(name)
    if layer is None:
        raise CheckpointError(f"no HF name for the Megatron tensor {name}: add it to convert/names.py")
    prefix, rest = f"model.layers.{layer[1]}.", layer[2]
    if rest in _IN_LAYER:
        return HFNames("plain", (prefix + _IN_LAYER[rest],))
    if qkv := _QKV.fullmatch(rest):
        return HFNames("qkv", tuple(f"{prefix}self_attn.{part}_proj.{qkv[1]}" for part in "qkv"))
    if mlp := _MLP.fullmatch(rest):
        expert = mlp[1] or mlp[3]
        place = f"{prefix}mlp.experts.{expert}." if expert is not None else f"{prefix}mlp."
        if mlp[2] == "1":
            return HFNames("gated", (place + "gate_proj.weight", place + "up_proj.weight"))
        return HFNames("plain", (place + "down_proj.weight",))
    raise CheckpointError(f"no HF name for the Megatron tensor {name}: add it to convert/names.py")


_EXPERT = re.compile(r"(\.local_experts\.|\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)(?=\.|$)")


def expert_number(name: str) -> int | None:
    """Expert number in a Megatron name (sequential or grouped modules); None for dense and shared experts."""
    found = _EXPERT.search(name)
    return int(found[2]) if found else None


def with_expert_offset(name: str, offset: int) -> str:
    """The name with its expert number raised by `offset` (local -> global); unchanged where there is none."""
    return _EXPERT.sub(lambda found: f"{found[1]}{int(found[2]) + offset}", name)
