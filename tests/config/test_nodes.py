"""Ranks on nodes, worked by hand; that Megatron counts ranks so is tested in tests/parallel/test_fake_world.py."""

from megatron_sao.config.nodes import nodes_of_one_group, places_on, rank_place
from megatron_sao.config.parallel import Parallel


def test_a_rank_stands_on_every_axis():
    """Rank 13 of TP2 CP2 DP2 PP2 = 1 + 2 * 0 + 4 * 1 + 8 * 1; among the 8 ranks of its stage, 5 = 1 + 2 * 2 + 4 * 1."""
    layout = Parallel(tp=2, cp=2, dp=2, pp=2, ep=4)
    place = dict(tp=1, cp=0, dp=1, pp=1, etp=0, ep=1)
    assert rank_place(layout, 13) == place | {"expert copy": 1}
    assert rank_place(Parallel(tp=2, cp=2, dp=2, pp=2, ep=2, etp=2), 13) == place | {
        "etp": 1, "ep": 0, "expert copy": 1,
    }  # fmt: skip


def test_the_places_of_a_node():
    layout = Parallel(tp=2, cp=2, dp=2, ep=4)
    assert places_on(layout, range(4, 8)) == {
        "tp": [0, 1], "cp": [0, 1], "dp": [1], "pp": [0], "etp": [0], "ep": [0, 1, 2, 3], "expert copy": [1],
    }  # fmt: skip


def test_groups_that_lie_on_several_nodes():
    layout = Parallel(tp=4, cp=4, pp=2, ep=16)
    within = dict(tp=1, cp=1, dp=1, pp=2, etp=1, ep=1) | {"expert copy": 1}
    assert nodes_of_one_group(layout, 16) == within
    assert nodes_of_one_group(layout, 8) == within | {"cp": 2, "ep": 2}
    assert nodes_of_one_group(layout, 2) == within | {"tp": 2, "cp": 4, "ep": 8}
    # Nodes that tp does not divide: ranks 4 to 7 lie on nodes 0 and 1 of 6 GPUs.
    assert nodes_of_one_group(layout, 6)["tp"] == 2
