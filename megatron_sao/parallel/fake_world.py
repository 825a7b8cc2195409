"""One rank of a world that does not exist: torch's "fake" process group, on which no collective moves anything.

A plan builds the models of any rank of hundreds in one process: groups have their real sizes and ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_sao.config.parallel import Parallel
from megatron_sao.parallel.init import World, current_world, make_groups, stop_world


@contextmanager
def fake_world(parallel: Parallel, rank: int) -> Iterator[World]:
    """This process as `rank` of the world that the layout asks for, until the block ends.

    Raises: RuntimeError inside a world, real or fake. Effect: seeds Megatron's random states.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is a rank of a world already; a fake world takes its place only outside it")
    dist.init_process_group("fake", rank=rank, world_size=parallel.world_size, store=FakeStore())
    try:
        make_groups(parallel)
        tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        yield current_world()
    finally:
        stop_world()


def data_axis_sizes() -> tuple[int, int]:
    """(copies of a dense parameter, copies of an expert's): the ranks that the optimizer state is cut over."""
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return dense.size(), parallel_state.get_expert_data_parallel_group().size()


def data_axis_ranks() -> tuple[int, int]:
    """This rank's number among the copies of dense parameters, and among those of its experts."""
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return dense.rank(), parallel_state.get_expert_data_parallel_group().rank()
