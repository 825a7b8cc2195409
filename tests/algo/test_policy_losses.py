"""The control arms."""

import math

import pytest
import torch

from megatron_sao.algo.dis import policy_gradient_loss
from megatron_sao.algo.policy_losses import (
    group_advantages,
    one_sided_weight,
    ppo_clip_loss,
    running_mean_advantages,
    token_advantages,
    turn_level_gae,
)

NAN, INF = float("nan"), float("inf")


def test_ppo_keeps_the_gradient_on_the_harmless_side_only() -> None:
    # r = 0.5, 2, 0.5, 2 with A = 1, 1, -1, -1, clip 0.2: r A is the minimum at 0 and 3; 1 and 2 sit on the clip.
    learner = torch.tensor([0.5, 2.0, 0.5, 2.0]).log().requires_grad_()
    loss = ppo_clip_loss(
        learner,
        torch.zeros(4),
        torch.tensor([1.0, 1, -1, -1]),
        torch.ones(4),
        clip_low=0.2,
        clip_high=0.2,
        num_action_tokens=4,
    )
    loss.backward()
    assert loss.item() == pytest.approx(-(0.5 + 1.2 - 0.8 - 2.0) / 4)
    assert learner.grad.tolist() == pytest.approx([-0.125, 0, 0, 0.5])


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, -1e10])
def test_ppo_is_finite_beside_masked_garbage_and_overflow(garbage: float) -> None:
    learner = torch.tensor([garbage, -0.1, -0.1], requires_grad=True)
    loss = ppo_clip_loss(
        learner,
        torch.tensor([garbage, -1000.0, -0.1]),
        torch.tensor([garbage, 1.0, 1.0]),
        torch.tensor([0, 1, 1]),
        clip_low=0.2,
        clip_high=0.2,
        num_action_tokens=1,
    )
    loss.backward()
    assert loss.item() == pytest.approx(-(1.2 + 1.0))
    assert learner.grad.tolist() == pytest.approx([0.0, 0.0, -1.0])


def test_one_sided_weight_masks_only_what_the_update_would_push_further_out() -> None:
    ratio = torch.tensor([0.5, 0.5, 7.0, 7.0, 1.0])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    weight = one_sided_weight(ratio.log(), torch.zeros(5), advantage, 0.3, 5.0)
    assert weight.tolist() == pytest.approx([0.5, 0, 0, 7, 1])


def test_one_sided_weight_drops_what_is_not_finite() -> None:
    learner = torch.tensor([0.0, NAN, -1.0], requires_grad=True)
    weight = one_sided_weight(learner, torch.tensor([-1000.0, -1.0, -1.0]), torch.tensor([-1.0, -1, 1]), 0.3, 5.0)
    assert weight.tolist() == [0, 0, 1]
    loss = policy_gradient_loss(weight, learner, torch.tensor([-1.0, -1, 1]), torch.ones(3), num_action_tokens=3)
    loss.backward()
    assert learner.grad.tolist() == pytest.approx([0, 0, -1 / 3])


def test_group_advantages() -> None:
    reward = torch.tensor([1.0, 0, 5, 1, 1, 0.1, 0.1, 0.1])
    group = torch.tensor([0, 0, 2, 0, 0, 3, 3, 3])
    advantage = group_advantages(reward, group)
    # group 0: 1 0 1 1, mean 0.75, std sqrt(0.75 / 3) = 0.5; group 2 has one member; group 3 has equal rewards
    assert advantage.tolist() == pytest.approx([0.5, -1.5, 0, 0.5, 0.5, 0, 0, 0], abs=1e-5)
    assert advantage[2] == 0 and not advantage[5:].any()
    assert group_advantages(reward, group, divide_by_std=False)[1].item() == pytest.approx(-0.75)
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_running_mean_judges_by_the_past() -> None:
    advantage, baseline = running_mean_advantages(torch.tensor([1.0, 0.0]), None, decay=0.9)
    assert advantage.tolist() == [0.5, -0.5] and baseline == 0.5
    advantage, baseline = running_mean_advantages(torch.tensor([1.0, 1.0]), baseline, decay=0.9)
    assert advantage.tolist() == [0.5, 0.5] and baseline == pytest.approx(0.55)
    _, unchanged = running_mean_advantages(torch.zeros(0), baseline)
    assert unchanged == baseline


def test_token_advantages() -> None:
    mask = torch.tensor([1, 0, 1, 0, 1], dtype=torch.bool)
    tokens = token_advantages(torch.tensor([2.0, NAN, 3.0]), mask, torch.tensor([0, 3, 4, 5]))
    assert tokens.tolist() == [2, 0, 2, 0, 3]


@pytest.mark.parametrize(
    ("level", "values"), [("turn_average", [0.4, 0.8, 0.1]), ("turn_last", [0.6, 0.8, 0.1])]
)
def test_turn_is_one_action(level: str, values: list[float]) -> None:
    """Trajectory 0: turns of 2 and 1 action tokens; trajectory 1: one of 1. Lambda 0.5, rewards 1 and 3."""
    nan = NAN
    advantage, returns = turn_level_gae(
        torch.tensor([nan, 0, 0.0, nan, 1, 3, nan]),
        torch.tensor([nan, 0.2, 0.6, nan, 0.8, 0.1, nan]),
        torch.tensor([0, 1, 1, 0, 1, 1, 0]),
        torch.tensor([0, 0, 0, 1, 1, 0, 0]),
        torch.tensor([0, 5, 7]),
        action_level=level,
        lam=0.5,
    )
    last = 1 - values[1]
    first = values[1] - values[0] + 0.5 * last
    assert advantage.tolist() == pytest.approx([0, first, first, 0, last, 3 - values[2], 0])
    assert returns.tolist() == pytest.approx([0, *[first + values[0]] * 2, 0, 1, 3, 0])


def test_turns_of_neighbours_with_the_same_index_stay_apart() -> None:
    advantage, _ = turn_level_gae(
        torch.tensor([1.0, 5.0]),
        torch.zeros(2),
        torch.ones(2),
        torch.zeros(2, dtype=torch.int64),
        torch.tensor([0, 1, 1, 2]),
        action_level="turn_average",
    )
    assert advantage.tolist() == [1, 5]


def test_turn_without_actions_is_stepped_over() -> None:
    advantage, _ = turn_level_gae(
        torch.tensor([0.0, NAN, 1.0]),
        torch.tensor([0.25, NAN, 0.5]),
        torch.tensor([1, 0, 1]),
        torch.tensor([0, 1, 2]),
        torch.tensor([0, 3]),
        action_level="turn_last",
        lam=0.0,
    )
    assert advantage.tolist() == [0.25, 0, 0.5]


def test_unknown_action_level_is_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match='"turn"'):
        turn_level_gae(one, one, one, one.long(), torch.tensor([0, 1]), action_level="turn")


def test_log_ratio_limit_is_far_outside_every_clip() -> None:
    learner = torch.tensor([0.0], requires_grad=True)
    loss = ppo_clip_loss(
        learner,
        torch.tensor([-500.0]),
        torch.tensor([-1.0]),
        torch.ones(1),
        clip_low=0.2,
        clip_high=0.2,
        num_action_tokens=1,
    )
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(20.0), rel=1e-5)
    assert learner.grad.item() == 0.0
