"""Losses of the value model."""

import math

import pytest
import torch

from megatron_sao.algo.value_loss import HLGaussSupport, hl_gauss_loss, hl_gauss_target, hl_gauss_value, value_loss

NAN, INF = float("nan"), float("inf")
SUPPORT = HLGaussSupport(low=0.0, high=1.0, num_bins=4, sigma=0.2)


def test_squared_error() -> None:
    value = torch.tensor([0.8, -0.4, 0.1], requires_grad=True)
    loss = value_loss(value, torch.tensor([1.0, 0.0, 5.0]), torch.tensor([1, 1, 0]), num_action_tokens=2)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (0.04 + 0.16) / 2)
    assert value.grad.tolist() == pytest.approx([-0.1, -0.2, 0.0])


def test_value_clipping_takes_the_worse_of_both() -> None:
    # Clip 0.1 around old values 0, 0, 0: V = 0.5, 0.05, -0.5 becomes 0.1, 0.05, -0.1; target 1, 1, -0.05.
    value = torch.tensor([0.5, 0.05, -0.5], requires_grad=True)
    loss = value_loss(
        value,
        torch.tensor([1.0, 1.0, -0.05]),
        torch.ones(3),
        num_action_tokens=1,
        clip=0.1,
        old_value=torch.zeros(3),
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (0.9**2 + 0.95**2 + 0.45**2))
    assert value.grad.tolist() == pytest.approx([0.0, -0.95, -0.45])


def test_an_output_column_beside_a_row_of_targets_is_refused_and_not_broadcast() -> None:
    value, target, mask = torch.zeros(3, 1), torch.ones(3), torch.ones(3)
    with pytest.raises(ValueError, match=r"value \[3, 1\], target \[3\]"):
        value_loss(value, target, mask, num_action_tokens=3)
    with pytest.raises(ValueError, match=r"old_value \[3, 1\]"):
        value_loss(value[:, 0], target, mask, num_action_tokens=3, clip=0.2, old_value=value)


def test_value_clipping_needs_old_values_and_a_width() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="old_value"):
        value_loss(one, one, one, num_action_tokens=1, clip=0.1)
    with pytest.raises(ValueError, match="clip = 0.0"):
        value_loss(one, one, one, num_action_tokens=1, clip=0.0, old_value=one)


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 123.0])
def test_masked_garbage_changes_no_bit(garbage: float) -> None:
    mask = torch.tensor([True, False, True])

    def run(filler: float) -> list[torch.Tensor]:
        value = torch.tensor([0.3, filler, 0.6], requires_grad=True)
        logits = torch.tensor([[0.1, 0.2, 0.3, 0.4], [filler] * 4, [1.0, 0, 0, 0]], requires_grad=True)
        target = torch.tensor([0.5, filler, 1.0], requires_grad=True)
        loss = value_loss(value, target, mask, num_action_tokens=2, clip=0.1, old_value=target)
        categorical = hl_gauss_loss(logits, target, mask, num_action_tokens=2, support=SUPPORT)
        (loss + categorical).backward()
        assert target.grad is None  # a target is a constant
        return [loss.detach(), categorical.detach(), value.grad, logits.grad]

    for dirty, clean in zip(run(garbage), run(0.0)):
        assert torch.equal(dirty, clean)
    assert run(garbage)[2][1] == 0 and not run(garbage)[3][1].any()


def test_step_without_action_tokens() -> None:
    """NRM-04, the pure part."""
    value = torch.tensor([NAN], requires_grad=True)
    loss = value_loss(value, torch.tensor([NAN]), torch.tensor([0]), num_action_tokens=0)
    loss.backward()
    assert loss.item() == 0.0 and value.grad.item() == 0.0
    logits = torch.zeros(0, 4, requires_grad=True)
    assert hl_gauss_loss(logits, torch.zeros(0), torch.zeros(0), num_action_tokens=0, support=SUPPORT).item() == 0.0


def test_hl_gauss_value_is_the_mean_of_the_bin_centers() -> None:
    """VAL-02 for the categorical head: its logits are read at temperature 1, whatever the policy samples at."""
    assert hl_gauss_value(torch.zeros(2, 4), SUPPORT).tolist() == pytest.approx([0.5, 0.5])
    logits = torch.tensor([0.0, math.log(3.0), -INF, -INF])  # 1/4 at 0.125, 3/4 at 0.375
    assert hl_gauss_value(logits, SUPPORT).item() == pytest.approx(0.25 * 0.125 + 0.75 * 0.375)


def test_hl_gauss_target_is_the_mass_of_the_cut_gaussian() -> None:
    probs = hl_gauss_target(torch.tensor([0.5, 0.0, 7.0], dtype=torch.float64), SUPPORT)
    torch.testing.assert_close(probs.sum(-1), torch.ones(3, dtype=torch.float64))
    inner, whole = math.erf(0.25 / 0.2 / math.sqrt(2)), math.erf(0.5 / 0.2 / math.sqrt(2))
    outer_bin, inner_bin = (1 - inner / whole) / 2, inner / whole / 2
    assert probs[0].tolist() == pytest.approx([outer_bin, inner_bin, inner_bin, outer_bin])
    assert probs[1].argmax() == 0
    torch.testing.assert_close(probs[2], probs[1].flip(0))  # beyond the support = its end


def test_hl_gauss_loss_falls_to_the_entropy_of_its_target() -> None:
    target = torch.tensor([0.3])
    probs = hl_gauss_target(target, SUPPORT)
    logits = probs.log().requires_grad_()
    loss = hl_gauss_loss(logits, target, torch.ones(1), num_action_tokens=1, support=SUPPORT)
    loss.backward()
    assert loss.item() == pytest.approx(-(probs * probs.log()).sum().item())
    assert logits.grad.abs().max() < 1e-6


@pytest.mark.parametrize("wrong", [{"high": 0.0}, {"num_bins": 1}, {"sigma": 0.0}])
def test_impossible_support_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="HLGaussSupport"):
        HLGaussSupport(**({"low": 0.0, "high": 1.0, "num_bins": 4, "sigma": 0.2} | wrong))
