"""How sections must fit together, and how they must fit a model and a world of ranks.

Each check takes the sections it needs and yields faults; it runs as soon as those sections are sound by themselves, so that one
report holds the faults of fields and of their combinations alike.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from megatron_sao.config.algo import Algo
from megatron_sao.config.arms import ARMS
from megatron_sao.config.config import Config
from megatron_sao.config.engine import Engine
from megatron_sao.config.model import Model
from megatron_sao.config.parallel import Parallel
from megatron_sao.config.sampling import Sampling
from megatron_sao.config.schedule import Schedule
from megatron_sao.config.section import Section
from megatron_sao.config.value import Value
from megatron_sao.config.warm_start import WarmStart
from megatron_sao.errors import ConfigError


def cross_field_faults(sections: dict[str, Any]) -> list[str]:
    """Faults between sections. `sections` may lack some: checks that need a missing one are left out."""
    faults: list[str] = []
    for check in _CHECKS:
        needed = inspect.signature(check).parameters
        if needed.keys() <= sections.keys():
            faults += check(**{name: sections[name] for name in needed})
    return faults


def check_world_size(cfg: Config, world_size: int) -> None:
    """Raises ConfigError unless the trainer was started with as many ranks as [parallel] describes."""
    p = cfg.parallel
    if p.world_size != world_size:
        raise ConfigError(
            f"parallel.tp * pp * cp * dp = {p.tp} * {p.pp} * {p.cp} * {p.dp} = {p.world_size}, but the trainer has {world_size} ranks; "
            f"start {p.world_size} ranks or change [parallel]"
        )


def check_model_fits(cfg: Config, hf_config: dict[str, Any]) -> None:
    """Raises ConfigError, with every fault, unless the model of a Hugging Face config.json can be laid out as [parallel] and [engine] say."""
    faults = model_faults(cfg.parallel, cfg.engine, hf_config, "")
    if faults:
        raise ConfigError("\n  ".join(["the model does not fit the configuration:", *faults]) if len(faults) > 1 else faults[0])


def model_faults(parallel: Parallel, engine: Engine, hf_config: dict[str, Any], prefix: str) -> list[str]:
    """What does not divide. `prefix` names the place of the model's fields in messages ("" = its config.json)."""
    faults: list[str] = []

    def divide(axis: str, size: int, field: str, number: int) -> None:
        if number % size:
            uses = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
            faults.append(f"{axis} = {size} does not divide {prefix}{field} = {number}; use one of {uses}")

    for field in ("num_attention_heads", "num_key_value_heads"):
        is_latent = "kv_lora_rank" in hf_config  # MLA has no key/value heads to share out
        if field in hf_config and not (is_latent and field == "num_key_value_heads"):
            divide("parallel.tp", parallel.tp, field, hf_config[field])
            divide("engine.tensor_parallel", engine.tensor_parallel, field, hf_config[field])
    if "num_hidden_layers" in hf_config:
        divide("parallel.pp", parallel.pp, "num_hidden_layers", hf_config["num_hidden_layers"])
    expert_field = next((f for f in ("n_routed_experts", "num_experts", "num_local_experts") if hf_config.get(f)), None)
    if expert_field:
        divide("parallel.ep", parallel.ep, expert_field, hf_config[expert_field])
    elif parallel.ep > 1:
        faults.append(f"parallel.ep = {parallel.ep}, but the model has no experts; use 1")
    return faults


# ---- checks between sections -----------------------------------------------------------------------------------


def _experts_fit_ranks(parallel: Parallel) -> Iterator[str]:
    p = parallel
    ranks = p.tp * p.cp * p.dp
    if ranks % (p.ep * p.etp):
        yield (
            f"parallel.ep * etp = {p.ep} * {p.etp} = {p.ep * p.etp} does not divide parallel.tp * cp * dp = {ranks}, the ranks of a stage; "
            "change ep, etp or dp"
        )


def _lengths_fit(sampling: Sampling, engine: Engine, parallel: Parallel) -> Iterator[str]:
    longest = sampling.max_trajectory_tokens
    if longest > engine.max_model_len:
        yield f"sampling.max_trajectory_tokens = {longest} is more than engine.max_model_len = {engine.max_model_len}; lower it or raise that"
    if longest > parallel.micro_batch_tokens:
        yield (
            f"sampling.max_trajectory_tokens = {longest} is more than parallel.micro_batch_tokens = {parallel.micro_batch_tokens}: "
            "a trajectory is never split; lower it or raise that"
        )
    if sampling.max_tokens_per_turn >= longest:
        yield (
            f"sampling.max_tokens_per_turn = {sampling.max_tokens_per_turn} leaves no room for a prompt in "
            f"sampling.max_trajectory_tokens = {longest}; lower it or raise that"
        )


def _arm_means_what_it_says(algo: Algo, sampling: Sampling, value: Value) -> Iterator[str]:
    sections: dict[str, Section] = {"algo": algo, "sampling": sampling, "value": value}
    for path, meant in ARMS[algo.arm].items():
        found: Any = sections
        for name in path.split("."):
            found = found[name] if isinstance(found, dict) else getattr(found, name)
        is_group_size = path == "sampling.rollouts_per_prompt" and meant > 1 and found > 1
        if found != meant and not is_group_size:
            yield f"algo.arm = {algo.arm!r} means {path} = {meant!r}, but it is {found!r}; leave {path} out or choose another arm"


_CHECKS: list[Callable[..., Iterator[str]]] = [_experts_fit_ranks, _lengths_fit, _arm_means_what_it_says]
