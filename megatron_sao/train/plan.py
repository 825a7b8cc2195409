"""A run of any size seen from one process: what each rank holds, keeps and sends, without a GPU and without weights.

Ranks of one pipeline stage hold equal shapes (every split is even), so one rank of each stage speaks for all of it:
policy and value model are built on the meta device, in a fake world of the real size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, get_args

import torch

from megatron_sao.config import Config
from megatron_sao.config.stages import layers_per_stage, stage_chunks
from megatron_sao.convert.expected import expected_tensors
from megatron_sao.convert.family import ModelShape, read_shape
from megatron_sao.models.build import Role, build_model
from megatron_sao.models.groups import GROUPS, mark_trained
from megatron_sao.models.plan_activations import (
    Activations,
    Kept,
    Work,
    layer_kept,
    stage_activations,
    unfused_score_bytes,
)
from megatron_sao.models.plan_state import DataCopies, StateBytes, elements_by_name, state_bytes
from megatron_sao.models.plan_traffic import (
    Passes,
    StepShape,
    bubble_fraction,
    imbalance_fraction,
    stage_traffic,
    step_shape,
)
from megatron_sao.parallel.fake_world import data_axis_sizes, fake_world
from megatron_sao.train.values import ValueReadout

ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class ModelPlan:
    """One model on one rank; bytes."""

    state: StateBytes
    activations: Activations
    traffic: dict[str, float]

    @property
    def awake(self) -> int:
        """On the device while this model is at work and alone."""
        return self.state.total + self.activations.total

    @property
    def asleep(self) -> int:
        """In host memory under offload: weights and optimizer state; gradients are forgotten."""
        return self.state.weights + self.state.optimizer


@dataclass(frozen=True)
class StagePlan:
    """One rank of a pipeline stage, which speaks for all of them."""

    stage: int
    rank: int
    chunks: list[range]  # layers from 0
    models: dict[Role, ModelPlan]
    push_buckets: int  # bytes of the two buffers of a weight push

    def device_bytes(self, offloads: bool) -> int:
        """At the worst moment: both models resident, or only the one at work."""
        policy, value = self.models["policy"], self.models["value"]
        if offloads:
            return max(policy.awake, value.awake) + self.push_buckets
        working = max(policy.activations.total, value.activations.total)
        return policy.state.total + value.state.total + working + self.push_buckets

    @property
    def host_bytes(self) -> int:
        """Under offload; host memory is kept for both models."""
        return sum(model.asleep for model in self.models.values())


@dataclass(frozen=True)
class Plan:
    """Everything that the plan of a run says."""

    shape: ModelShape
    step: StepShape
    passes: dict[Role, Passes]
    copies: tuple[int, int]  # ranks that share the optimizer state of a dense parameter, of an expert
    stages: list[StagePlan]
    elements: dict[Role, int]  # of the whole model, copies counted once
    expected_elements: int  # of the policy, from the HF config alone
    frozen_elements: int  # of the value model
    bubble: float
    imbalance: float
    kept: dict[Role, list[Kept]]  # by the last layer, for one micro-batch
    unfused_scores: float  # bytes that one layer of sparse attention would keep besides, as it is built; 0 elsewhere

    def worst(self, offloads: bool) -> StagePlan:
        """The stage whose ranks need the most device memory."""
        return max(self.stages, key=lambda stage: stage.device_bytes(offloads))


def make_plan(
    config: Config, hf_config: dict[str, Any], mean_tokens: int, progress: Callable[[int, int], None]
) -> Plan:
    """Build every distinct rank and add up.

    Args:
        hf_config: what [parallel] has been checked against. mean_tokens: assumed length of a trajectory.
        progress: called with (stages done, stages) after each.
    Effect: none that lasts; must not run inside a world.
    """
    parallel, shape = config.parallel, read_shape(hf_config)
    per_stage = parallel.world_size // parallel.pp
    chunks = stage_chunks(shape.num_layers, parallel)
    step = step_shape(
        config.schedule.batch_trajectories,
        parallel.dp,
        mean_tokens,
        parallel.micro_batch_tokens,
        multiple=parallel.pp if parallel.vpp > 1 else 1,
    )
    with_mtp = config.policy.mtp_loss_weight > 0
    expected = sum(prod(size) for size in expected_tensors(hf_config, with_mtp=with_mtp).values())
    recomputes = parallel.recompute == "full"
    passes: dict[Role, Passes] = {
        "policy": Passes(0, 1, recomputes),
        "value": Passes(
            2 if config.algo.advantages_from == "updated_values" else 1, config.value.updates_per_step, recomputes
        ),
    }
    stages, names, kept = [], {role: {} for role in ROLES}, {}
    frozen, copies, unfused = 0, (1, 1), 0.0
    for stage in range(parallel.pp):
        rank = stage * per_stage
        models: dict[Role, ModelPlan] = {}
        with fake_world(parallel, rank) as world, torch.device("meta"):
            if world.pp != stage:
                raise AssertionError(f"rank {rank} stands on stage {world.pp}, not {stage}: the order of ranks changed")
            copies = data_axis_sizes()
            for role in ROLES:
                built = _build(role, config, hf_config)
                work = Work(
                    -(-parallel.micro_batch_tokens // parallel.cp),
                    getattr(torch, config.model.dtype).itemsize,
                    [g for g in GROUPS if role == "policy" or getattr(config.value.groups, g).trained],
                )
                vocab = -(-shape.vocab // parallel.tp) if role == "policy" else 0
                state = state_bytes(built, DataCopies(*copies))
                activations = stage_activations(
                    built[0].config,
                    chunks[stage],
                    work,
                    stage=stage,
                    num_stages=parallel.pp,
                    num_micro_batches=step.num_micro_batches,
                    recompute=parallel.recompute,
                    vocab=vocab,
                    device="gpu",
                    with_mtp=with_mtp and role == "policy",
                )
                traffic = stage_traffic(
                    built[0].config,
                    chunks[stage],
                    state,
                    stage=stage,
                    num_stages=parallel.pp,
                    step=step,
                    passes=passes[role],
                    itemsize=work.itemsize,
                    copies=copies,
                    trains_attention="attention" in work.trained,
                )
                if role == "policy":
                    # every weight travels once; slices are dealt out evenly over all ranks
                    traffic["weight push"] = expected * work.itemsize / parallel.world_size
                if shape.indexer:
                    unfused = unfused_score_bytes(built[0].config, work)
                kept[role] = layer_kept(built[0].config, shape.num_layers - 1, work)
                models[role] = ModelPlan(state, activations, traffic)
                found = elements_by_name(built, shape, world)
                names[role] |= found
                if role == "value":
                    trained = elements_by_name(built, shape, world, only_trained=True)
                    frozen += sum(found.values()) - sum(trained.values())
        stages.append(StagePlan(stage, rank, chunks[stage], models, 2 * config.push.bucket_bytes))
        progress(stage + 1, parallel.pp)
    return Plan(
        shape=shape,
        step=step,
        passes=passes,
        copies=copies,
        stages=stages,
        elements={role: sum(found.values()) for role, found in names.items()},
        expected_elements=expected,
        frozen_elements=frozen,
        bubble=bubble_fraction(parallel.pp, parallel.vpp, step.num_micro_batches),
        imbalance=imbalance_fraction(layers_per_stage(shape.num_layers, parallel)),
        kept=kept,
        unfused_scores=unfused,
    )


def _build(role: Role, config: Config, hf_config: dict[str, Any]) -> list[torch.nn.Module]:
    """The chunks of the current (fake) rank, frozen as the trainer would freeze them."""
    dtype = getattr(torch, config.model.dtype)
    if role == "policy":
        return build_model("policy", hf_config, config.parallel, dtype, with_mtp=config.policy.mtp_loss_weight > 0)
    chunks = build_model("value", hf_config, config.parallel, dtype, ValueReadout(config.value).num_outputs)
    mark_trained(chunks, config.value.groups)
    return chunks
