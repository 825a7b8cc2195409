"""Which token lies on which context rank, worked by hand, and positions inside segments."""

import pytest
import torch

from megatron_sao.data.context import context_index, positions_in_segments, segment_multiple


def test_two_ranks_by_hand():
    """Trajectories of 5 and 8 tokens, filled up to 8 and 8, are cut into four pieces of two tokens each.

    Rank 0 has the first and the last piece of each, rank 1 the two in the middle.
    """
    found = context_index(torch.tensor([0, 8, 16], dtype=torch.int32), 2)
    assert found.tolist() == [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]
    assert found.dtype == torch.int64


def test_three_ranks_by_hand():
    found = context_index(torch.tensor([0, 6, 18]), 3)  # pieces of 1 and of 2 tokens
    assert found.tolist() == [[0, 5, 6, 7, 16, 17], [1, 4, 8, 9, 14, 15], [2, 3, 10, 11, 12, 13]]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 5])
def test_every_token_lies_on_one_rank_and_all_ranks_attend_to_as_much(num_ranks):
    lengths = torch.tensor([1, 3, 2, 0, 7]) * 2 * num_ranks
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    found = context_index(starts, num_ranks)
    assert found.shape == (num_ranks, int(lengths.sum()) // num_ranks)
    assert sorted(found.flatten().tolist()) == list(range(int(lengths.sum())))
    seen = positions_in_segments(starts)[found].sum(1)  # earlier tokens that a rank's tokens attend to
    assert len(set(seen.tolist())) == 1


@pytest.mark.parametrize("length", [1, 2, 6])
def test_a_segment_that_cannot_be_cut_is_refused(length):
    with pytest.raises(ValueError, match=rf"\[4, {length}\] tokens over 2 context ranks.*multiple of 4"):
        context_index(torch.tensor([0, 4, 4 + length]), 2)


def test_nothing_is_filled_up_without_context_parallelism():
    assert [segment_multiple(size) for size in (1, 2, 3, 8)] == [1, 4, 6, 16]
    assert context_index(torch.tensor([0, 3, 4]), 1).tolist() == [[0, 1, 2, 3]]


def test_positions_start_anew_in_each_segment():
    found = positions_in_segments(torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32))
    assert found.tolist() == [0, 1, 2, 0, 0, 1] and found.dtype == torch.int64
