"""Layers on pipeline stages, worked by hand."""

import pytest

from megatron_sao.config.parallel import Parallel
from megatron_sao.config.stages import layers_per_stage, stage_chunks, stage_faults, stage_start_faults


@pytest.mark.parametrize(
    "num_layers, settings, expected",
    [
        (48, dict(pp=1), [48]),
        (48, dict(pp=4), [12, 12, 12, 12]),
        (78, dict(pp=8, first_stage_layers=14, last_stage_layers=16), [14, 8, 8, 8, 8, 8, 8, 16]),
        (78, dict(pp=10, first_stage_layers=6), [6] + 9 * [8]),
        (10, dict(pp=4, last_stage_layers=1), [3, 3, 3, 1]),
        (7, dict(pp=2, first_stage_layers=3), [3, 4]),
        (7, dict(pp=2, first_stage_layers=3, last_stage_layers=4), [3, 4]),
    ],
)
def test_layers_of_each_stage(num_layers, settings, expected):
    parallel = Parallel(**settings)
    assert stage_faults(num_layers, parallel, "layers") == []
    assert layers_per_stage(num_layers, parallel) == expected


def test_a_model_runs_through_chunk_0_of_all_stages_first():
    even = stage_chunks(8, Parallel(pp=2, vpp=2))
    assert even == [[range(0, 2), range(4, 6)], [range(2, 4), range(6, 8)]]
    uneven = stage_chunks(10, Parallel(pp=3, vpp=2, first_stage_layers=2, last_stage_layers=4))
    assert uneven == [[range(0, 1), range(5, 6)], [range(1, 3), range(6, 8)], [range(3, 5), range(8, 10)]]


@pytest.mark.parametrize(
    "num_layers, settings, expected",
    [
        (46, dict(pp=4), "parallel.pp = 4 does not divide layers = 46; use 1, 2, 23 or 46, or give the ends"),
        (
            78,
            dict(pp=8, first_stage_layers=14, last_stage_layers=15),
            "parallel.first_stage_layers = 14 + parallel.last_stage_layers = 15 leave 49 of layers = 78 for the other 6"
            " of parallel.pp = 8 stages, which must share them evenly; with this first stage,"
            " parallel.last_stage_layers may be 4, 10, 16, 22, 28, 34, 40, 46, 52, 58",
        ),
        (4, dict(pp=4, first_stage_layers=3), "leave 1 of layers = 4 for the other 3 of parallel.pp = 4 stages"),
        (4, dict(pp=3, first_stage_layers=3, last_stage_layers=3), "leave -2 of layers = 4"),
        (9, dict(pp=2, first_stage_layers=3, last_stage_layers=4), "make 7 layers on 2 stages, but layers = 9"),
        (8, dict(first_stage_layers=3), "parallel.first_stage_layers = 3 with parallel.pp = 1"),
        (8, dict(vpp=2), "parallel.vpp = 2 with parallel.pp = 1"),
        (12, dict(pp=2, vpp=4), "parallel.vpp = 4 does not divide the 6 layers of a stage"),
    ],
)
def test_a_split_that_cannot_be_is_refused_with_its_numbers(num_layers, settings, expected):
    (found,) = stage_faults(num_layers, Parallel(**settings), "layers")
    assert expected in found


def test_stages_may_be_bound_to_start_on_certain_layers():
    """As GLM-5.2's: layers 0, 1, 2, 6, 10, ... choose the tokens that the layers after them attend to."""
    may_start = [layer < 3 or layer % 4 == 2 for layer in range(78)]
    good = Parallel(pp=8, first_stage_layers=14, last_stage_layers=16)
    assert stage_start_faults(78, good, may_start, "why") == []
    assert stage_start_faults(78, Parallel(pp=8, first_stage_layers=2, last_stage_layers=4), may_start, "why") == []
    bad = Parallel(pp=8, first_stage_layers=12, last_stage_layers=18)
    found = stage_start_faults(78, bad, may_start, "it has no indexer")
    assert [fault.split(",")[0] for fault in found] == [
        f"pipeline stage {stage} starts on layer {4 + 8 * stage}" for stage in range(1, 8)
    ]
    assert "it has no indexer; layers (from 0) where a stage may start: 0, 1, 2, 6, 10," in found[0]
    chunked = stage_start_faults(8, Parallel(pp=2, vpp=2), [True] * 6 + [False] * 2, "why")
    assert [fault.split(" starts")[0] for fault in chunked] == ["pipeline stage 1, chunk 1,"]
