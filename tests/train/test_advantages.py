"""Targets, advantages and lambdas of a share, by hand; no model."""

import numpy as np
import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.data.batch import pack
from megatron_sao.data.share import share_of
from megatron_sao.records import NO_VERSION, Prompt, Trajectory
from megatron_sao.train.advantages import (
    RunningMean,
    group_baseline_advantages,
    policy_advantages,
    policy_lambda,
    value_targets,
)

NAN = float("nan")


def trajectory(mask, reward, *, prompt_id="p", is_cut=False, turns=None):
    mask = np.array(mask, bool)
    reward_t = np.zeros(len(mask), np.float32)
    if mask.any():
        reward_t[mask.nonzero()[0][-1]] = reward
    return Trajectory(
        prompt=Prompt(prompt_id=prompt_id, environment="calculator", domain="agentic", task={}),
        token_ids=np.arange(len(mask)),
        action_mask=mask,
        logp_sampler=np.zeros(len(mask), np.float32),
        reward_t=reward_t,
        version_t=np.where(mask, 0, NO_VERSION).astype(np.int32),
        turn_t=np.array(turns or [0] * len(mask), np.int32),
        reward=reward,
        is_cut=is_cut,
        started_s=0.0,
        finished_s=0.0,
    )


def share(*trajectories, rank=0, num_ranks=1):
    batch = pack(trajectories, 0, lambda domain: (0.8, 3.0))
    return share_of(batch, rank, num_ranks, budget_tokens=1000, multiple=1)


def algo(*overrides):
    return load_config(None, [f"algo.{override}" for override in overrides]).algo


def aligned(made, numbers):
    """Numbers given in the order of the trajectories, in the order of the share (longest first)."""
    flat = [numbers[n] for n in made.numbers]
    return torch.tensor([x for part in flat for x in part], dtype=torch.float32)


# The first token is the prompt; V of the observation (9.9, -7.7) must not matter.
MASK, VALUE = [0, 1, 1, 0, 0, 1, 1], [NAN, 0.6, 0.2, 9.9, -7.7, 0.4, 0.7]


def test_targets_use_the_value_lambda_and_advantages_the_policy_lambda():  # GAE-05
    made = share(trajectory(MASK, 1.0))
    value = torch.tensor(VALUE)
    options = algo("policy_lambda=0.95")
    assert value_targets(made, value, options).tolist() == [0, 1, 1, 0, 0, 1, 1]
    expected = [0, 0.3179625, 0.75575, 0, 0, 0.585, 0.3]
    assert policy_advantages(made, value, options).tolist() == pytest.approx(expected, abs=1e-6)
    short_sighted = algo("value_lambda=0.0")
    expected = [0, 0.2, 0.4, 0, 0, 0.7, 1.0]  # r + V of the next action token
    assert value_targets(made, value, short_sighted).tolist() == pytest.approx(expected, abs=1e-6)


def test_lambda_is_of_each_trajectory_by_its_action_tokens():
    made = share(trajectory(MASK, 1.0), trajectory([0, 1], 1.0), trajectory([0, 0, 0, 0, 0, 0, 0, 0], 1.0))
    assert made.numbers == [2, 0, 1]
    assert policy_lambda(made, algo()).tolist() == pytest.approx([0.0, 1 - 1 / 6, 1 - 1 / 1.5])
    assert policy_lambda(made, algo("alpha=0.5")).tolist() == pytest.approx([0.0, 0.5, 0.0])
    assert policy_lambda(made, algo("policy_lambda=0.9")).tolist() == pytest.approx([0.9] * 3)


def test_lambda_by_response_tokens_counts_everything_from_the_first_action_on():
    made = share(trajectory(MASK, 1.0), trajectory([0, 0, 1, 0], 1.0), trajectory([0, 0, 0], 1.0))
    assert made.numbers == [0, 1, 2]
    lengths = [6, 2, 0]
    expected = [1 - 1 / (1.5 * n) if n else 0.0 for n in lengths]
    assert policy_lambda(made, algo("length_counts=response")).tolist() == pytest.approx(expected)
    assert policy_lambda(share(), algo("length_counts=response")).tolist() == []


def test_lambda_counts_turns_where_a_turn_is_one_action():
    two_turns = trajectory(MASK, 1.0, turns=[0, 0, 0, 1, 1, 1, 1])
    made = share(two_turns, trajectory([0, 1, 1], 1.0), trajectory([0, 0], 1.0))
    assert made.numbers == [0, 1, 2]
    found = policy_lambda(made, algo("action_level=turn_average"))
    assert found.tolist() == pytest.approx([1 - 1 / 3.0, 1 - 1 / 1.5, 0.0])
    assert policy_lambda(share(), algo("action_level=turn_last")).tolist() == []


def test_a_cut_trajectory_ends_in_zero_or_in_its_last_value():
    made = share(trajectory([0, 1, 1], 0.0, is_cut=True), trajectory([0, 1], 0.0))
    value = aligned(made, {0: [NAN, 0.5, 0.25], 1: [NAN, 0.5]})
    assert value_targets(made, value, algo()).tolist() == [0, 0, 0, 0, 0]
    expected = [0, 0.25, 0.25, 0, 0]  # only the trajectory that was cut, by what the engine said
    assert value_targets(made, value, algo("bootstrap_cut=true")).tolist() == pytest.approx(expected)


def test_plain_gae_takes_observation_tokens_for_steps():
    made = share(trajectory([0, 1, 0, 1], 1.0))
    value = torch.tensor([0.0, 0.5, 0.3, 0.6])
    found = policy_advantages(made, value, algo("gae=plain", "policy_lambda=0.5"))
    # last: 1 - 0.6 = 0.4; observation: 0.6 - 0.3 + 0.5 * 0.4 = 0.5; first: 0.3 - 0.5 + 0.5 * 0.5 = 0.05
    assert found.tolist() == pytest.approx([0, 0.05, 0, 0.4])
    skipping = policy_advantages(made, value, algo("policy_lambda=0.5"))
    assert skipping.tolist() == pytest.approx([0, 0.6 - 0.5 + 0.5 * 0.4, 0, 0.4])


@pytest.mark.parametrize("level, value_of_turns", [("turn_average", (0.4, 0.55)), ("turn_last", (0.2, 0.7))])
def test_one_value_for_each_turn(level, value_of_turns):
    made = share(trajectory(MASK, 1.0, turns=[0, 0, 0, 1, 1, 1, 1]))
    first, second = value_of_turns
    found = policy_advantages(made, torch.tensor(VALUE), algo(f"action_level={level}", "policy_lambda=0.5"))
    late = 1 - second
    early = second - first + 0.5 * late
    assert found.tolist() == pytest.approx([0, early, early, 0, 0, late, late], abs=1e-6)


def test_group_advantages_see_the_whole_step_and_not_only_the_share():
    rollouts = [
        trajectory([0, 1, 1], 1.0, prompt_id="a#0"),
        trajectory([0, 1, 0], 0.0, prompt_id="a#1"),
        trajectory([0, 1], 1.0, prompt_id="b#0"),
        trajectory([0, 1], 1.0, prompt_id="b#1"),
    ]
    std = 0.5**0.5
    expected = {0: [0, 0.5 / std, 0.5 / std], 1: [0, -0.5 / std, 0], 2: [0, 0], 3: [0, 0]}
    for num_ranks in (1, 2, 4):
        for rank in range(num_ranks):
            made = share(*rollouts, rank=rank, num_ranks=num_ranks)
            found = group_baseline_advantages(made)
            torch.testing.assert_close(found, aligned(made, expected), atol=1e-5, rtol=0)


def test_the_running_mean_is_of_earlier_steps():
    baseline = RunningMean()
    first = share(trajectory([0, 1, 0, 1], 1.0), trajectory([0, 1], 0.0))
    assert baseline.advantages(first).tolist() == [0, 0.5, 0, 0.5, 0, -0.5], "the first step takes its own mean"
    assert baseline.mean == 0.5
    second = share(trajectory([0, 1], 1.0))
    assert baseline.advantages(second).tolist() == [0, 0.5], "against the mean before this step"
    assert baseline.mean == pytest.approx(0.9 * 0.5 + 0.1 * 1.0)
    for rank, expected in enumerate([1, -1]):  # every rank sees the rewards of the whole step
        part = share(trajectory([0, 1], 4.0), trajectory([0, 1], 2.0), rank=rank, num_ranks=2)
        assert RunningMean().advantages(part).tolist() == [0, expected]
