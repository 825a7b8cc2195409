"""Statistics over data-parallel ranks and results of the last pipeline stage, with real ranks."""

import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.algo.statistics import moments, whitened
from megatron_sao.config import load_config
from megatron_sao.parallel.context import sum_over_context
from megatron_sao.parallel.exchange import any_rank, broadcast_object, from_last_stage, gather_objects, merge_over_data
from megatron_sao.parallel.init import start_world
from tests.support.ranks import RankFailure, run_ranks

NAN = float("nan")


def world_of(**layout):
    return start_world(load_config(None, [f"parallel.{key}={value}" for key, value in layout.items()]))


# ---- over the data axis ----------------------------------------------------------------------------------------

# (advantages, mask) of three ranks; the second one has no token
WHITENING = [([1.0, 3.0], [1, 1]), ([], []), ([5.0, 100.0], [1, 0])]


def whitening(parts):
    rank = world_of(dp=3).dp
    advantage, mask = torch.tensor(parts[rank][0]), torch.tensor(parts[rank][1], dtype=torch.bool)
    merged = merge_over_data({"moments": moments(advantage, mask)})["moments"]
    return whitened(advantage, mask, merged).tolist(), merged.tolist()


def test_whitening_uses_one_mean_and_one_variance_for_all_ranks():
    """NRM-06: mean 3, unbiased variance 4 over the three action tokens; a rank without any joins, or all would hang."""
    results = run_ranks(3, whitening, WHITENING)
    assert [found for found, _ in results] == [[-1, 0], [], [1, 0]]
    assert all(merged == [3, 9, 35] for _, merged in results)


def test_whitening_with_one_or_no_action_token_in_the_whole_step_changes_nothing():  # NRM-07
    one = run_ranks(3, whitening, [([0.4, 7.0], [1, 0]), ([], []), ([NAN], [0])])
    assert [found for found, _ in one] == [pytest.approx([0.4, 0]), [], [0]]
    none = run_ranks(3, whitening, [([0.4], [0]), ([], []), ([NAN], [0])])
    assert [found for found, _ in none] == [[0], [], [0]]


def merging():
    rank = world_of(dp=3).dp
    named = {
        "sum": torch.tensor(float(rank)),
        "matrix": torch.full((2, 2), rank),
        "max_lag": torch.tensor([rank % 2, -5 * rank]),
        "mask": torch.tensor(rank == 1),
        "empty": torch.zeros(0),
        "tiny": torch.tensor(1e-9 if rank else 1e9, dtype=torch.float64),
    }
    return merge_over_data(named)


def test_sums_and_maxima_over_three_ranks():
    results = run_ranks(3, merging)
    for merged in results:
        assert all(value.dtype == torch.float64 and value.device.type == "cpu" for value in merged.values())
        assert merged["sum"] == 3 and merged["sum"].shape == ()
        assert merged["matrix"].tolist() == [[3, 3], [3, 3]]
        assert merged["max_lag"].tolist() == [1, 0]
        assert merged["mask"] == 1 and merged["empty"].shape == (0,)
        assert merged["tiny"] == 1e9 + 2e-9
        assert merged.keys() == results[0].keys()


def merging_beside_model_parallel_ranks():
    world = world_of(tp=2, dp=2)
    return world.dp, float(merge_over_data({"n": torch.tensor(10.0**world.dp)})["n"])


def test_only_the_data_axis_is_summed():
    """tp 2 x dp 2: both tensor ranks of a copy hold the same tokens, which count once."""
    assert sorted(run_ranks(4, merging_beside_model_parallel_ranks)) == [(0, 11), (0, 11), (1, 11), (1, 11)]


def merging_beside_context_ranks():
    world = world_of(cp=2, dp=2)
    part = torch.tensor([10.0**world.dp, float(world.cp)])
    return world.dp, merge_over_data({"n": part[:1]})["n"].tolist(), sum_over_context(part).tolist()


def test_context_ranks_hold_the_same_share_and_parts_of_what_is_said_about_it():
    """cp 2 x dp 2: statistics of the share count once, what the decoders say of its tokens is added up."""
    found = run_ranks(4, merging_beside_context_ranks)
    assert sorted(found) == [(0, [11], [2, 1]), (0, [11], [2, 1]), (1, [11], [20, 1]), (1, [11], [20, 1])]


# ---- from the last pipeline stage ------------------------------------------------------------------------------


def values_of_two_samples(num_copies):
    """Rank 1 of each pipeline has values of samples with 3, 5 and 0 response tokens; -> what each rank gets."""
    world = world_of(pp=2, dp=num_copies)
    results = []
    for length in (3, 5, 0):
        own = 100.0 * world.dp + torch.arange(length) if world.pp == 1 else None
        results.append(from_last_stage(own, (length,)))
    return world.pp, world.dp, results


@pytest.mark.parametrize("num_copies", [1, 2])
def test_every_stage_gets_the_values_of_its_own_last_stage(num_copies):  # VAL-08
    for _, dp, results in run_ranks(2 * num_copies, values_of_two_samples, num_copies):
        for length, found in zip((3, 5, 0), results, strict=True):
            assert found.dtype == torch.float32 and found.shape == (length,)
            assert found.tolist() == [100.0 * dp + i for i in range(length)]


def other_kinds_of_tensor():
    world = world_of(pp=2)
    last = world.pp == 1
    scalar = from_last_stage(torch.tensor(7.0) if last else None, ())
    strided = from_last_stage(torch.arange(6.0).view(2, 3).t() if last else None, (3, 2))
    wide = from_last_stage(torch.tensor([0.1], dtype=torch.float64) if last else None, (1,))
    ignored = from_last_stage(torch.tensor([1.0]) if last else torch.full((4,), NAN), (1,))
    return scalar, strided, wide, ignored


def test_scalars_strided_and_wide_tensors_and_what_other_stages_pass():
    for scalar, strided, wide, ignored in run_ranks(2, other_kinds_of_tensor):
        assert scalar == 7 and strided.tolist() == [[0, 3], [1, 4], [2, 5]]
        assert wide.tolist() == pytest.approx([0.1]) and wide.dtype == torch.float32
        assert ignored.tolist() == [1]


def wrong_shape(tensor):
    world = world_of(pp=2)
    return from_last_stage(tensor if world.pp == 1 else None, (3,))


@pytest.mark.parametrize("tensor", [None, torch.zeros(2), torch.zeros(3, 1)], ids=["nothing", "short", "2-d"])
def test_a_last_stage_with_other_values_than_promised_is_an_error(tensor):
    with pytest.raises(RankFailure, match=r"ValueError: the last pipeline stage gives .* where \[3\] is expected"):
        run_ranks(2, wrong_shape, tensor)


def one_stage():
    world_of()
    return from_last_stage(torch.tensor([1.0, 2.0], dtype=torch.float64), (2,))


def test_a_single_stage_gives_its_own_tensor():
    ((found),) = run_ranks(1, one_stage)
    assert found.tolist() == [1, 2] and found.dtype == torch.float32


# ---- objects and flags -----------------------------------------------------------------------------------------


def objects():
    world = world_of(dp=3)
    return (
        broadcast_object({"rank": world.rank}),
        broadcast_object(world.rank, source=2),
        gather_objects(["x"] * world.rank),
        any_rank(world.rank == 1),
        any_rank(False),
        any_rank(True),
    )


def test_objects_and_flags():
    for found in run_ranks(3, objects):
        assert found == ({"rank": 0}, 2, [[], ["x"], ["x", "x"]], True, False, True)
