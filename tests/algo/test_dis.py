"""Direct double-sided importance sampling: weights, loss, gradient and what is reported."""

import math

import pytest
import torch

from megatron_sao.algo.dis import dis_loss, dis_metrics, dis_statistics, dis_weight, merged_dis_statistics
from megatron_sao.algo.masked import trajectory_mean_denominator

NAN, INF = float("nan"), float("inf")
REASONING, CODING = {"eps_low": 0.3, "eps_high": 5.0}, {"eps_low": 0.8, "eps_high": 3.0}

# DIS-01
LEARNER = [-0.5, -1.2, -0.3, -2.0, -0.05, -1.0]
SAMPLER = [-0.6, -0.8, -2.3, -1.9, -0.05, -3.0]
ADVANTAGE = [1.0, -0.5, 2.0, 9.0, 0.25, -1.0]
MASK = [1, 1, 1, 0, 1, 1]


def loss_and_gradient(learner, sampler, advantage, mask, num_action_tokens=1, **bounds):
    learner = torch.tensor(learner, requires_grad=True)
    loss = dis_loss(
        learner,
        torch.tensor(sampler),
        torch.tensor(advantage),
        torch.tensor(mask),
        num_action_tokens=num_action_tokens,
        **bounds,
    )
    loss.backward()
    return loss.item(), learner.grad.tolist()


@pytest.mark.parametrize(
    ("bounds", "weight", "loss_sum", "gradient"),
    [
        (REASONING, [1.10517092, 0, 0, 0.90483742, 1, 0], 0.56508546, [-1.10517092, 0, 0, 0, -0.25, 0]),
        (CODING, [1.10517092, 0.67032005, 0, 0.90483742, 1, 0], 0.16289343, [-1.10517092, 0.33516002, 0, 0, -0.25, 0]),
    ],
)
def test_tokens_outside_the_interval_are_dropped_whatever_their_sign(bounds, weight, loss_sum, gradient) -> None:
    """DIS-01."""
    actual = dis_weight(torch.tensor(LEARNER), torch.tensor(SAMPLER), **bounds)
    assert actual.tolist() == pytest.approx(weight, abs=1e-6)
    loss, grad = loss_and_gradient(LEARNER, SAMPLER, ADVANTAGE, MASK, **bounds)
    assert loss == pytest.approx(loss_sum, abs=1e-6)
    assert grad == pytest.approx(gradient, abs=1e-6)
    mean, mean_grad = loss_and_gradient(LEARNER, SAMPLER, ADVANTAGE, MASK, num_action_tokens=5, **bounds)
    assert mean == pytest.approx(loss_sum / 5, abs=1e-6)
    assert mean_grad == pytest.approx([g / 5 for g in gradient], abs=1e-6)


def test_each_token_may_have_its_own_bounds() -> None:
    eps_low = torch.tensor([0.3, 0.8, 0.3, 0.3, 0.3, 0.3])
    eps_high = torch.tensor([5.0, 3.0, 5.0, 5.0, 5.0, 7.0])
    weight = dis_weight(torch.tensor(LEARNER), torch.tensor(SAMPLER), eps_low, eps_high)
    assert weight.tolist() == pytest.approx([1.10517092, 0.67032005, 0, 0.90483742, 1, 7.3890561], abs=1e-5)


def test_the_interval_is_open() -> None:
    # exp(0) = 1 is exact: with eps_low = 0 the ratio 1 lies on the lower end, with eps_high = 0 on the upper one.
    zero = torch.zeros(1)
    assert dis_weight(zero, zero, 0.0, 5.0) == 0.0
    assert dis_weight(zero, zero, 0.3, 0.0) == 0.0
    assert dis_weight(zero, zero, 1e-6, 1e-6) == 1.0


def test_overflowing_ratio_is_selected_away() -> None:
    """DIS-02."""
    loss, gradient = loss_and_gradient([-0.1, -0.7, -2.0], [-1000.1, -0.7, -1.9], [2.0, 1, -1], [1, 1, 1], **REASONING)
    assert loss == pytest.approx(-1.10967484, abs=1e-6)
    assert gradient == pytest.approx([0, -1, 0.90483742], abs=1e-6)
    assert gradient[0] == 0.0


@pytest.mark.parametrize("learner", [NAN, INF, -INF])
@pytest.mark.parametrize("sampler", [-0.5, NAN, -INF])
def test_action_token_without_a_finite_ratio_is_rejected(learner: float, sampler: float) -> None:
    loss, gradient = loss_and_gradient([learner, -0.5], [sampler, -0.5], [1.0, 1.0], [1, 1], **REASONING)
    assert loss == 0.5
    assert gradient == [0.0, -1.0]


def test_masked_fillers_change_nothing() -> None:
    """DIS-04."""
    loss, gradient = loss_and_gradient(
        [-1e10, -0.5, -0.4, NAN], [0.0, -0.5, -0.3, -INF], [NAN, 1, -2, NAN], [0, 1, 1, 0], **REASONING
    )
    clean = loss_and_gradient([-0.5, -0.4], [-0.5, -0.3], [1.0, -2.0], [1, 1], **REASONING)
    assert loss == pytest.approx(-0.22386993, abs=1e-6)
    assert gradient == pytest.approx([0, -1, 1.80967484, 0], abs=1e-6)
    assert (loss, gradient) == (clean[0], [0.0, *clean[1], 0.0])


@pytest.mark.parametrize("garbage", [0.0, 123.0, -1e10, NAN, INF, -INF])
def test_masked_garbage_changes_no_bit_of_loss_gradient_or_statistics(garbage: float) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(200, generator=generator) < 0.5
    learner, sampler, advantage = (-torch.rand(200, generator=generator) for _ in range(3))
    lag = torch.randint(0, 3, (200,), generator=generator)

    def run(filler: float, lag_filler: int):
        given = [x.where(mask, filler) for x in (learner, sampler, advantage)]
        given[0].requires_grad_()
        loss = dis_loss(*given, mask, num_action_tokens=100, **REASONING)
        loss.backward()
        statistics = dis_statistics(
            *given[:2], mask, lag_t=lag.where(mask, lag_filler), num_lags=3, **REASONING
        )
        return [loss.detach(), given[0].grad, *statistics.values()]

    for dirty, clean in zip(run(garbage, -7), run(0.0, 0)):
        assert torch.equal(dirty, clean)


def test_weight_and_advantage_carry_no_gradient() -> None:
    learner = torch.tensor([-0.5], requires_grad=True)
    advantage = torch.tensor([2.0], requires_grad=True)
    assert not dis_weight(learner, torch.tensor([-0.6]), **REASONING).requires_grad
    dis_loss(
        learner, torch.tensor([-0.6]), advantage, torch.tensor([True]), num_action_tokens=1, **REASONING
    ).backward()
    assert advantage.grad is None
    assert learner.grad.item() == pytest.approx(-2 * math.exp(0.1))  # not (1 + logp) times that


def test_step_without_action_tokens_has_loss_zero_and_no_gradient() -> None:
    """NRM-04: what the trainer sees of a step without signal is finite."""
    loss, gradient = loss_and_gradient([NAN, -1.0], [0.0, 0.0], [1.0, 1.0], [0, 0], num_action_tokens=0, **REASONING)
    assert loss == 0.0
    assert gradient == [0.0, 0.0]
    statistics = dis_statistics(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool), **REASONING)
    assert all(math.isfinite(number) for number in dis_metrics(statistics).values())


@pytest.mark.parametrize("column", ["learner", "sampler", "advantage", "mask"])
def test_a_column_beside_rows_is_refused_and_not_broadcast(column) -> None:
    given = {name: torch.ones(3) for name in ("learner", "sampler", "advantage", "mask")}
    given[column] = given[column][:, None]
    with pytest.raises(ValueError, match=r"\[3, 1\].*one shape"):
        dis_loss(*given.values(), num_action_tokens=3, **REASONING)


def test_rows_of_trajectories_give_what_packed_tokens_give() -> None:
    packed = loss_and_gradient(LEARNER, SAMPLER, ADVANTAGE, MASK, num_action_tokens=5, **CODING)
    rows = [[numbers[:3], numbers[3:]] for numbers in (LEARNER, SAMPLER, ADVANTAGE, MASK)]
    loss, gradient = loss_and_gradient(*rows, num_action_tokens=5, **CODING)
    assert loss == pytest.approx(packed[0])
    assert gradient[0] + gradient[1] == packed[1]


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_a_mask_may_be_numbers_and_log_probs_narrow(kind) -> None:
    expected = loss_and_gradient(LEARNER, SAMPLER, ADVANTAGE, MASK, **REASONING)
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 0.0), (torch.bfloat16, 2e-2)):
        learner = torch.tensor(LEARNER, dtype=dtype, requires_grad=True)
        others = torch.tensor(SAMPLER, dtype=dtype), torch.tensor(ADVANTAGE, dtype=dtype), torch.tensor(MASK).to(kind)
        loss = dis_loss(learner, *others, num_action_tokens=1, **REASONING)
        loss.backward()
        assert loss.dtype == torch.promote_types(dtype, torch.float32) and learner.grad.dtype == dtype
        assert loss.item() == pytest.approx(expected[0], abs=tolerance)
        assert learner.grad.tolist() == pytest.approx(expected[1], abs=tolerance)


def test_any_split_of_the_tokens_gives_the_same_loss_and_gradient() -> None:
    """NRM-02 for the policy loss."""
    whole = loss_and_gradient(LEARNER, SAMPLER, ADVANTAGE, MASK, num_action_tokens=5, **CODING)
    for cuts in ([0, 3, 6], [0, 1, 4, 4, 6]):
        parts = [
            loss_and_gradient(
                LEARNER[a:b], SAMPLER[a:b], ADVANTAGE[a:b], MASK[a:b], num_action_tokens=5, **CODING
            )
            for a, b in zip(cuts, cuts[1:])
        ]
        assert sum(loss for loss, _ in parts) == pytest.approx(whole[0], abs=1e-7)
        assert [g for _, gradient in parts for g in gradient] == pytest.approx(whole[1], abs=1e-7)


def test_mean_over_trajectories() -> None:
    # Ratio 1 everywhere: token losses 1, 3 | 4, trajectory means 2 and 4, their mean 3.
    mask = torch.ones(3, dtype=torch.bool)
    logp = torch.tensor([-1.0, -3.0, -4.0])
    denominator = trajectory_mean_denominator(mask, torch.tensor([0, 2, 3]), num_trajectories=2)
    loss = dis_loss(logp, logp, torch.ones(3), mask, num_action_tokens=denominator, **REASONING)
    assert loss.item() == pytest.approx(3.0)


# ---- statistics -------------------------------------------------------------------------------------------------


def statistics_of_ratios(ratios: list[float], mask: list[int], **more) -> dict[str, torch.Tensor]:
    learner = torch.tensor(ratios, dtype=torch.float64).log()
    return dis_statistics(learner, torch.zeros_like(learner), torch.tensor(mask), **REASONING, **more)


def test_fractions_are_over_action_tokens() -> None:
    """DIS-08."""
    metrics = dis_metrics(statistics_of_ratios([0.5, 1.0, 7.0, 50.0, 1.2, 0.9], [1, 1, 1, 0, 0, 1]))
    assert metrics["dis/rejected"] == 0.5
    assert metrics["dis/rejected_low"] == 0.25
    assert metrics["dis/rejected_high"] == 0.25
    assert metrics["dis/rejected_nonfinite"] == 0.0
    assert metrics["dis/num_tokens"] == 4
    assert metrics["dis/mean_ratio"] == pytest.approx((0.5 + 1 + 7 + 0.9) / 4)
    k3 = [r - 1 - math.log(r) for r in (0.5, 1.0, 7.0, 0.9)]
    assert metrics["dis/kl_k3"] == pytest.approx(sum(k3) / 4)
    assert metrics["dis/max_abs_logp_diff"] == pytest.approx(math.log(7))


def test_rejected_tokens_of_the_statistics_are_those_of_the_loss() -> None:
    generator = torch.Generator().manual_seed(1)
    learner, sampler = torch.randn(2, 1000, generator=generator) * 2
    learner[::50], sampler[7::50], sampler[9::50] = NAN, -INF, -1000.0
    mask = torch.rand(1000, generator=generator) < 0.7
    num_zero = ((dis_weight(learner, sampler, **REASONING) == 0) & mask).sum().item()
    metrics = dis_metrics(dis_statistics(learner, sampler, mask, **REASONING))
    assert metrics["dis/rejected"] * mask.sum().item() == pytest.approx(num_zero)
    assert metrics["dis/rejected_nonfinite"] > 0
    assert all(math.isfinite(number) for number in metrics.values())


def test_statistics_by_lag() -> None:
    metrics = dis_metrics(
        statistics_of_ratios(
            [1.0, 1.0, 0.5, 7.0, 1.0], [1, 1, 1, 1, 0], lag_t=torch.tensor([0, 0, 2, 2, -1]), num_lags=4
        )
    )
    assert metrics["dis/rejected/lag0"] == 0.0
    assert metrics["dis/num_tokens/lag0"] == 2
    assert metrics["dis/rejected_low/lag2"] == 0.5
    assert metrics["dis/rejected_high/lag2"] == 0.5
    assert not any(name.endswith(("lag1", "lag3")) for name in metrics)  # no token has them


@pytest.mark.parametrize("lag", [-1, 4])
def test_lag_outside_the_run_is_refused(lag: int) -> None:
    with pytest.raises(ValueError, match=f"lag {lag}"):
        statistics_of_ratios([1.0], [1], lag_t=torch.tensor([lag]), num_lags=4)


def test_disagreement_at_equal_weights_is_counted() -> None:
    learner = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    sampler = torch.tensor([-1.0, -1.00005, -1.0002, -3.0])
    metrics = dis_metrics(dis_statistics(learner, sampler, torch.ones(4), **REASONING))
    assert metrics["dis/logp_apart"] == 0.5
    assert metrics["dis/max_abs_logp_diff"] == pytest.approx(2.0)


def test_merged_parts_equal_the_whole() -> None:
    ratios, mask = [0.5, 1.0, 7.0, 50.0, 1.2, 0.9], [1, 1, 1, 0, 0, 1]
    lag = torch.tensor([0, 1, 1, 0, 0, 1])
    whole = statistics_of_ratios(ratios, mask, lag_t=lag, num_lags=2)
    parts = [
        statistics_of_ratios(ratios[a:b], mask[a:b], lag_t=lag[a:b], num_lags=2) for a, b in ((0, 2), (2, 2), (2, 6))
    ]
    merged = merged_dis_statistics(parts)
    assert merged.keys() == whole.keys()
    for name in whole:
        torch.testing.assert_close(merged[name], whole[name])
