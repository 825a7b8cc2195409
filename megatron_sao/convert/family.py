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


def read_shape(hf_config: dict[str, Any]) -> ModelShape:
    """The `ModelShape` of a parsed `config.json`.

    Raises: CheckpointError for a family without a weight table, or a missing field (no silent default).
    """
    family = hf_config.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(f"config.json: model_type = {family!r} has no weight table; known: {', '.join(FAMILIES)}")

    def field(name: str) -> Any:
        if hf_config.get(name) is None:
            raise CheckpointError(f"config.json of model_type {family} lacks {name!r}")
        return hf_config[name]

    heads = field("num_attention_heads")
    return ModelShape(
        family=family,
        num_layers=field("num_hidden_layers"),
        hidden=field("hidden_size"),
        num_heads=heads,
        num_kv_groups=field("num_key_value_heads"),
        head_dim=hf_config.get("head_dim") or field("hidden_size") // heads,
        num_experts=_one_value(hf_config, _EXPERT_COUNT, "the number of experts") if family.endswith("_moe") else 0,
        vocab=field("vocab_size"),
        is_tied=bool(hf_config.get("tie_word_embeddings", False)),
    )


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
