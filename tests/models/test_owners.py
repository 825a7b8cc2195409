"""Who gives which slice: exclusive ones stay, shared ones are cut small and shared out evenly. No ranks, no tensors."""

import math

import torch  # noqa: F401  WeightSlice names its dtypes

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.convert.slices import WeightSlice
from megatron_sao.models.weights import SHARED_PIECE_BYTES, assign_owners


def piece(name: str, rows: int, *, dim: int = 0, start: int = 0, length: int = 0, key: str = "k") -> WeightSlice:
    """Rows of a float32 tensor in which a row takes 4 KiB."""
    shape = (rows, 1024) if dim == 0 else (1024, rows)
    return WeightSlice(name, shape, dim, start, length or rows, "float32", key, source_start=7)


def num_bytes(pieces) -> int:
    return sum(4 * math.prod(p.shape) for p in pieces)


def test_what_several_ranks_hold_is_cut_and_shared_out_evenly():
    embedding = [piece("embed", 30_001, key=f"rank {rank}") for rank in range(3)]
    norms = [piece("norm", 1, key=f"rank {rank}") for rank in range(3)]
    owned = assign_owners([[e, n] for e, n in zip(embedding, norms)])
    loads = [num_bytes(pieces) for pieces in owned]
    assert sum(loads) == 4096 * 30_002 and max(loads) - min(loads) <= SHARED_PIECE_BYTES
    cut = sorted((p for pieces in owned for p in pieces if p.hf_name == "embed"), key=lambda p: p.start)
    assert [p.start for p in cut] == list(range(0, 30_001, 4096)) and cut[-1].length == 30_001 - cut[-1].start
    for rank, pieces in enumerate(owned):
        for p in pieces:
            assert p.key == f"rank {rank}" and p.source_start == 7 + p.start and num_bytes([p]) <= SHARED_PIECE_BYTES


def test_a_slice_is_cut_along_its_own_dim_and_one_with_a_single_holder_is_not_cut():
    shared = [piece("o_proj", 20_000, dim=1, start=10_000, length=9_000) for _ in range(2)]
    owned = assign_owners([[shared[0], piece("expert", 30_000)], [shared[1]]])
    assert [p.hf_name for p in owned[0]] == ["expert"]  # it has the most already
    assert [(p.dim, p.start, p.length) for p in sorted(owned[1], key=lambda p: p.start)] == [
        (1, 10_000, 4096), (1, 14_096, 4096), (1, 18_192, 808),
    ]  # fmt: skip
