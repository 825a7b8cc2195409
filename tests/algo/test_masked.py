"""Masked sums, and denominators that do not depend on how tokens are split."""

import pytest
import torch

from megatron_sao.algo.masked import masked_mean, masked_sum, trajectory_mean_denominator

NAN, INF = float("nan"), float("inf")


def test_fully_masked_sample_does_not_count() -> None:
    """NRM-01."""
    losses = torch.tensor([1.0, 2, 3, 2, 4, 4, 4])
    assert masked_mean(losses, torch.tensor([1, 1, 1, 1, 0, 0, 0])) == 2.0


@pytest.mark.parametrize(
    "parts", [[[1, 1, 1], [9], [2, 2, 2, 2], []], [[1, 1, 1, 9, 2, 2, 2, 2]], [[], [1, 2], [1, 9, 2], [1, 2, 2]]]
)
def test_any_split_into_micro_batches_gives_the_global_mean(parts: list[list[float]]) -> None:
    """NRM-02: 2.5, where the mean of means is 3.0; the gradient of each token is 1/8."""
    mean = torch.zeros(())
    for part in parts:
        x = torch.tensor(part, dtype=torch.float32, requires_grad=True)
        part_mean = masked_mean(x, torch.ones(len(part), dtype=torch.bool), count=8)
        part_mean.backward()
        assert x.grad is None or x.grad.tolist() == [0.125] * len(part)
        mean = mean + part_mean.detach()
    assert mean == 2.5


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 123.0])
def test_garbage_in_masked_slots_has_no_effect_and_no_gradient(garbage: float) -> None:
    x = torch.tensor([1.0, garbage, 3.0], requires_grad=True)
    total = masked_sum(x, torch.tensor([1, 0, 1]))
    total.backward()
    assert total == 4.0
    assert x.grad.tolist() == [1.0, 0.0, 1.0]


def test_empty_mask_gives_zero() -> None:
    assert masked_mean(torch.tensor([NAN, 1.0]), torch.zeros(2, dtype=torch.bool)) == 0.0
    assert masked_mean(torch.zeros(0), torch.zeros(0, dtype=torch.bool), count=torch.tensor(0)) == 0.0


def test_trajectory_mean_weighs_long_and_short_trajectories_alike() -> None:
    # Token means 2 and 8, their mean 5; the trajectory without actions does not count. (Token mean: 14 / 4 = 3.5.)
    x = torch.tensor([1.0, 2, NAN, 3, 8, NAN])
    mask = torch.tensor([1, 1, 0, 1, 1, 0], dtype=torch.bool)
    denominator = trajectory_mean_denominator(mask, torch.tensor([0, 4, 5, 6]), num_trajectories=2)
    assert denominator.tolist() == [6, 6, 6, 6, 2, 1]
    assert (masked_sum(x / denominator, mask)) == 5.0
