"""A rank of a world that does not exist stands where the real one would."""

import pytest

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config.nodes import rank_place
from megatron_sao.config.parallel import Parallel
from megatron_sao.parallel.fake_world import data_axis_ranks, data_axis_sizes, fake_world
from tests.support.ranks import run_ranks

LAYOUT = Parallel(tp=4, pp=8, cp=4, ep=16, dp=2)  # 256 ranks; tensor ranks are neighbours, stages lie farthest apart


def places(layout, ranks):
    found = []
    for rank in ranks:
        with fake_world(layout, rank) as world:
            place = (world.size, world.tp, world.cp, world.dp, world.pp, world.ep, world.etp)
            found.append((place, data_axis_sizes(), data_axis_ranks()))
    return found


def test_coordinates_by_hand():
    """Rank 105 = 3 stages of 32, 0 copies of 16, 2 context ranks of 4, tensor rank 1; among 32, expert rank 9 of 16."""
    (found,) = run_ranks(1, places, LAYOUT, (0, 105, 255))
    assert found == [
        ((256, 0, 0, 0, 0, 0, 0), (8, 2), (0, 0)),
        ((256, 1, 2, 0, 3, 9, 0), (8, 2), (2, 0)),
        ((256, 3, 3, 1, 7, 15, 0), (8, 2), (7, 1)),
    ]


@pytest.mark.parametrize("layout", [LAYOUT, Parallel(tp=2, cp=2, dp=2, pp=2, ep=2, etp=2)])
def test_nodes_are_planned_by_the_order_in_which_megatron_counts(layout):
    ranks = (0, 1, 3, 6, 9, 13, layout.world_size - 2)
    (found,) = run_ranks(1, places, layout, ranks)
    for rank, ((_, tp, cp, dp, pp, ep, etp), _, (_, copy)) in zip(ranks, found, strict=True):
        assert rank_place(layout, rank) == dict(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp) | {"expert copy": copy}


def nested():
    with fake_world(LAYOUT, 0):
        with pytest.raises(RuntimeError, match="a rank of a world already"):
            with fake_world(LAYOUT, 1):
                pass
    with fake_world(Parallel(), 0) as world:
        return world.size


def test_one_world_at_a_time():
    assert run_ranks(1, nested) == [1]
