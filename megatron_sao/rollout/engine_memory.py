"""What one worker of an engine keeps on its GPU, from shapes alone: weights, key/value cache, and what a push takes.

A push takes two buckets, and for the one module that is being put together (the experts of a layer, mostly) its tensors
as they arrived, each at its full HF shape whatever the worker's share of it, and the worker's share of them before it
is quantised: vLLM 0.32's layerwise reload keeps a module's tensors until the last one is there.

Not counted: activations, CUDA graphs, the context (a reserve of the plan), scales of FP8 matrices (below 0.2%), and
the up-projections that vLLM's MLA keeps a second time. Source of the cache's layout: vLLM 0.32, kv_cache_interface.py
and DeepseekV32IndexerCache. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from megatron_sao.config import Config
from megatron_sao.convert.expected import expected_tensors
from megatron_sao.convert.family import ModelShape, read_shape
from megatron_sao.transport.engine_layout import WHOLE, EngineLayout, engine_layout, parts_of
from megatron_sao.transport.plan import DTYPE_BYTES

INDEX_BLOCK = 128  # the indexer's keys are FP8 with one fp32 scale for so many numbers


@dataclass(frozen=True)
class WorkerMemory:
    """One worker, the fullest of an engine; bytes."""

    weights: int
    cache: int
    buckets: int  # two of a push
    module: int  # that a push puts together, the largest
    token_bytes: int  # of the cache

    @property
    def total(self) -> int:
        """While it takes a push, with all requests waiting."""
        return self.weights + self.cache + self.buckets + self.module

    @property
    def cache_tokens(self) -> int:
        """How many tokens the cache holds, of all requests together."""
        return self.cache // self.token_bytes


def worker_memory(config: Config, hf_config: dict[str, Any]) -> WorkerMemory:
    """What a worker of [engine] keeps of such a model. MTP layers are not loaded by an engine."""
    engine, shape = config.engine, read_shape(hf_config)
    layout, itemsize = engine_layout(config, shape), DTYPE_BYTES[engine.dtype]
    quantized = None if engine.quantization == "none" else 1
    tensors = expected_tensors(hf_config)
    return WorkerMemory(
        weights=max(_weights(tensors, layout, itemsize, quantized)),
        cache=engine.kv_cache_bytes,
        buckets=2 * config.push.bucket_bytes,
        module=_largest_module(tensors, layout, itemsize),
        token_bytes=max(
            _token_bytes(shape, range(*layers), engine.tensor_parallel, itemsize)
            for layers in pairwise(layout.stage_starts)
        ),
    )


def _weights(
    tensors: Mapping[str, tuple[int, ...]], layout: EngineLayout, itemsize: int, quantized: int | None
) -> list[int]:
    """Bytes of each kind of worker."""
    totals = [0] * layout.num_workers
    for name, size in tensors.items():
        each = quantized if quantized and _is_quantized(name, size) else itemsize
        for kind, share in enumerate(_shares(name, size, layout)):
            totals[kind] += share * each
    return totals


def _largest_module(tensors: Mapping[str, tuple[int, ...]], layout: EngineLayout, itemsize: int) -> int:
    """Bytes that the worker with the largest one needs while it is put together."""
    found: dict[tuple[str, int], int] = {}
    for name, size in tensors.items():
        module = name.partition(".experts.")[0]  # all experts of a layer, or a tensor of its own
        for kind, share in enumerate(_shares(name, size, layout)):
            if share:
                found[module, kind] = found.get((module, kind), 0) + (prod(size) + share) * itemsize
    return max(found.values())


def _shares(name: str, size: tuple[int, ...], layout: EngineLayout) -> list[int]:
    """How many numbers of a tensor each kind of worker keeps."""
    parts = parts_of(name, size, layout)
    if parts is None:
        return [prod(size)] * layout.num_workers
    rows = 1 if parts.dim == WHOLE else size[parts.dim]
    return [prod(size) * (end - start) // rows for start, end in parts.rows]


def _is_quantized(name: str, size: tuple[int, ...]) -> bool:
    """vLLM quantises the matrices of attention, MLPs and experts; not the embeddings, the head and the router."""
    return len(size) > 1 and name.startswith("model.layers.") and not name.endswith("mlp.gate.weight")


def _token_bytes(shape: ModelShape, layers: range, workers: int, itemsize: int) -> int:
    """Of the cache, for one token of one worker of a stage."""
    if not shape.mla:
        heads = -(-shape.num_kv_groups // workers)
        return len(layers) * 2 * heads * shape.head_dim * itemsize
    latent = len(layers) * (shape.mla.kv_rank + shape.mla.rope_dim) * itemsize  # whole on every worker
    if not shape.indexer:
        return latent
    keys = shape.indexer.head_dim + 4 * (shape.indexer.head_dim // INDEX_BLOCK)
    return latent + sum(map(shape.has_indexer, layers)) * keys
