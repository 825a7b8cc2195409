"""Global statistics from sums."""

import pytest
import torch

from megatron_sao.algo.statistics import (
    calibration_error,
    calibration_sums,
    calibration_table,
    explained_variance,
    explained_variance_sums,
    moments,
    whitened,
)

NAN, INF = float("nan"), float("inf")


def test_whitening_uses_the_statistics_of_all_ranks() -> None:
    """NRM-06, the pure part: a rank without tokens joins with zeros."""
    ranks = [
        (torch.tensor([1.0, 3.0]), torch.tensor([1, 1])),
        (torch.zeros(0), torch.zeros(0)),
        (torch.tensor([5.0, 100.0]), torch.tensor([1, 0])),
    ]
    total = torch.stack([moments(x, mask) for x, mask in ranks]).sum(0)
    assert total.tolist() == [3, 9, 35]  # mean 3, unbiased variance (35 - 27) / 2 = 4
    assert [whitened(x, mask, total).tolist() for x, mask in ranks] == [[-1, 0], [], [1, 0]]


@pytest.mark.parametrize(("mask", "expected"), [([1, 0], [0.4, 0]), ([0, 0], [0, 0])])
def test_fewer_than_two_tokens_are_left_as_they_are(mask: list[int], expected: list[float]) -> None:
    """NRM-07."""
    x, mask = torch.tensor([0.4, 7.0]), torch.tensor(mask)
    assert whitened(x, mask, moments(x, mask)).tolist() == pytest.approx(expected)


def test_equal_numbers_whiten_to_zero() -> None:
    x = torch.full((1000,), 0.1)
    assert not whitened(x, torch.ones(1000), moments(x, torch.ones(1000))).any()


def test_explained_variance_by_hand_and_from_parts() -> None:
    # targets 0 1 2 3: variance 1.25; errors 0.5 -0.5 0.5 -0.5: variance 0.25; 1 - 0.25 / 1.25 = 0.8
    value, target = torch.tensor([-0.5, 1.5, 1.5, 3.5, NAN]), torch.tensor([0.0, 1, 2, 3, INF])
    mask = torch.tensor([1, 1, 1, 1, 0])
    sums = explained_variance_sums(value, target, mask)
    assert explained_variance(sums) == pytest.approx(0.8)
    parts = [explained_variance_sums(value[i], target[i], mask[i]) for i in (slice(0, 1), slice(1, 1), slice(1, 5))]
    assert torch.stack(parts).sum(0).tolist() == sums.tolist()
    assert explained_variance(explained_variance_sums(target, target, mask)) == 1.0


def test_explained_variance_ignores_a_constant_offset_and_can_be_negative() -> None:
    target, mask = torch.tensor([0.0, 1, 2, 3]), torch.ones(4)
    assert explained_variance(explained_variance_sums(target + 10, target, mask)) == pytest.approx(1.0)
    assert explained_variance(explained_variance_sums(-target, target, mask)) == pytest.approx(-3.0)


@pytest.mark.parametrize("targets", [[], [1.0], [0.1] * 1000])
def test_explained_variance_of_targets_that_do_not_vary(targets: list[float]) -> None:
    target = torch.tensor(targets)
    value = torch.linspace(0, 1, len(targets))
    assert explained_variance(explained_variance_sums(value, target, torch.ones(len(targets)))) == 0.0


@pytest.mark.parametrize("garbage", [NAN, INF, -1e10])
def test_masked_garbage_changes_no_bit(garbage: float) -> None:
    mask = torch.tensor([1, 0, 1, 1])

    def run(filler: float) -> list[torch.Tensor]:
        x, y = torch.tensor([1.0, filler, 2.0, 4.0]), torch.tensor([1.5, filler, 2.0, 3.0])
        return [
            whitened(x, mask, moments(x, mask)),
            explained_variance_sums(x, y, mask),
            calibration_sums(x, y, mask, low=0.0, high=4.0, num_bins=4),
        ]

    for dirty, clean in zip(run(garbage), run(0.0)):
        assert torch.equal(dirty, clean)


def test_calibration_table() -> None:
    value = torch.tensor([-1.0, 0.1, 0.3, 0.6, 0.7, 9.0])
    target = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    sums = calibration_sums(value, target, torch.ones(6), low=0.0, high=1.0, num_bins=4)
    table = calibration_table(sums, low=0.0, high=1.0)
    assert [(row.low, row.high, row.num_tokens) for row in table] == [
        (0.0, 0.25, 2),
        (0.25, 0.5, 1),
        (0.5, 0.75, 2),
        (0.75, 1.0, 1),
    ]
    assert table[2].mean_value == pytest.approx(0.65) and table[2].mean_target == pytest.approx(0.5)


def test_calibration_error_is_the_gap_of_each_bin_weighted_by_its_tokens():
    value, target = torch.tensor([0.1, 0.12, 0.9, float("nan")]), torch.tensor([0.0, 1.0, 1.0, float("nan")])
    bins = dict(low=0.0, high=1.0)
    mask = torch.tensor([True, True, True, False])
    # [0.1, 0.2): mean V 0.11, mean target 0.5, two tokens; [0.9, 1.0): 0.9 and 1.0, one token
    rows = calibration_table(calibration_sums(value, target, mask, num_bins=10, **bins), **bins)
    assert calibration_error(rows) == pytest.approx((2 * 0.39 + 1 * 0.1) / 3)
    assert calibration_error([]) == 0.0
