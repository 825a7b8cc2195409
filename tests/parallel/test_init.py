"""A rank's place on every axis, and worlds that are refused."""

import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.errors import ConfigError
from megatron_sao.parallel.init import start_world, stop_world
from tests.support.ranks import run_ranks


def config_of(layout, *overrides):
    return load_config(None, [*(f"parallel.{key}={value}" for key, value in layout.items()), *overrides])


def place(layout, names):
    world = start_world(config_of(layout))
    assert world.is_first == (world.rank == 0)
    return tuple(getattr(world, name) for name in names)


@pytest.mark.parametrize(
    "layout, names, expected",
    [
        (dict(tp=2, pp=2), ("tp", "pp", "dp"), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]),
        (dict(tp=2, dp=2), ("tp", "pp", "dp"), [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)]),
        (dict(tp=2, dp=2, ep=4), ("tp", "dp", "ep", "etp"), [(0, 0, 0, 0), (1, 0, 1, 0), (0, 1, 2, 0), (1, 1, 3, 0)]),
        (dict(tp=2, dp=2, etp=2, ep=2), ("ep", "etp"), [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (dict(dp=2), ("dp_size", "tp_size", "pp_size", "ep_size", "size"), [(2, 1, 1, 1, 2)] * 2),
        (dict(cp=2, dp=2), ("cp", "dp"), [(0, 0), (1, 0), (0, 1), (1, 1)]),
        (dict(cp=2), ("cp_size", "dp_size", "size"), [(2, 1, 2)] * 2),
        (dict(tp=2, cp=2, ep=4), ("tp", "cp", "ep", "dp"), [(0, 0, 0, 0), (1, 0, 1, 0), (0, 1, 2, 0), (1, 1, 3, 0)]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_coordinates(layout, names, expected):
    assert run_ranks(len(expected), place, layout, names) == expected


def refusal(layout):
    try:
        start_world(config_of(layout))
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_a_world_of_another_size_is_refused_with_both_numbers():
    (text,) = run_ranks(1, refusal, dict(tp=2, dp=3))
    assert "2 * 1 * 1 * 3 = 6" in text and "started with 1 ranks" in text


def twice(seed):
    config = config_of({}, f"run.seed={seed}")
    start_world(config)
    first = torch.rand(3)
    start_world(config)
    second = torch.rand(3)
    stop_world()
    start_world(config)
    return first.tolist(), second.tolist(), torch.rand(3).tolist()


def test_a_world_can_be_started_again_and_its_seed_decides_what_is_drawn():
    ((first, second, third),) = run_ranks(1, twice, 1)
    assert first == second == third
    ((other, _, _),) = run_ranks(1, twice, 2)
    assert other != first


def random_states(layout):
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    start_world(config_of(layout))
    drawn = {}
    for name in get_cuda_rng_tracker().get_states():
        with get_cuda_rng_tracker().fork(name):
            drawn[name] = torch.rand(2).tolist()
    return drawn


def test_random_regions_are_independent_without_cuda_too():
    """Silently equal states would give every expert and every tensor rank the same random weights."""
    first, second = run_ranks(2, random_states, dict(tp=2, ep=2))
    assert len(first) >= 3 and len({tuple(numbers) for numbers in first.values()}) == len(first)
    assert first["data-parallel-rng"] == second["data-parallel-rng"]
    assert first["model-parallel-rng"] != second["model-parallel-rng"]
    assert first["expert-parallel-rng"] != second["expert-parallel-rng"]
