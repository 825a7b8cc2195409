"""Which trainer ranks meet on which node: arithmetic on Megatron's order of ranks.

Ranks count tp first, then cp, dp and pp; for experts etp first, then ep, their copies and pp
(`tests/parallel/test_fake_world.py` compares with Megatron's groups). A node holds consecutive ranks.
"""

from collections.abc import Iterable

from megatron_sao.config.parallel import Parallel


def rank_place(parallel: Parallel, rank: int) -> dict[str, int]:
    """Where a rank stands on every axis."""
    place = {}
    for axes in _orders(parallel):
        rest = rank
        for axis, size in axes.items():
            place[axis] = rest % size
            rest //= size
    return place


def places_on(parallel: Parallel, ranks: Iterable[int]) -> dict[str, list[int]]:
    """The different places of some ranks on every axis, sorted."""
    places = [rank_place(parallel, rank) for rank in ranks]
    return {axis: sorted({place[axis] for place in places}) for axis in places[0]}


def nodes_of_one_group(parallel: Parallel, gpus_per_node: int) -> dict[str, int]:
    """On how many nodes the ranks lie that communicate along an axis: of the group on the most nodes."""
    nodes: dict[str, dict[tuple[tuple[str, int], ...], set[int]]] = {}
    for rank in range(parallel.world_size):
        place = rank_place(parallel, rank)
        for axes in _orders(parallel):
            for axis in axes:
                others = tuple((other, place[other]) for other in axes if other != axis)
                nodes.setdefault(axis, {}).setdefault(others, set()).add(rank // gpus_per_node)
    return {axis: max(map(len, groups.values())) for axis, groups in nodes.items()}


def _orders(parallel: Parallel) -> list[dict[str, int]]:
    """Axes with their sizes, the fastest first: of dense parameters, of experts."""
    p = parallel
    return [
        {"tp": p.tp, "cp": p.cp, "dp": p.dp, "pp": p.pp},
        {"etp": p.etp, "ep": p.ep, "expert copy": p.expert_dp, "pp": p.pp},
    ]
