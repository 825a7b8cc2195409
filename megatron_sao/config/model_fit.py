"""How a model's shape must fit the layout of the trainer and of the engines.

Rules: every split is even. Key/value heads are not replicated (tp must divide them; MLA has none to split). How layers
are cut into pipeline stages stands in stages.py. A shape is described by the fields of a Hugging Face config.json,
whatever the model's family.
"""

from collections.abc import Mapping
from typing import Any

from megatron_sao.config.config import Config
from megatron_sao.config.engine import Engine
from megatron_sao.config.parallel import Parallel
from megatron_sao.config.stages import does_not_divide, stage_faults
from megatron_sao.config.warm_start import WarmStart
from megatron_sao.errors import ConfigError

_EXPERT_FIELDS = ("n_routed_experts", "num_experts", "num_local_experts")  # GLM and DeepSeek; Qwen; others


def check_model_fits(cfg: Config, hf_config: Mapping[str, Any]) -> None:
    """Raises ConfigError, with every fault, unless a model can be laid out as [parallel] and [engine] say.

    Args:
        hf_config: the content of the model folder's config.json.
    """
    faults = _faults(cfg.parallel, cfg.engine, hf_config, {})
    if len(faults) == 1:
        raise ConfigError(faults[0])
    if faults:
        raise ConfigError(
            "\n  ".join([f"{len(faults)} reasons why the model does not fit the configuration:", *faults])
        )


def demonstration_model_faults(warm_start: WarmStart, parallel: Parallel, engine: Engine) -> list[str]:
    """The same for the demonstration model, and whether its shape is one at all."""
    w = warm_start
    faults = []
    if w.heads % w.kv_heads:
        faults.append(does_not_divide("warm_start.kv_heads", w.kv_heads, "warm_start.heads", w.heads))
    if w.top_k > w.experts:
        faults.append(f"warm_start.top_k = {w.top_k} is more than warm_start.experts = {w.experts}; lower the first")
    names = {
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "num_hidden_layers": "layers",
        "num_experts": "experts",
        "moe_intermediate_size": "expert_ffn",
    }
    shape = {field: getattr(w, name) for field, name in names.items()}
    return faults + _faults(parallel, engine, shape, {field: f"warm_start.{name}" for field, name in names.items()})


def _faults(parallel: Parallel, engine: Engine, shape: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """What does not divide or does not fit. `names` says how messages call a field (else "the model's FIELD")."""
    faults = []

    def called(field: str) -> str:
        return names.get(field, f"the model's {field}")

    for axis, size, field in _splits(parallel, engine, shape):
        number = shape.get(field)
        if isinstance(number, int) and number % size:
            faults.append(does_not_divide(axis, size, called(field), number))
    num_layers = shape.get("num_hidden_layers")
    if isinstance(num_layers, int):
        faults += stage_faults(num_layers, parallel, called("num_hidden_layers"))
    expert_field = _expert_field(shape)
    if parallel.ep > 1 and expert_field is None:
        faults.append(f"parallel.ep = {parallel.ep}, but the model has no experts; use 1")
    if engine.expert_parallel and expert_field is None:
        faults.append("engine.expert_parallel = true, but the model has no experts; use false")
    elif expert_field and engine.num_expert_ranks > shape[expert_field]:
        faults.append(
            f"engine.tensor_parallel * data_parallel = {engine.num_expert_ranks} with engine.expert_parallel is more"
            f" than {called(expert_field)} = {shape[expert_field]}; use fewer"
        )
    if isinstance(num_layers, int) and engine.pipeline_parallel > num_layers:
        faults.append(
            f"engine.pipeline_parallel = {engine.pipeline_parallel} is more than {called('num_hidden_layers')} ="
            f" {num_layers}; use fewer"
        )
    longest = shape.get("max_position_embeddings")
    if isinstance(longest, int) and engine.max_model_len > longest:
        faults.append(
            f"engine.max_model_len = {engine.max_model_len} is more than {called('max_position_embeddings')} ="
            f" {longest}; lower it"
        )
    return faults


def _splits(parallel: Parallel, engine: Engine, shape: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """(axis, its size, the field it must divide) for this kind of model."""
    expert_field = _expert_field(shape)
    dense_fields = (shape.get("first_k_dense_replace"), shape.get("mlp_only_layers"))
    has_dense_layers = expert_field is None or any(dense_fields) or "dense" in (shape.get("mlp_layer_types") or ())
    splits = []
    for axis, size in (("parallel.tp", parallel.tp), ("engine.tensor_parallel", engine.tensor_parallel)):
        splits.append((axis, size, "num_attention_heads"))
        if not shape.get("kv_lora_rank"):  # MLA: one latent for all heads, nothing to split
            splits.append((axis, size, "num_key_value_heads"))
        if has_dense_layers:
            splits.append((axis, size, "intermediate_size"))
    if expert_field:
        splits.append(("parallel.ep", parallel.ep, expert_field))
        splits.append(("parallel.etp", parallel.etp, "moe_intermediate_size"))
        if not engine.expert_parallel or shape.get("n_shared_experts"):
            splits.append(("engine.tensor_parallel", engine.tensor_parallel, "moe_intermediate_size"))
        if shape.get("n_shared_experts"):  # their width is a multiple of an expert's
            splits.append(("parallel.tp", parallel.tp, "moe_intermediate_size"))
    return splits


def _expert_field(shape: Mapping[str, Any]) -> str | None:
    return next((field for field in _EXPERT_FIELDS if shape.get(field)), None)

