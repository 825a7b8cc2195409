"""The context axis: its ranks share every trajectory of a micro-batch, each holding two pieces of it (data/context.py).

All of them have the same share with whole trajectories; only what the decoder sees and gives is cut.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron_sao.data.context import context_index


def context_size() -> int:
    """Ranks of the context axis."""
    return parallel_state.get_context_parallel_world_size()


def held_here(starts: torch.Tensor) -> torch.Tensor:
    """Which packed tokens this rank holds, in its order: int64 [S/cp], from cumulative lengths int [N+1]."""
    return context_index(starts, context_size())[parallel_state.get_context_parallel_rank()]


def gather_over_context(here: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Rows of all context ranks, in the order of the packed tokens.

    Args:
        here: [S/cp, ...], one row for each token that this rank holds.
        starts: int [N+1], cumulative lengths of the segments.
    Returns: [S, ...]. Backward adds up what all ranks say about a row and gives it to the rank that holds it.
    Collective: the context axis, in forward and in backward.
    """
    order = context_index(starts, context_size()).flatten()
    rows = gather_from_sequence_parallel_region(here, group=parallel_state.get_context_parallel_group())
    return torch.empty_like(rows).index_copy(0, order, rows)


def sum_over_context(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of the context ranks' tensors, on each of them. No gradient. Collective: the context axis."""
    if context_size() == 1:
        return tensor
    device = "cuda" if torch.cuda.is_available() else "cpu"  # NCCL takes no tensor of the CPU
    total = tensor.detach().to(device, copy=True)
    dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    return total
