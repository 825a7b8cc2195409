"""What a model keeps in memory from step to step on one rank: weights, gradients, optimizer state. Exact.

The chunks may be on the meta device: only shapes are read. Trained parameters lie in buffers, one per number format
and per kind (dense, expert), in which Megatron starts every parameter at a multiple of 64 elements and rounds the end
to a multiple of 128 and of the data-parallel ranks; its own function lays them out here as well.
  weights    = buffers in the parameters' format + frozen parameters + buffers of modules (router biases)
  gradients  = the same buffers in fp32; frozen parameters have none
  optimizer  = of each buffer the part that one data-parallel rank owns, padding left out: exp_avg and exp_avg_sq in
               fp32, and an fp32 master copy where the parameters themselves are not fp32
Dense parameters are cut over dp * cp ranks, experts over `parallel.expert_dp` ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import MegatronModule

from megatron_sao.convert.family import ModelShape
from megatron_sao.convert.names import expert_number, lookup
from megatron_sao.models.optimizer import data_parallel_config
from megatron_sao.models.value_head import ValueHead
from megatron_sao.models.weights import describe, model_tensors
from megatron_sao.parallel.init import World

FP32_BYTES = 4


@dataclass(frozen=True)
class StateBytes:
    """One model on one rank; all sizes in bytes."""

    num_parameters: int
    num_trained: int
    weights: int
    gradients: int
    optimizer: int
    dense_buffer: int  # elements, padding included, that data-parallel collectives move
    expert_buffer: int

    @property
    def total(self) -> int:
        """While the model is awake on its device."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class DataCopies:
    """How many ranks share the optimizer state of a parameter, and which of them is asked about."""

    dense: int
    expert: int
    dense_rank: int | None = None  # None = the rank with the largest part
    expert_rank: int | None = None


def state_bytes(chunks: list[MegatronModule], copies: DataCopies) -> StateBytes:
    """The model of one rank; what is frozen has requires_grad = False already. No collective."""
    weights = gradients = optimizer = num_parameters = num_trained = 0
    buffers = {False: 0, True: 0}
    for chunk in chunks:
        parameters = list(chunk.parameters())
        trained = [p for p in parameters if p.requires_grad]
        num_parameters += sum(p.numel() for p in parameters)
        num_trained += sum(p.numel() for p in trained)
        weights += sum(_bytes(p) for p in parameters if not p.requires_grad)
        weights += sum(_bytes(b) for b in chunk.buffers())
        layouts = DistributedOptimizer.compute_full_param_layout(
            trained, None, copies.dense, data_parallel_config(), expert_data_parallel_world_size=copies.expert
        ).layouts
        for key, layout in layouts.items():
            shards, rank = (
                (copies.expert, copies.expert_rank)
                if key.is_expert_parallel
                else (copies.dense, copies.dense_rank)
            )
            numel = layout.bucket_indices[-1][1]
            buffers[key.is_expert_parallel] += numel
            weights += numel * key.param_dtype.itemsize
            gradients += numel * FP32_BYTES
            spans = [(start, end) for start, end, _ in layout.param_index_map.values()]
            of_rank = [shard_elements(spans, layout.bucket_indices, shards, r) for r in range(shards)]
            has_master = key.param_dtype is not torch.float32
            owned = max(of_rank) if rank is None else of_rank[rank]
            optimizer += owned * FP32_BYTES * (3 if has_master else 2)
    return StateBytes(num_parameters, num_trained, weights, gradients, optimizer, buffers[False], buffers[True])


def shard_elements(
    spans: Iterable[tuple[int, int]], buckets: Iterable[tuple[int, int]], shards: int, shard: int
) -> int:
    """Elements of parameters in the parts that one rank owns: the `shard`-th of `shards` equal parts of each bucket.

    Args: spans, buckets: [start, end) in the buffer; what is in a bucket but in no span is padding.
    """
    parts = []
    for start, end in buckets:
        size = (end - start) // shards
        parts.append((start + shard * size, start + (shard + 1) * size))
    return sum(max(0, min(end, high) - max(start, low)) for start, end in spans for low, high in parts)


def elements_by_name(
    chunks: list[MegatronModule], shape: ModelShape, world: World, *, only_trained: bool = False
) -> dict[tuple[str, ...], int]:
    """Elements of each weight over all ranks of its stage, copies counted once, padded vocabulary left out.

    Keys are HF names, so that a weight which two stages hold (a tied or an MTP embedding) meets itself in a sum over
    stages; experts count for all expert-parallel ranks under the names of the first one's.
    """
    found, tensors = {}, model_tensors(chunks)
    for tensor in describe(chunks):
        if only_trained and not tensors[tensor.key].requires_grad:
            continue
        is_expert = expert_number(tensor.name) is not None
        if _is_value_head(chunks, tensor.name):
            names, count = ("value_head",), _product(tensor.shape)
        elif shape.is_tied and tensor.name == "output_layer.weight":
            continue
        else:
            names, count = lookup(tensor.name, shape).hf, _product(tensor.shape)
            if tensor.split_dim >= 0:
                count *= world.etp_size if is_expert else world.tp_size
            if is_expert:
                count *= world.ep_size
            if names in (("model.embed_tokens.weight",), ("lm_head.weight",)):
                count = min(count, shape.vocab * shape.hidden)
        found[names] = count
    return found


def _is_value_head(chunks: list[MegatronModule], name: str) -> bool:
    return name == "output_layer.weight" and isinstance(getattr(chunks[-1], "output_layer", None), ValueHead)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
