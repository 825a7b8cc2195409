"""The index rule, packing, and choosing trajectories, by hand."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_sao.data.batch import pack, to_decoder
from megatron_sao.errors import DataError
from megatron_sao.records import NO_VERSION, Prompt, Trajectory, decode, encode
from tests.support.trajectories import random_trajectories

NAN = float("nan")
BOUNDS = {"reasoning": (0.3, 5.0), "agentic": (0.8, 3.0)}


def trajectory(mask, *, prompt_id="p", domain="agentic", version=0, is_cut=False, **given):
    """A trajectory with token ids 10, 11, ... and the given action mask; other arrays may be given."""
    mask = np.array(mask, bool)
    arrays = dict(
        token_ids=10 + np.arange(len(mask)),
        logp_sampler=np.where(mask, -0.5, 0).astype(np.float32),
        reward_t=np.zeros(len(mask), np.float32),
        version_t=np.where(mask, version, NO_VERSION).astype(np.int32),
        turn_t=np.zeros(len(mask), np.int32),
    )
    arrays |= {name: np.array(value, arrays[name].dtype) for name, value in given.items()}
    prompt = Prompt(prompt_id=prompt_id, environment="calculator", domain=domain, task={})
    return Trajectory(
        prompt=prompt, action_mask=mask, reward=0.0, is_cut=is_cut, started_s=0.0, finished_s=0.0, **arrays
    )


def packed(*trajectories, policy_version=0):
    return pack(trajectories, policy_version, BOUNDS.__getitem__)


# ---- the one index rule ----------------------------------------------------------------------------------------


def test_a_decoder_position_is_about_the_next_token_of_its_own_trajectory():
    starts = torch.tensor([0, 3, 3, 4, 6])  # lengths 3, 0, 1, 2
    about_token = torch.tensor([0.0, 1.0, 2.0, 10.0, 20.0, 21.0])
    assert to_decoder(about_token, starts, fill=-1).tolist() == [1, 2, -1, -1, 21, -1]


@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 0, 2], [2, 0], [5, 1, 3]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
def test_only_last_positions_are_filled(lengths, dtype):
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    x = torch.ones(int(starts[-1]), dtype=dtype)
    found = to_decoder(x, starts)
    last = [int(end) - 1 for end, length in zip(starts[1:], lengths, strict=True) if length]
    assert found.dtype == dtype and found.logical_not().nonzero().flatten().tolist() == last


def test_gradients_move_with_the_values_and_fillers_have_none():
    starts = torch.tensor([0, 2, 5])
    about_token = torch.zeros(5, requires_grad=True)
    (to_decoder(about_token, starts) * torch.tensor([1.0, 100.0, 2.0, 3.0, 100.0])).sum().backward()
    assert about_token.grad.tolist() == [0, 1, 0, 2, 3]


def test_nan_of_a_neighbour_does_not_leak_over_the_border():
    assert to_decoder(torch.tensor([NAN, 1.0, NAN, 2.0]), torch.tensor([0, 2, 4])).tolist() == [1, 0, 2, 0]


# ---- pack ------------------------------------------------------------------------------------------------------


def test_packed_fields_by_hand():
    batch = packed(
        trajectory([0, 1, 1], prompt_id="a#0", domain="reasoning", version=3, reward_t=[0, 0.25, 1], is_cut=True),
        trajectory([0, 0, 1, 0], prompt_id="b", version=5, turn_t=[0, 0, 0, 1]),
        trajectory([0, 1], prompt_id="a#1", version=4, reward_t=[0, 2]),
        policy_version=5,
    )
    assert batch.num_trajectories == 3 and batch.num_tokens == 9 and batch.num_action_tokens == 4
    assert batch.starts.tolist() == [0, 3, 7, 9] and batch.lengths().tolist() == [3, 4, 2]
    assert batch.token_ids.tolist() == [10, 11, 12, 10, 11, 12, 13, 10, 11] and batch.token_ids.dtype == torch.int64
    assert batch.action_mask.tolist() == [False, True, True, False, False, True, False, False, True]
    assert batch.logp_sampler.tolist() == [0, -0.5, -0.5, 0, 0, -0.5, 0, 0, -0.5]
    assert batch.reward_t.tolist() == [0, 0.25, 1, 0, 0, 0, 0, 0, 2]
    assert batch.lag_t.tolist() == [0, 2, 2, 0, 0, 0, 0, 0, 1]
    assert batch.turn_t.tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert batch.eps_low_t.tolist() == pytest.approx([0.3] * 3 + [0.8] * 6)
    assert batch.eps_high_t.tolist() == [5.0] * 3 + [3.0] * 6
    assert batch.is_cut.tolist() == [True, False, False]
    assert batch.reward_n.tolist() == [1.25, 0, 2]
    assert batch.group_n.tolist() == [0, 1, 0], "rollouts a#0 and a#1 answer the same prompt"
    assert batch.trajectory_of_token().tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_an_empty_batch_packs():
    batch = packed()
    assert batch.num_tokens == batch.num_trajectories == batch.num_action_tokens == 0
    assert batch.select([]).num_tokens == 0


@pytest.mark.parametrize("filler", [NAN, float("inf"), -1e10, 7.0])
def test_what_stands_off_the_mask_changes_no_bit(filler):
    mask = [0, 1, 0, 1]
    clean = packed(trajectory(mask, reward_t=[0, 0, 0, 1]))
    dirty = packed(
        trajectory(
            mask,
            reward_t=[filler, 0, filler, 1],
            logp_sampler=[filler, -0.5, filler, -0.5],
            version_t=[99, 0, -7, 0],
        )
    )
    for field in dataclasses.fields(clean):
        assert torch.equal(getattr(clean, field.name), getattr(dirty, field.name)), field.name


def test_a_trajectory_without_actions_is_packed_but_counts_nothing():
    batch = packed(trajectory([0, 0, 0]), trajectory([0, 1]))
    assert batch.num_action_tokens == 1 and batch.reward_n.tolist() == [0, 0]


@pytest.mark.parametrize("mask", [[1, 1], [1], []], ids=str)
def test_a_trajectory_that_does_not_begin_with_an_observation_is_refused_by_name(mask):
    with pytest.raises(DataError, match="train/e0/17.*begin with an observation"):
        packed(trajectory([0, 1]), trajectory(mask, prompt_id="train/e0/17"))


@pytest.mark.parametrize("versions", [[NO_VERSION, 58, 58], [NO_VERSION, 2, 58], [NO_VERSION, 58, 2]], ids=str)
def test_a_token_newer_than_the_version_that_trains_it_is_refused(versions):
    with pytest.raises(DataError, match="train/e0/17.*newer than 57"):
        packed(trajectory([0, 1, 1], prompt_id="train/e0/17", version_t=versions), policy_version=57)
    assert packed(trajectory([0, 1, 1], version_t=versions), policy_version=58).lag_t.min() == 0


def test_arrays_that_came_over_the_wire_are_read_only_and_pack_all_the_same():
    (made,) = random_trajectories(1)
    received = decode(encode(made), Trajectory)
    assert not received.token_ids.flags.writeable
    first, second = packed(made), packed(received)
    for field in dataclasses.fields(first):
        assert torch.equal(getattr(first, field.name), getattr(second, field.name)), field.name


# ---- select ----------------------------------------------------------------------------------------------------


def test_select_takes_trajectories_in_the_given_order():
    batch = packed(trajectory([0, 1, 1]), trajectory([0, 1], is_cut=True), trajectory([0, 0, 1, 0]))
    assert batch.token_index([2, 0]).tolist() == [5, 6, 7, 8, 0, 1, 2]
    chosen = batch.select([2, 0])
    assert chosen.starts.tolist() == [0, 4, 7]
    assert chosen.token_ids.tolist() == [10, 11, 12, 13, 10, 11, 12]
    assert chosen.action_mask.tolist() == [False, False, True, False, False, True, True]
    assert chosen.is_cut.tolist() == [False, False]
    assert batch.token_index([]).dtype == torch.int64 and batch.select([]).starts.tolist() == [0]


def test_results_scattered_by_token_index_land_on_their_own_tokens():
    batch = packed(*random_trajectories(6, seed=2))
    gathered = torch.full((batch.num_tokens,), -1)
    for numbers in ([4, 1], [], [0, 5, 2], [3]):
        gathered[batch.token_index(numbers)] = batch.select(numbers).token_ids
    assert torch.equal(gathered, batch.token_ids)
