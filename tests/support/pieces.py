"""Tensors that ranks hold in Megatron's layout, as pieces of HF tensors, and the HF tensors put together from them."""

import torch

from megatron_sao.convert.family import ModelShape
from megatron_sao.convert.slices import local_slices, slice_view
from megatron_sao.models.weights import describe, tensor_ranks
from megatron_sao.parallel.init import World

Piece = tuple[str, int, int, int, tuple[int, ...], torch.Tensor]  # HF name, dim, start, length, full shape, values


def hf_pieces(chunks: list, shape: ModelShape, world: World, tensors: dict[str, torch.Tensor]) -> list[Piece]:
    """What this rank holds of HF tensors: `tensors` is by the keys of `models.weights.model_tensors`."""
    described = [tensor for tensor in describe(chunks) if tensor.key in tensors]
    return [
        (p.hf_name, p.dim, p.start, p.length, tuple(p.full_shape), slice_view(p, tensors).clone())
        for p in local_slices(described, shape, tensor_ranks(world))
    ]


def put_together(pieces_by_rank: list[list[Piece]]) -> dict[str, torch.Tensor]:
    """HF name -> whole tensor. Raises: AssertionError when copies differ or rows are missing."""
    tensors, filled = {}, {}
    for name, dim, start, length, shape, values in (piece for pieces in pieces_by_rank for piece in pieces):
        target = tensors.setdefault(name, torch.zeros(shape)).narrow(dim, start, length)
        seen = filled.setdefault(name, torch.zeros(shape, dtype=torch.bool)).narrow(dim, start, length)
        if bool(seen.any()):
            torch.testing.assert_close(target, values, atol=1e-7, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        target.copy_(values)
        seen.fill_(True)
    missing = [name for name, mask in filled.items() if not bool(mask.all())]
    assert not missing, f"rows are missing of {missing[:5]}"
    return tensors
