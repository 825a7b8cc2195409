"""What a data-parallel rank gets of a step: its tokens, the counts of the whole step, and filler tokens."""

import pytest
import torch

from megatron_sao.data.batch import pack
from megatron_sao.data.share import share_of
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
        ids, starts = part.padded_token_ids(), part.padded_starts()
        assert len(ids) % multiple == 0 and len(ids) - part.batch.num_tokens == part.num_filler_tokens < multiple
        assert torch.equal(ids[: part.batch.num_tokens], part.batch.token_ids)
        assert starts.tolist() == sorted({*part.batch.starts.tolist(), len(ids)})


@pytest.mark.parametrize("multiple", [1, 4])
def test_a_rank_without_trajectories_is_all_filler(multiple):
    batch = batch_of(1)
    share = share_of(batch, 1, 2, budget_tokens=100, multiple=multiple)
    (part,) = share.micro_batches
    assert share.batch.num_tokens == 0 and share.numbers == []
    assert share.num_step_action_tokens == batch.num_action_tokens > 0
    assert part.padded_token_ids().tolist() == [0] * multiple and part.padded_starts().tolist() == [0, multiple]
    assert part.token_index.tolist() == []


def test_a_trajectory_without_actions_is_not_counted_as_one():
    made = random_trajectories(3)
    made[1].action_mask[:] = False
    batch = pack(made, 0, lambda domain: (0.8, 3.0))
    share = share_of(batch, 0, 1, budget_tokens=1000, multiple=1)
    assert share.num_step_trajectories == 2 and sorted(share.numbers) == [0, 1, 2]
    assert share.num_step_action_tokens == made[0].num_action_tokens + made[2].num_action_tokens
