"""Which part of each HF tensor a worker of an engine loads: a small table of name patterns, one row per role.

Owns: `EngineLayout`, `engine_layout`, `Parts`, `parts_of`. Every engine of a run has the same layout, so a worker is known by its
*kind*: its number within its engine, which is its tensor-parallel rank. Invariants:
- a tensor that no row of the table fits, or whose rows do not divide, is loaded whole by every kind: right, but slower;
- a row that claims too little cannot stay unseen: the receiver poisons what a worker did not get, and the plugin
  refuses a module that holds poison after loading.
No torch: the planner of a large run imports this.
Source: the parallel layers and expert placement of vLLM 0.32 (linear.py, vocab_parallel_embedding.py,
expert_map_manager.py).
"""

import re
from dataclasses import dataclass

import msgspec

from megatron_sao.config import Config
from megatron_sao.convert.family import ModelShape

WHOLE = -1  # a dim that stands for the whole tensor, which then counts as one row
VOCABULARY_MULTIPLE = 64  # vLLM pads a vocabulary to a multiple of this before it cuts it over the workers


class EngineLayout(msgspec.Struct, frozen=True, array_like=True):
    """How the workers of one engine share a model."""

    num_workers: int = 1  # tensor-parallel size
    num_kv_heads: int = 0  # of the model; 0 = unknown, then every worker gets all of them
    num_experts: int = 0  # routed experts of a layer; needed only where workers own experts
    expert_parallel: bool = False  # a worker owns whole experts instead of a cut of each


def engine_layout(config: Config, shape: ModelShape) -> EngineLayout:
    """How the workers of one engine share the policy."""
    return EngineLayout(
        num_workers=config.engine.tensor_parallel,
        num_kv_heads=0 if shape.mla else shape.num_kv_groups,
        num_experts=shape.num_experts,
    )


@dataclass(frozen=True)
class Parts:
    """Rows [start, end) along `dim` that each kind loads; they may overlap (heads that several workers hold)."""

    dim: int  # or WHOLE: a kind loads the tensor, (0, 1), or nothing of it, (0, 0)
    rows: tuple[tuple[int, int], ...]  # by kind


_LAYER = r"(?:.*\.)?layers\.\d+\."
_EXPERT = re.compile(_LAYER + r"mlp\.experts\.(\d+)\.(?:gate|up|down)_proj\.weight")
_SHARED_EXPERT = re.compile(_LAYER + r"mlp\.shared_experts?\.")
_VOCABULARY = re.compile(r"(?:model\.)?embed_tokens\.weight|lm_head\.weight")
_KV = re.compile(_LAYER + r"self_attn\.[kv]_proj\.(?:weight|bias)")
_COLUMN = re.compile(
    _LAYER + r"(?:self_attn\.(?:q|q_b|kv_b)_proj|mlp\.(?:experts\.\d+\.|shared_experts\.)?(?:gate|up)_proj)"
    r"\.(?:weight|bias)"
)
_ROW = re.compile(_LAYER + r"(?:self_attn\.o_proj|mlp\.(?:experts\.\d+\.|shared_experts\.)?down_proj)\.weight")


def parts_of(name: str, full_shape: tuple[int, ...], layout: EngineLayout) -> Parts | None:
    """What each kind loads of the HF tensor `name`.

    Returns: None = all of it, every kind.
    """
    workers = layout.num_workers
    if workers == 1:
        return None
    if layout.expert_parallel:
        if expert := _EXPERT.fullmatch(name):
            return _owned(int(expert[1]), layout)
        if _SHARED_EXPERT.match(name):
            return None  # whether they are cut depends on how vLLM exchanges tokens
    if _VOCABULARY.fullmatch(name):
        return _vocabulary(full_shape[0], workers)
    if _KV.fullmatch(name):
        return _kv_heads(full_shape[0], layout)
    if _COLUMN.fullmatch(name):
        return _even(0, full_shape[0], workers)
    if _ROW.fullmatch(name):
        return _even(1, full_shape[1], workers)
    return None


def _even(dim: int, size: int, workers: int) -> Parts | None:
    if size % workers:
        return None
    share = size // workers
    return Parts(dim, tuple((kind * share, (kind + 1) * share) for kind in range(workers)))


def _vocabulary(size: int, workers: int) -> Parts | None:
    padded = -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if padded % workers:
        return None
    share = padded // workers  # the last workers may hold padding only
    return Parts(0, tuple((min(kind * share, size), min((kind + 1) * share, size)) for kind in range(workers)))


def _kv_heads(size: int, layout: EngineLayout) -> Parts | None:
    heads, workers = layout.num_kv_heads, layout.num_workers
    if not heads or size % heads:
        return None
    if heads >= workers:
        return _even(0, size, workers) if heads % workers == 0 else None
    if workers % heads:
        return None
    head_rows, copies = size // heads, workers // heads  # several workers hold the same head
    return Parts(0, tuple((kind // copies * head_rows, (kind // copies + 1) * head_rows) for kind in range(workers)))


def _owned(expert: int, layout: EngineLayout) -> Parts | None:
    share, more = divmod(layout.num_experts, layout.num_workers)
    if not share or expert >= layout.num_experts:
        return None
    kinds = range(layout.num_workers)
    starts = [kind * share + min(kind, more) for kind in [*kinds, layout.num_workers]]  # the first `more` own one more
    return Parts(WHOLE, tuple((0, int(starts[kind] <= expert < starts[kind + 1])) for kind in kinds))
