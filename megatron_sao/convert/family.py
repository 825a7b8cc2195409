"""What the weight tables need to know of a HF model: one small record read from `config.json`."""

from dataclasses import dataclass
from typing import Any

from megatron_sao.errors import CheckpointError


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide names and rows of weights."""

    family: str  # HF model_type
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_groups: int
    head_dim: int
    num_experts: int  # 0 = dense
    vocab: int  # true size, without padding
    is_tied: bool  # output layer is the embedding


FAMILIES = ("qwen3_moe", "qwen3")

# Fields that change what the model computes and of which only one reading is built. Absent = that reading.
_ONLY = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "rope_scaling.type": ("default",),
    "rope_scaling.rope_type": ("default",),
    "rope_parameters.rope_type": ("default",),
    "rope_parameters.partial_rotary_factor": (1, 1.0),
}


def required(hf_config: dict[str, Any], name: str) -> Any:
    """A field of `config.json` that must be there: no silent default. Raises: CheckpointError."""
    if hf_config.get(name) is None:
        raise CheckpointError(f"config.json of model_type {hf_config.get('model_type')} lacks {name!r}")
    return hf_config[name]


def read_shape(hf_config: dict[str, Any]) -> ModelShape:
    """The `ModelShape` of a parsed `config.json`.

    Raises: CheckpointError for a family without a weight table, a missing field, or a feature that is not built (it
        would train another model than the engine serves).
    """
    family = hf_config.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(f"config.json: model_type = {family!r} has no weight table; known: {', '.join(FAMILIES)}")
    _refuse_what_is_not_built(hf_config)
    heads = required(hf_config, "num_attention_heads")
    hidden = required(hf_config, "hidden_size")
    return ModelShape(
        family=family,
        num_layers=required(hf_config, "num_hidden_layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_groups=required(hf_config, "num_key_value_heads"),
        head_dim=hf_config.get("head_dim") or hidden // heads,
        num_experts=_one_value(hf_config, _EXPERT_COUNT, "the number of experts") if family.endswith("_moe") else 0,
        vocab=required(hf_config, "vocab_size"),
        is_tied=bool(hf_config.get("tie_word_embeddings", False)),
    )


def _refuse_what_is_not_built(hf_config: dict[str, Any]) -> None:
    for path, allowed in _ONLY.items():
        found: Any = hf_config
        for key in path.split("."):
            found = (found or {}).get(key)
        if found is not None and found not in allowed:
            raise CheckpointError(f"config.json: {path} = {found!r} is not built here; allowed: {allowed[0]!r}")


def rope_base(hf_config: dict[str, Any]) -> float:
    """The rotary base, from either place where transformers versions keep it. Raises: as `_one_value`."""
    nested = hf_config.get("rope_parameters") or {}
    places = {"rope_theta": hf_config.get("rope_theta"), "rope_parameters.rope_theta": nested.get("rope_theta")}
    return float(_one_value(places, tuple(places), "the rotary base"))


_EXPERT_COUNT = ("num_experts", "num_local_experts")  # transformers 5 writes the second


def _one_value(fields: dict[str, Any], names: tuple[str, ...], what: str) -> Any:
    """The one value that stands under `names`.

    Raises: CheckpointError when they disagree or all are absent: a default here would train a wrong model silently.
    """
    found = {name: fields[name] for name in names if fields.get(name) is not None}
    if len(set(found.values())) != 1:
        said = ", ".join(f"{name} = {value}" for name, value in found.items()) or "nothing"
        raise CheckpointError(f"config.json gives {said} for {what}; it needs one of {', '.join(names)}, or equal ones")
    return next(iter(found.values()))
