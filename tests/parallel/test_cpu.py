"""What the adapter for a CPU adds to gloo: gathering as many rows as each rank happens to have."""

import torch
import torch.distributed as dist

import megatron_sao.parallel  # noqa: F401  installs the adapter
from megatron_sao.config import load_config
from megatron_sao.parallel.init import start_world
from tests.support.ranks import run_ranks


def gathered(rows_by_rank, dtype):
    """all_gather of rank + 1 in every cell, into parts of one tensor as Megatron does it."""
    start_world(load_config(None, [f"parallel.dp={len(rows_by_rank)}"]))
    mine = torch.full((rows_by_rank[dist.get_rank()], 2), dist.get_rank() + 1).to(dtype)
    whole = torch.full((sum(rows_by_rank), 2), -1).to(dtype)
    dist.all_gather(list(torch.split(whole, rows_by_rank)), mine)
    return whole.tolist()


def test_ranks_gather_unequal_numbers_of_rows():
    for rows_by_rank in ([2, 3], [0, 2], [3, 0], [2, 2], [0, 0]):
        expected = [[1, 1]] * rows_by_rank[0] + [[2, 2]] * rows_by_rank[1]
        assert run_ranks(2, gathered, rows_by_rank, torch.float32) == [expected] * 2, rows_by_rank


def test_flags_are_gathered_too():
    assert run_ranks(2, gathered, [1, 2], torch.bool) == [[[True, True]] * 3] * 2
