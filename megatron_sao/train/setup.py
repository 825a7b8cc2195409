"""What a trainer rank needs before its first step: both models from one HF folder, and its part of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_sao.config import Config
from megatron_sao.config.algo import DomainBounds
from megatron_sao.convert.family import ModelShape, read_shape
from megatron_sao.data.balance import Cost
from megatron_sao.data.batch import pack
from megatron_sao.data.share import Share, share_of
from megatron_sao.errors import DataError, ProtocolError, TrainingError
from megatron_sao.models.build import build_model
from megatron_sao.models.cost import trajectory_cost
from megatron_sao.models.groups import freeze, grouped_parameters, manifest
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.offload import Turns
from megatron_sao.models.optimizer import make_trained_model
from megatron_sao.models.weights import VALUE_HEAD, Exporter, check_names, load_weights, weight_hashes
from megatron_sao.parallel.exchange import any_rank
from megatron_sao.parallel.init import World
from megatron_sao.records import Trajectory
from megatron_sao.train.sao_step import Models
from megatron_sao.train.values import ValueReadout


@dataclass(frozen=True)
class Trainer:
    """A rank's models and its place in the world."""

    config: Config
    world: World
    models: Models
    folder: HFFolder
    shape: ModelShape
    cost: Cost  # of a trajectory, by its length
    exporter: Exporter  # of the policy
    frozen_hashes: dict[str, str]  # of the value model's frozen tensors as loaded
    manifest: str  # what each parameter group of the value model holds on this rank, and where its head comes from

    def share_of_batch(self, trajectories: Sequence[Trajectory], policy_version: int) -> Share:
        """This rank's part of a step trained by `policy_version`. Pure: every rank cuts the same batch the same way.

        Raises: DataError as `pack`, or for a domain without bounds; ProtocolError when a token is staler than
            schedule.max_staleness, which the scheduler must not let through. On every rank alike.
        """
        bounds, limit = self.config.algo.bounds, self.config.schedule.max_staleness
        batch = pack(trajectories, policy_version, lambda domain: _bounds_of(bounds, domain))
        oldest = int(batch.lag_t.max()) if batch.num_tokens else 0
        if oldest > limit:
            raise ProtocolError(
                f"the batch of version {policy_version} holds a token {oldest} versions old; schedule.max_staleness"
                f" = {limit}"
            )
        world, parallel = self.world, self.config.parallel
        return share_of(
            batch,
            world.dp,
            world.dp_size,
            parallel.micro_batch_tokens,
            multiple=parallel.tp,
            context_rank=world.cp,
            num_context_ranks=world.cp_size,
            cost=self.cost,
            micro_batch_multiple=parallel.pp if parallel.vpp > 1 else 1,
        )

    def check_frozen(self) -> int:
        """Compare the value model's frozen tensors with their state at the start, bit by bit; -> how many there are.

        Raises: TrainingError on every rank when one moved. Collective: every rank of the world.
        """
        self.models.turns.take(self.models.value)
        now = weight_hashes(self.models.value.chunks, set(self.frozen_hashes))
        moved = sorted(name for name, digest in self.frozen_hashes.items() if now[name] != digest)
        if any_rank(bool(moved)):
            where = moved[0] if moved else "a tensor of another rank"
            raise TrainingError(f"{where} is frozen (value.groups) but its bytes changed during training")
        return len(self.frozen_hashes)


def build_trainer(config: Config, folder: HFFolder, world: World) -> Trainer:
    """Both models with the folder's weights, the value model frozen where [value.groups] says so.

    Raises: CheckpointError when folder and models do not fit. Collective: every rank of the world.
    """
    shape = read_shape(folder.config)
    dtype = getattr(torch, config.model.dtype)
    readout = ValueReadout(config.value)
    turns = Turns(config.parallel.offload_sleeping_model)

    has_mtp = config.policy.mtp_loss_weight > 0
    policy = build_model("policy", folder.config, config.parallel, dtype, with_mtp=has_mtp)
    load_weights(policy, folder, shape, world)
    exporter = Exporter(policy, shape, world)
    check_names(exporter.slices_by_rank, folder, shape, with_mtp=exporter.has_mtp)
    trained_policy = make_trained_model(policy, config.policy)
    turns.take(trained_policy)
    turns.rest()  # makes room for the value model

    value = build_model("value", folder.config, config.parallel, dtype, readout.num_outputs)
    has_fresh_head = any_rank(bool(load_weights(value, folder, shape, world)))
    multipliers = freeze(value, config.value.groups)
    frozen = {
        f"{number}:{member.name}"
        for number, chunk in enumerate(value)
        for member in grouped_parameters(chunk)
        if not member.parameter.requires_grad
    }
    trained_value = make_trained_model(value, config.value, multipliers)
    turns.take(trained_value)
    return Trainer(
        config=config,
        world=world,
        models=Models(
            policy=trained_policy,
            value=trained_value,
            readout=readout,
            true_vocab=shape.vocab,
            turns=turns,
        ),
        folder=folder,
        shape=shape,
        cost=trajectory_cost(folder.config),
        exporter=exporter,
        frozen_hashes=weight_hashes(value, frozen),
        manifest=manifest(value, config.value.groups)
        + (f"\nthe head starts at zero: {folder.path} holds no {VALUE_HEAD} that fits" if has_fresh_head else ""),
    )


def _bounds_of(bounds: DomainBounds, domain: str) -> tuple[float, float]:
    if domain not in DomainBounds.model_fields:
        known = ", ".join(DomainBounds.model_fields)
        raise DataError(f"domain {domain!r} has no bounds in [algo.bounds]; known: {known}")
    pair = getattr(bounds, domain)
    return pair.eps_low, pair.eps_high
