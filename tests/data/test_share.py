"""What a data-parallel rank gets of a step: its tokens, the counts of the whole step, and filler tokens."""

import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from megatron_sao.data.batch import pack
from megatron_sao.data.share import micro_batch_of, share_of
from tests.support.trajectories import random_trajectories


def batch_of(count, seed=0):
    return pack(random_trajectories(count, seed=seed), 0, lambda domain: (0.8, 3.0))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_shares_tile_the_step(count, num_ranks):
    batch = batch_of(count, seed=count)
    shares = [share_of(batch, rank, num_ranks, budget_tokens=48, multiple=4) for rank in range(num_ranks)]
    assert sorted(n for share in shares for n in share.numbers) == list(range(count))
    assert len({len(share.micro_batches) for share in shares}) == 1
    for share in shares:
        assert torch.equal(share.batch.token_ids, batch.select(share.numbers).token_ids)
        assert share.num_step_action_tokens == batch.num_action_tokens
        assert share.num_step_trajectories == count
        assert share.step_reward_n.tolist() == batch.reward_n.tolist()
        assert share.step_group_n.tolist() == batch.group_n.tolist()
        index = torch.cat([part.token_index for part in share.micro_batches])
        assert sorted(index.tolist()) == list(range(share.batch.num_tokens)), "each token of the share exactly once"
        for part in share.micro_batches:
            assert torch.equal(part.batch.token_ids, share.batch.token_ids[part.token_index])
            assert torch.equal(part.batch.reward_t, share.batch.reward_t[part.token_index])


@pytest.mark.parametrize("multiple", [1, 2, 4, 7])
def test_fillers_round_up_and_are_a_segment_of_their_own(multiple):
    share = share_of(batch_of(7), 0, 1, budget_tokens=60, multiple=multiple)
    for part in share.micro_batches:
        ids, num_tokens = part.token_ids, part.batch.num_tokens
        assert len(ids) % multiple == 0 and 0 <= len(ids) - num_tokens < multiple
        assert torch.equal(ids[:num_tokens], part.batch.token_ids) and not ids[num_tokens:].any()
        assert part.segment_starts.tolist() == sorted({*part.batch.starts.tolist(), len(ids)})


@pytest.mark.parametrize("num_context_ranks", [1, 2, 3])
@pytest.mark.parametrize("multiple", [1, 4])
def test_a_rank_without_trajectories_is_all_filler(multiple, num_context_ranks):
    batch = batch_of(1)
    share = share_of(batch, 1, 2, 100, multiple, num_context_ranks - 1, num_context_ranks)
    (part,) = share.micro_batches
    assert share.batch.num_tokens == 0 and share.numbers == []
    assert share.num_step_action_tokens == batch.num_action_tokens > 0
    length = len(part.token_ids)
    assert length > 0 and length % multiple == 0 and length <= 2 * multiple
    assert part.token_ids.tolist() == [0] * length and part.about.tolist() == [-1] * length
    assert part.segment_starts.tolist() == [0, num_context_ranks * length]
    assert part.token_index.tolist() == []
    assert part.at_positions(part.batch.action_mask).tolist() == [False] * length
    assert part.onto_tokens(torch.ones(length)).tolist() == []


# ---- what each context rank sees -------------------------------------------------------------------------------


def two_trajectories():
    """Five tokens 10 ... 14 and eight tokens 20 ... 27; the last two of each are actions."""
    made = []
    for trajectory, length, first in zip(random_trajectories(2), (5, 8), (10, 20), strict=True):
        arrays = ("logp_sampler", "reward_t", "version_t", "turn_t")
        fields = {name: np.zeros_like(getattr(trajectory, name), shape=length) for name in arrays}
        token_ids, mask = np.arange(first, first + length), np.arange(length) >= length - 2
        made.append(replace(trajectory, token_ids=token_ids, action_mask=mask, **fields))
    return pack(made, 0, lambda domain: (0.8, 3.0))


def test_two_context_ranks_by_hand():
    """5 tokens are filled up to 8; the 8 others come second. A position is about the token after it, never a filler."""
    batch = two_trajectories()
    first, second = (micro_batch_of(batch, [0, 1], 1, rank, 2) for rank in range(2))
    assert first.segment_starts.tolist() == second.segment_starts.tolist() == [0, 8, 16]
    assert first.token_ids.tolist() == [10, 11, 0, 0, 20, 21, 26, 27]
    assert first.about.tolist() == [1, 2, -1, -1, 6, 7, 12, -1]
    assert second.token_ids.tolist() == [12, 13, 14, 0, 22, 23, 24, 25]
    assert second.about.tolist() == [3, 4, -1, -1, 8, 9, 10, 11]
    assert first.at_positions(batch.token_ids, fill=-1).tolist() == [11, 12, -1, -1, 21, 22, 27, -1]
    assert second.at_positions(batch.action_mask).tolist() == [True, True, False, False, False, False, False, True]
    said = [part.onto_tokens(torch.arange(8.0) + 1) for part in (first, second)]
    assert said[0].tolist() == [0, 1, 2, 0, 0, 0, 5, 6, 0, 0, 0, 0, 7]
    assert said[1].tolist() == [0, 0, 0, 1, 2, 0, 0, 0, 5, 6, 7, 8, 0]


@pytest.mark.parametrize("num_context_ranks", [2, 4, 8])
@pytest.mark.parametrize("multiple", [1, 2, 3, 8])
def test_context_ranks_have_their_say_on_every_token_once(multiple, num_context_ranks):
    """Up to 16 pieces: some trajectories are shorter than that."""
    batch = batch_of(6, seed=3)
    shares = [share_of(batch, 0, 1, 60, multiple, rank, num_context_ranks) for rank in range(num_context_ranks)]
    for parts in zip(*(share.micro_batches for share in shares), strict=True):
        tokens = parts[0].batch
        assert {len(part.token_ids) for part in parts} == {int(parts[0].segment_starts[-1]) // num_context_ranks}
        assert len(parts[0].token_ids) % multiple == 0
        num_filled = sum(-(-n // (2 * num_context_ranks)) * 2 * num_context_ranks for n in tokens.lengths().tolist())
        fillers = int(parts[0].segment_starts[-1]) - num_filled
        assert 0 <= fillers < math.lcm(2 * num_context_ranks, num_context_ranks * multiple), "no filler beyond rounding"
        assert num_filled <= 60 or tokens.num_trajectories == 1
        said = [part.onto_tokens(part.at_positions(torch.arange(tokens.num_tokens))) for part in parts]
        expected = torch.arange(tokens.num_tokens)
        expected[tokens.starts[:-1]] = 0
        assert torch.equal(torch.stack(said).sum(0), expected)
        counted = [int(part.at_positions(tokens.action_mask).sum()) for part in parts]
        assert sum(counted) == tokens.num_action_tokens


def test_a_trajectory_without_actions_is_not_counted_as_one():
    made = random_trajectories(3)
    made[1].action_mask[:] = False
    batch = pack(made, 0, lambda domain: (0.8, 3.0))
    share = share_of(batch, 0, 1, budget_tokens=1000, multiple=1)
    assert share.num_step_trajectories == 2 and sorted(share.numbers) == [0, 1, 2]
    assert share.num_step_action_tokens == made[0].num_action_tokens + made[2].num_action_tokens


def test_added_micro_batches_are_all_filler_on_every_rank():
    batch = batch_of(3)
    for rank in range(2):
        share = share_of(batch, rank, 2, budget_tokens=1000, multiple=4, micro_batch_multiple=4)
        assert [part.batch.num_trajectories > 0 for part in share.micro_batches] == [True, False, False, False]
        assert [part.token_ids.tolist() for part in share.micro_batches[1:]] == [[0] * 4] * 3
