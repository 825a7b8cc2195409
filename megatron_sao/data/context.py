"""How context parallelism cuts packed segments: the one function that says which rank holds which token. Pure.

Each segment is cut by itself into 2 * R equal pieces for R ranks; rank r holds pieces r and 2 * R - 1 - r. A late token
attends to more tokens than an early one: so paired, the ranks do the same work. It is the cut that transformer-engine's
attention and rotary embedding of packed sequences expect, and Megatron's.
"""

import torch


def segment_multiple(num_ranks: int) -> int:
    """What the length of every segment must be a multiple of: 2 * R pieces of equal length, or anything for R = 1."""
    return 2 * num_ranks if num_ranks > 1 else 1


def context_index(starts: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Which packed tokens each context rank holds, in its own order: segment by segment, early piece before late.

    Args:
        starts: int [N+1], cumulative lengths of the segments.
        num_ranks: R, size of the context axis.
    Returns: int64 [R, S/R]; every packed token exactly once.
    Raises: ValueError: a segment does not fall into 2 * R equal pieces.
    """
    if num_ranks == 1:
        return torch.arange(int(starts[-1]), device=starts.device)[None]
    lengths = starts.long().diff()
    if bool((lengths % (2 * num_ranks)).any()):
        raise ValueError(
            f"segments of {lengths.tolist()} tokens over {num_ranks} context ranks: each length must be a multiple of"
            f" {2 * num_ranks}"
        )
    piece_length = torch.repeat_interleave(lengths // (2 * num_ranks), lengths)
    piece = positions_in_segments(starts) // piece_length
    rank = torch.minimum(piece, 2 * num_ranks - 1 - piece)
    return torch.argsort(rank, stable=True).view(num_ranks, -1)


def positions_in_segments(starts: torch.Tensor) -> torch.Tensor:
    """Position of every packed token inside its own segment: int64 [S], from cumulative lengths [N+1]."""
    starts = starts.long()
    return torch.arange(int(starts[-1]), device=starts.device) - torch.repeat_interleave(starts[:-1], starts.diff())
