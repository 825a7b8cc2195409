"""Statistics that must be global: each has a part that sums over local tokens and a part that finishes.

Add the sums of all micro-batches and ranks in between (a rank without action tokens joins with zeros: it must not stay
away from the collective). Invariants: float64; masked slots may hold anything; every result is finite.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sao.algo.masked import masked

NEGLIGIBLE = 1e-12  # a variance below this share of the mean square is round-off of float64 sums


@torch.no_grad()
def moments(x: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares of x over the tokens of `mask`: float64 [3]. Add them up over ranks."""
    mask, x = mask.bool(), masked(x, mask).double()
    return torch.stack([mask.sum().double(), x.sum(), x.square().sum()])


def variance(moments: Tensor, *, unbiased: bool) -> float:
    """Variance from `moments` [3]; 0 with fewer than two numbers or where round-off is all there is."""
    count, total, squares = moments.tolist()
    if count < 2:
        return 0.0
    scatter = squares - total * total / count
    return 0.0 if scatter <= NEGLIGIBLE * squares else scatter / (count - 1 if unbiased else count)


@torch.no_grad()
def whitened(x: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """(x - mean) / std over all action tokens of the step; off by default in SAO (algo.whiten).

    Args:
        x: float [S]; masked slots may hold anything.
        mask: bool (or 0/1) [S].
        moments: [3], summed over every micro-batch and rank of the step, so that all use one mean and one std.
    Returns: [S] in the dtype of x, 0 off the mask, no gradient. With fewer than two tokens x is left as it is; when all
        numbers are equal the result is 0. The variance is the unbiased one.
    """
    count, total = moments[:2].tolist()
    if count < 2:
        return masked(x, mask)
    std = variance(moments, unbiased=True) ** 0.5
    if std == 0.0:
        return torch.zeros_like(x)
    return masked((x.double() - total / count) / std, mask).to(x.dtype)


@torch.no_grad()
def explained_variance_sums(value: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """n, sum t, sum t^2, sum e, sum e^2 with error e = target - value: float64 [5]. Add them up over ranks."""
    error = masked(target, mask).double() - masked(value, mask).double()
    return torch.cat([moments(target, mask), moments(error, mask)[1:]])


def explained_variance(sums: Tensor) -> float:
    """1 - Var(target - value) / Var(target): 1 = perfect, 0 = no better than a constant, negative = worse.

    Args: sums: [5] of `explained_variance_sums`, added up. Returns: 0.0 when the targets do not vary at all.
    """
    target_variance = variance(sums[:3], unbiased=False)
    if target_variance == 0.0:
        return 0.0
    return 1.0 - variance(sums[[0, 3, 4]], unbiased=False) / target_variance


@dataclass(frozen=True)
class CalibrationRow:
    """Tokens whose value lies in [low, high): a calibrated value model has mean_value near mean_target."""

    low: float
    high: float
    num_tokens: int
    mean_value: float
    mean_target: float


@torch.no_grad()
def calibration_sums(value: Tensor, target: Tensor, mask: Tensor, *, low: float, high: float, num_bins: int) -> Tensor:
    """Count, sum of values and sum of targets by bin of the value: float64 [3, num_bins]. Add them up over ranks.

    Args:
        value, target: float [S]; masked slots may hold anything.
        mask: bool (or 0/1) [S].
        low, high, num_bins: equal bins; values outside join the first or the last one.
    """
    mask = mask.bool()
    value, target = value[mask].double(), target[mask].double()
    bin_t = ((value - low) / (high - low) * num_bins).nan_to_num().floor().clamp(0, num_bins - 1).long()
    sums = torch.zeros(3, num_bins, dtype=torch.float64, device=value.device)
    return sums.index_add_(1, bin_t, torch.stack([torch.ones_like(value), value, target]))


def calibration_table(sums: Tensor, *, low: float, high: float) -> list[CalibrationRow]:
    """Rows of the bins that hold a token, from `calibration_sums` added up."""
    num_bins = sums.shape[1]
    width = (high - low) / num_bins
    return [
        CalibrationRow(low + i * width, low + (i + 1) * width, int(count), value / count, target / count)
        for i, (count, value, target) in enumerate(sums.T.tolist())
        if count > 0
    ]


def calibration_error(rows: list[CalibrationRow]) -> float:
    """Mean over tokens of |mean value - mean target| of their bin; 0.0 without tokens."""
    num_tokens = sum(row.num_tokens for row in rows)
    return sum(row.num_tokens * abs(row.mean_value - row.mean_target) for row in rows) / max(num_tokens, 1)
