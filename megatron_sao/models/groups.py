"""Parameter groups by the role of the module that holds them, and which of them learn.

Every parameter belongs to exactly one of `GROUPS`; the role is read from the module tree, so the same tensor lands in
the same group whether its norm is a module of its own or fused into the next linear layer. Attention means everything
that attention computes with: its input norm, q / k / v / output projections, q and k norms, the projections and norms
of MLA's latents, and the indexer. Inside an MTP layer the same roles hold; of what stands around its transformer layer,
the norms are norms, and the projection that joins hidden state and embedding is dense_mlp.
Frozen parameters get requires_grad = False before Megatron wraps the model: no gradient is computed for them, they
have no place in the gradient buckets and no optimizer state. An indexer is built frozen (models/dsa.py) and stays so.
"""

import itertools
from dataclasses import dataclass

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from megatron_sao.config.value import Groups
from megatron_sao.errors import ConfigError
from megatron_sao.parallel.exchange import gather_objects

GROUPS = tuple(Groups.model_fields)


@dataclass(frozen=True)
class GroupedParameter:
    """A parameter and the group whose role it has."""

    name: str
    group: str
    parameter: torch.nn.Parameter


def grouped_parameters(chunk: torch.nn.Module) -> list[GroupedParameter]:
    """Every parameter of an unwrapped chunk with its group. Raises: ConfigError for a parameter without a role."""
    group_of: dict[int, str] = {}

    def claim(module: torch.nn.Module | None, group: str) -> None:
        for parameter in module.parameters() if isinstance(module, torch.nn.Module) else ():
            group_of.setdefault(id(parameter), group)

    for module in chunk.modules():
        if isinstance(module, BaseTransformerLayer):
            claim_layer(module, claim)
        if isinstance(module, MultiTokenPredictionLayer):
            for name in ("enorm", "hnorm", "final_layernorm"):
                claim(getattr(module, name), "norms")
            claim(module.eh_proj, "dense_mlp")
    claim(getattr(chunk, "embedding", None), "embeddings")
    claim(getattr(getattr(chunk, "decoder", None), "final_layernorm", None), "norms")
    claim(getattr(chunk, "output_layer", None), "head")
    found = []
    for name, parameter in chunk.named_parameters():
        if id(parameter) not in group_of:
            raise ConfigError(f"parameter {name} has no role: teach models/groups.py which group it belongs to")
        found.append(GroupedParameter(name, group_of[id(parameter)], parameter))
    return found


def claim_layer(layer: torch.nn.Module, claim) -> None:
    """Give the parameters of one decoder layer to their groups; `claim(module, group)` keeps the first claim."""
    claim(getattr(layer, "input_layernorm", None), "attention")
    claim(getattr(layer, "self_attention", None), "attention")
    claim(getattr(layer, "pre_mlp_layernorm", None), "norms")
    mlp = layer.mlp
    for part in mlp.modules():
        # transformer-engine fuses the norm before a dense MLP
        fused_norm = [getattr(part, name, None) for name in ("layer_norm_weight", "layer_norm_bias")]
        claim(torch.nn.ParameterList(parameter for parameter in fused_norm if parameter is not None), "norms")
        if isinstance(part, Router):
            claim(part, "router")
    claim(getattr(mlp, "shared_experts", None), "shared_experts")
    claim(getattr(mlp, "experts", None), "experts")
    claim(mlp, "dense_mlp")


def freeze(chunks: list[MegatronModule], groups: Groups) -> dict[str, float]:
    """Set requires_grad by group; call it before the model is wrapped for data parallelism.

    Returns: group -> learning-rate multiplier of the trained groups that hold something anywhere.
    Raises: ConfigError when a group that the configuration sets to other than its default holds no parameter on any
        rank. (A default for shared experts is no fault of a model that has none.)
    Collective: every rank of the world (a group may live on another pipeline stage).
    """
    members = [p for chunk in chunks for p in grouped_parameters(chunk)]
    somewhere = set().union(*gather_objects({p.group for p in members}))
    defaults = Groups()
    named = [g for g in GROUPS if g not in somewhere and getattr(groups, g) != getattr(defaults, g)]
    if named:
        raise ConfigError(
            f"value.groups.{named[0]} matches no parameter of this model; groups it has: {', '.join(sorted(somewhere))}"
        )
    mark_trained(chunks, groups)
    return {g: getattr(groups, g).lr_multiplier for g in GROUPS if g in somewhere and getattr(groups, g).trained}


def mark_trained(chunks: list[MegatronModule], groups: Groups) -> None:
    """Freeze the parameters of groups that are not trained, and note the group on each. No collective; `freeze` checks.

    What was built frozen (an indexer: no gradient reaches it) stays so, whatever its group.
    """
    for member in (p for chunk in chunks for p in grouped_parameters(chunk)):
        if not getattr(groups, member.group).trained:
            member.parameter.requires_grad = False
        member.parameter.sao_group = member.group


def manifest(chunks: list[MegatronModule], groups: Groups) -> str:
    """A table of what each group of this rank holds: frozen or trained, tensors, parameters, one example.

    A trained group has a second row for what of it was built frozen.
    """
    rows = [f"{'group':<15}{'state':<9}{'lr x':>6}{'tensors':>9}{'parameters':>14}  example"]
    members = [p for chunk in chunks for p in grouped_parameters(chunk)]
    for group, is_trained in itertools.product(GROUPS, (True, False)):
        learns = getattr(groups, group).trained
        held = [p for p in members if p.group == group and (learns and p.parameter.requires_grad) is is_trained]
        if held:
            count = sum(p.parameter.numel() for p in held)
            state, rate = ("trained", f"{getattr(groups, group).lr_multiplier:g}") if is_trained else ("frozen", "-")
            rows.append(f"{group:<15}{state:<9}{rate:>6}{len(held):>9}{count:>14,}  {held[0].name}")
    return "\n".join(rows)
