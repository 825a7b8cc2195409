"""A model with its Adam and its schedule as a distributed checkpoint, saved from one layout and loaded into any other.

Besides the weights (models/checkpoint.py) it holds, for every trained parameter, three float32 tensors of its shape:

    optimizer.state.param.NAME        what Adam updates: the master copy of a bfloat16 weight, or the weight again
    optimizer.state.exp_avg.NAME      Adam's moments; zero before the first update
    optimizer.state.exp_avg_sq.NAME

and two counters: updates that Adam has done, steps of the schedule. Learning rates, decay and which parameters share
a group follow from the configuration alone, so they are not stored.

This is the "fully_reshardable" form of megatron-core 0.19, whose own functions are not used: they copy all state into
float32 buffers of the size of the model (on the GPU for the gather, in host memory for the rest), and what they store
of parameter groups fits only a model with as many optimizers (experts have one of their own where they are cut
differently), so that tp 2 x ep 2 would not load into one process.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

from megatron_sao.convert.family import ModelShape
from megatron_sao.models.checkpoint import Shards, StoredWeights, built, weight_shards
from megatron_sao.models.optimizer import TrainedModel
from megatron_sao.parallel.exchange import ObjectGroup, whole_from_pieces

MOMENTS = ("exp_avg", "exp_avg_sq")


def state_shards(
    model: TrainedModel, shape: ModelShape, world: ObjectGroup, *, copied: bool = False
) -> tuple[dict[str, Any], dict[str, int]]:
    """What to write of an awake model: (what this rank writes of it, its counters).

    State that several ranks share is put together in host memory, on the rank that writes it.

    Args:
        copied: take a copy of everything, into host memory, that stays what it is while the model learns; otherwise the
            tensors are the model's own wherever that will do.
    Effect: Adam gets the moments it has not made yet. Collective: every rank of the world.
    """
    weights = _weights(model, shape)
    by_parameter = _by_parameter(weights)

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", copy=True) if copied else tensor

    shards: dict[str, Any] = {
        key: _with_data(shard, shard.key, kept(shard.data)) for key, shard in weights.items() if _writes(shard)
    }
    for part in _parts(model):
        shard = by_parameter[id(part.parameter)]
        for name, piece in part.named_pieces():
            if part.group.size() == 1:
                tensor = kept(piece) if _writes(shard) else None
            else:
                whole = whole_from_pieces(piece, part.start, part.parameter.numel(), part.group)
                tensor = whole.cpu() if _writes(shard) else None
            if tensor is not None:
                key = _key(name, shard)
                shards[key] = _with_data(shard, key, tensor.view(part.parameter.shape))
    updates = max(world.gather(_updates(model)))  # a rank that trains nothing counts none
    return shards, {"updates": updates, "schedule_steps": model.schedule.num_steps}


def load_state(model: TrainedModel, shape: ModelShape, folder: str | Path) -> dict[str, Any]:
    """Fill an awake model from a checkpoint of any layout, each rank reading its part. No collective.

    Returns: the checkpoint's common facts.
    Raises: CheckpointError naming tensor, expected and found shape.
    """
    stored = StoredWeights(folder)
    shards: dict[str, Any] = _weights(model, shape)
    by_parameter = _by_parameter(shards)
    copies: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # (piece to fill, whole tensor as read, where it starts)
    for part in _parts(model):
        shard = by_parameter[id(part.parameter)]
        for name, piece in part.named_pieces():
            if piece is None:
                continue
            tensor = piece
            if len(piece) < part.parameter.numel():
                tensor = torch.empty(part.parameter.numel(), dtype=torch.float32)
                copies.append((piece, tensor, part.start))
            key = _key(name, shard)
            shards[key] = _with_data(shard, key, tensor.view(part.parameter.shape))
    flat = {str(number): shard for number, shard in enumerate(built(shards.values()))}
    stored.check(flat, shape.vocab)
    TorchDistLoadShardedStrategy().load(flat, stored.path)  # fills the tensors in place
    with torch.no_grad():
        for piece, whole, start in copies:
            piece.copy_(whole[start : start + len(piece)])
    for adam in model.optimizers():
        for group in adam.param_groups:
            group.pop("step", None)
            if stored.common["updates"]:
                group["step"] = stored.common["updates"]
    model.schedule.num_steps = stored.common["schedule_steps"]
    model.schedule.step(0)
    return stored.common


@dataclass(frozen=True)
class _Part:
    """A trained parameter and the piece of its optimizer state that this rank keeps."""

    parameter: torch.nn.Parameter  # of the model: whole, but for what other axes than the data axis cut
    group: Any  # the ranks that share its state
    start: int  # of the piece, in elements of the flat parameter
    pieces: dict[str, torch.Tensor]  # "param" and the moments: float32 [length]; empty = this rank keeps none

    def named_pieces(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name in ("param", *MOMENTS):
            yield name, self.pieces.get(name)


def _parts(model: TrainedModel) -> Iterator[_Part]:
    """All trained parameters of this rank's chunks, in an order that is the same on the ranks that share them."""
    for optimizer in model.optimizer.chained_optimizers:
        if optimizer.is_stub_optimizer:
            continue
        for buffer, ranges in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
            kept = {p: r["param"] for buckets in ranges.values() for b in buckets for p, r in b["param_map"].items()}
            for parameter in buffer.param_index_map:
                pieces, start = {}, 0
                if parameter in kept:
                    start = kept[parameter].start
                    group, place = optimizer.model_param_group_index_map[parameter]
                    main = optimizer.optimizer.param_groups[group]["params"][place]
                    pieces = {"param": main.detach().view(-1), **_moments(optimizer.optimizer, main)}
                yield _Part(parameter, optimizer.data_parallel_group, start, pieces)


def _moments(adam: torch.optim.Optimizer, main: torch.Tensor) -> dict[str, torch.Tensor]:
    state = adam.state[main]
    for name in MOMENTS:
        if name not in state:
            state[name] = torch.zeros_like(main)
    return {name: state[name].view(-1) for name in MOMENTS}


def _updates(model: TrainedModel) -> int:
    groups = [group for adam in model.optimizers() for group in adam.param_groups if group["params"]]
    return max((int(group.get("step", 0)) for group in groups), default=0)


def _weights(model: TrainedModel, shape: ModelShape) -> Shards:
    return {
        f"{number}:{name}": shard
        for number, chunk in enumerate(model.chunks)
        for name, shard in weight_shards(chunk, shape).items()
    }


def _by_parameter(shards: Shards) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    return {id(shard.data): shard for shard in shards.values()}


def _writes(shard: ShardedTensor | ShardedTensorFactory) -> bool:
    """Of several ranks that hold the same, one writes it."""
    return is_main_replica(shard.replica_id)


def _key(name: str, shard: ShardedTensor | ShardedTensorFactory) -> str:
    return f"optimizer.state.{name}.{shard.key}"


def _with_data(
    shard: ShardedTensor | ShardedTensorFactory, key: str, data: torch.Tensor
) -> ShardedTensor | ShardedTensorFactory:
    if isinstance(shard, ShardedTensorFactory):
        return replace(shard, key=key, data=data)
    return replace(shard, key=key, data=data, dtype=data.dtype)
