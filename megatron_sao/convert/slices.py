"""A local Megatron tensor as slices of HF tensors: pure arithmetic on shapes, the base of load, push and export.

A `WeightSlice` says "rows (or columns) [start, start + length) of HF tensor `hf_name` stand in my local tensor at
`source_start`". Reading and writing go through `slice_view`, a view: no copy, no collective.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_sao.convert.family import ModelShape
from megatron_sao.convert.names import HFNames, expert_number, lookup, with_expert_offset
from megatron_sao.errors import CheckpointError


@dataclass(frozen=True)
class LocalTensor:
    """One parameter or persistent buffer of a rank."""

    key: str  # "0:decoder.layers.0..." chunk number and name in that chunk's state dict
    name: str  # the name with the global layer number; the expert number is still local
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16"
    split_dim: int  # dim cut over the (expert) tensor axis; -1 = whole on every rank


@dataclass(frozen=True)
class TensorRanks:
    """Where a rank stands on the axes that cut weights."""

    tp: int
    tp_size: int
    ep: int
    ep_size: int
    etp: int
    etp_size: int


@dataclass(frozen=True)
class WeightSlice:
    """Rows (or columns) of a HF tensor and where they stand in a local one; see above."""

    hf_name: str
    full_shape: tuple[int, ...]  # of the HF tensor, true vocabulary
    dim: int  # dim that start and length count along; 0 for a whole tensor
    start: int
    length: int
    dtype: str
    key: str  # source tensor
    source_start: int

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its HF tensor."""
        return self.length == self.full_shape[self.dim]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the slice itself."""
        return (*self.full_shape[: self.dim], self.length, *self.full_shape[self.dim + 1 :])


def slice_view(piece: WeightSlice, tensors: Mapping[str, Any]) -> Any:
    """The slice as a view of its local tensor."""
    return tensors[piece.key].detach().narrow(piece.dim, piece.source_start, piece.length)


def local_slices(tensors: list[LocalTensor], shape: ModelShape, ranks: TensorRanks) -> list[WeightSlice]:
    """All slices that a rank holds, in the order of its tensors.

    Raises: CheckpointError for a tensor without a HF name or whose rows do not add up.
    """
    experts_per_rank = shape.num_experts // ranks.ep_size
    found = []
    for tensor in tensors:
        if shape.is_tied and tensor.name == "output_layer.weight":
            continue  # the embedding is the one source
        is_expert = expert_number(tensor.name) is not None
        names = lookup(with_expert_offset(tensor.name, ranks.ep * experts_per_rank), shape)
        rank, size = (ranks.etp, ranks.etp_size) if is_expert else (ranks.tp, ranks.tp_size)
        found += _tensor_slices(tensor, names, shape, rank, size)
    return found


def _tensor_slices(
    tensor: LocalTensor, names: HFNames, shape: ModelShape, rank: int, size: int
) -> Iterator[WeightSlice]:
    def piece(hf_name: str, full: tuple[int, ...], dim: int, start: int, length: int, source_start: int) -> WeightSlice:
        return WeightSlice(hf_name, full, dim, start, length, tensor.dtype, tensor.key, source_start)

    rows, rest = tensor.shape[0], tensor.shape[1:]
    if names.kind == "qkv":
        part_rows = [shape.num_heads * shape.head_dim] + 2 * [shape.num_kv_groups * shape.head_dim]
        if rows * size != sum(part_rows):
            raise CheckpointError(
                f"{tensor.name}: {rows} rows on each of {size} ranks, expected {sum(part_rows)} in all"
            )
        for part, start, length, source_start in qkv_rows(shape, rank * rows, (rank + 1) * rows):
            yield piece(names.hf[part], (part_rows[part], *rest), 0, start, length, source_start)
    elif names.kind == "gated":
        if rows % 2:
            raise CheckpointError(f"{tensor.name}: {rows} rows on a rank cannot be a gate and an up projection")
        half = rows // 2
        for part in range(2):
            yield piece(names.hf[part], (half * size, *rest), 0, rank * half, half, part * half)
    else:
        dim, parts = (tensor.split_dim, size) if tensor.split_dim >= 0 else (0, 1)
        full = list(tensor.shape)
        full[dim] *= parts
        if tensor.name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            full[0] = min(full[0], shape.vocab)  # Megatron may pad the vocabulary; HF and the engine never see it
        start = (rank if parts > 1 else 0) * tensor.shape[dim]
        length = min(tensor.shape[dim], full[dim] - start)
        if length > 0:
            yield piece(names.hf[0], tuple(full), dim, start, length, 0)


def qkv_rows(shape: ModelShape, low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
    """Rows [low, high) of the fused QKV axis as (part, start in the part's HF tensor, length, start from `low`).

    The fused axis holds, per KV group, its q heads, then its k head, then its v head; part 0 = q, 1 = k, 2 = v.
    Intersecting with a row interval also covers a KV group that is cut by a tensor axis larger than the groups.
    """
    q_rows, kv_rows = shape.num_heads // shape.num_kv_groups * shape.head_dim, shape.head_dim
    group_rows = q_rows + 2 * kv_rows
    for group in range(low // group_rows, -(-high // group_rows)):
        offset = group * group_rows
        for part, part_rows in enumerate((q_rows, kv_rows, kv_rows)):
            begin, end = max(low, offset), min(high, offset + part_rows)
            if begin < end:
                yield part, group * part_rows + begin - offset, end - begin, begin - low
            offset += part_rows
