"""Which part of each HF tensor a worker of an engine loads: a small table of name patterns, one row per role.

Owns: `EngineLayout`, `engine_layout`, `Parts`, `parts_of`. Every engine of a run has the same layout, so a worker is
known by its *kind*: its number within its engine, replica by replica, stage by stage, tensor-parallel rank by rank, as
vLLM counts.
Invariants:
- a tensor that no row of the table fits, or whose rows do not divide, is sent whole to every kind of its stage: right,
  but slower;
- a row that claims too little cannot stay unseen: the receiver poisons what a worker did not get, and the plugin
  refuses a module that holds poison after loading, or that got nothing.
No torch: the planner of a large run imports this.
Source: the parallel layers, expert placement, stages and models of vLLM 0.32 (linear.py, vocab_parallel_embedding.py,
expert_map_manager.py, distributed/utils.py, models/). Tested against the models themselves
(tests/transport/test_layout_against_vllm.py).
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

    tensor_parallel: int = 1
    pipeline_parallel: int = 1  # stages
    data_parallel: int = 1  # replicas of all but the routed experts
    expert_parallel: bool = False  # a worker owns whole experts instead of a cut of each
    num_kv_heads: int = 0  # of the model; 0 = unknown, then every worker gets all of them
    num_experts: int = 0  # routed experts of a layer; needed only where workers own experts
    num_layers: int = 0  # of the decoder; needed only where there are stages
    is_tied: bool = False  # the output layer is the embedding, and the last stage has one, too
    has_ends_everywhere: bool = False  # every stage holds embedding, last norm and output layer

    @property
    def num_workers(self) -> int:
        """Of one engine."""
        return self.data_parallel * self.pipeline_parallel * self.tensor_parallel

    @property
    def stage_starts(self) -> list[int]:
        """The first layer of each stage, and the number of layers: what does not divide goes to the middle stages."""
        share, rest = divmod(self.num_layers, self.pipeline_parallel)
        sizes = [share] * self.pipeline_parallel
        for stage in range(2, rest + 2):
            sizes[-stage] += 1
        return [sum(sizes[:stage]) for stage in range(self.pipeline_parallel + 1)]

    def stages_of(self, name: str) -> list[int]:
        """The stages whose workers load the HF tensor `name`."""
        everywhere = list(range(self.pipeline_parallel))
        if found := _LAYER_NUMBER.match(name):
            starts, layer = self.stage_starts, int(found[1])
            return [s for s in everywhere if starts[s] <= layer < starts[s + 1]] or everywhere
        if self.has_ends_everywhere:
            return everywhere
        if _EMBEDDING.fullmatch(name):
            return sorted({0, everywhere[-1]}) if self.is_tied else [0]
        return everywhere[-1:] if _AFTER_LAYERS.fullmatch(name) else everywhere


def engine_layout(config: Config, shape: ModelShape) -> EngineLayout:
    """How the workers of one engine share the policy."""
    engine = config.engine
    return EngineLayout(
        tensor_parallel=engine.tensor_parallel,
        pipeline_parallel=engine.pipeline_parallel,
        data_parallel=engine.data_parallel,
        expert_parallel=engine.expert_parallel,
        num_kv_heads=0 if shape.mla else shape.num_kv_groups,
        num_experts=shape.num_experts,
        num_layers=shape.num_layers,
        is_tied=shape.is_tied,
        has_ends_everywhere=shape.family == "qwen3_moe",  # as vLLM 0.32 builds it
    )


@dataclass(frozen=True)
class Parts:
    """Rows [start, end) along `dim` that each kind loads; they may overlap (heads that several workers hold)."""

    dim: int  # or WHOLE: a kind loads the tensor, (0, 1), or nothing of it, (0, 0)
    rows: tuple[tuple[int, int], ...]  # by kind


_LAYER_NUMBER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")
_LAYER = r"(?:.*\.)?layers\.\d+\."
_EXPERT = re.compile(_LAYER + r"mlp\.experts\.(\d+)\.(?:gate|up|down)_proj\.weight")
_SHARED_EXPERT = re.compile(_LAYER + r"mlp\.shared_experts?\.")
_EMBEDDING = re.compile(r"(?:model\.)?embed_tokens\.weight")
_AFTER_LAYERS = re.compile(r"(?:model\.)?norm\.weight|lm_head\.weight")
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
    if layout.num_workers == 1:
        return None
    expert = _EXPERT.fullmatch(name) if layout.expert_parallel else None
    owner = None if expert is None else _owner(int(expert[1]), layout)
    cut = None if expert else _cut(name, full_shape, layout)
    stages = layout.stages_of(name)
    if owner is None and cut is None and len(stages) == layout.pipeline_parallel:
        return None
    rows = []
    for kind in range(layout.num_workers):
        replica, rank_there = divmod(kind, layout.pipeline_parallel * layout.tensor_parallel)
        stage, tensor_rank = divmod(rank_there, layout.tensor_parallel)
        is_loaded = stage in stages and owner in (None, replica * layout.tensor_parallel + tensor_rank)
        if not is_loaded:
            rows.append((0, 0))
        else:
            rows.append((0, 1) if cut is None else cut.rows[tensor_rank])
    return Parts(WHOLE if cut is None else cut.dim, tuple(rows))


def _cut(name: str, full_shape: tuple[int, ...], layout: EngineLayout) -> Parts | None:
    """What each tensor-parallel rank of a stage that loads the tensor loads of it; None = all."""
    size = layout.tensor_parallel
    if size == 1:
        return None
    if _SHARED_EXPERT.match(name) and layout.expert_parallel and layout.data_parallel > 1:
        return None  # vLLM cuts the tokens instead, in some of the models
    if _VOCABULARY.fullmatch(name):
        return _vocabulary(full_shape[0], size)
    if _KV.fullmatch(name):
        return _kv_heads(full_shape[0], layout)
    if _COLUMN.fullmatch(name):
        return _even(0, full_shape[0], size)
    if _ROW.fullmatch(name):
        return _even(1, full_shape[1], size)
    return None


def _even(dim: int, size: int, ranks: int) -> Parts | None:
    if size % ranks:
        return None
    share = size // ranks
    return Parts(dim, tuple((rank * share, (rank + 1) * share) for rank in range(ranks)))


def _vocabulary(size: int, ranks: int) -> Parts | None:
    padded = -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if padded % ranks:
        return None
    share = padded // ranks  # the last ranks may hold padding only
    return Parts(0, tuple((min(rank * share, size), min((rank + 1) * share, size)) for rank in range(ranks)))


def _kv_heads(size: int, layout: EngineLayout) -> Parts | None:
    heads, ranks = layout.num_kv_heads, layout.tensor_parallel
    if not heads or size % heads:
        return None
    if heads >= ranks:
        return _even(0, size, ranks) if heads % ranks == 0 else None
    if ranks % heads:
        return None
    head_rows, copies = size // heads, ranks // heads  # several workers hold the same head
    return Parts(0, tuple((rank // copies * head_rows, (rank // copies + 1) * head_rows) for rank in range(ranks)))


def _owner(expert: int, layout: EngineLayout) -> int | None:
    """The rank among those that share a layer's experts; None = unknown, then each gets it."""
    ranks = layout.data_parallel * layout.tensor_parallel
    share, more = divmod(layout.num_experts, ranks)
    if not share or expert >= layout.num_experts:
        return None
    if expert < more * (share + 1):  # the first `more` ranks own one more
        return expert // (share + 1)
    return more + (expert - more * (share + 1)) // share
