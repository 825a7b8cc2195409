"""Losses of the value model: squared error, and the categorical HL-Gauss loss.

Invariants:
- values never meet a temperature: neither loss nor readout knows one;
- targets and old values are constants; masked slots may hold anything and get gradient exactly 0;
- sums are divided by the action tokens of the whole step, as in `dis.dis_loss`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sao.algo.masked import at_least_one, check_one_shape, masked


def value_loss(
    value: Tensor,
    target: Tensor,
    action_mask: Tensor,
    *,
    num_action_tokens: int | Tensor,
    clip: float | None = None,
    old_value: Tensor | None = None,
) -> Tensor:
    """sum_t 0.5 * (V_t - target_t)^2 / num_action_tokens.

    With `clip` = c (PPO's value clipping): the larger of this and the same for V clamped to old_value +- c.

    Args:
        value: float [S], with gradient; masked slots may hold anything.
        target, old_value: float [S], constants; masked slots may hold anything.
        action_mask: bool (or 0/1) [S].
        num_action_tokens: action tokens of the whole step (see `dis.dis_loss`); 0 = no signal: loss 0.
        clip: > 0, in units of the value; None = off.
    Returns: scalar with gradient.
    Raises: ValueError: shapes differ; `clip` without `old_value`, or not positive.
    """
    check_one_shape(value=value, target=target, action_mask=action_mask)
    value, target = masked(value, action_mask), masked(target.detach(), action_mask)
    loss_t = 0.5 * (value - target).square()
    if clip is not None:
        if old_value is None or not clip > 0:
            raise ValueError(f"clip = {clip} needs clip > 0 and old_value (value.value_clip; 0 there turns it off)")
        check_one_shape(value=value, old_value=old_value)
        old_value = masked(old_value.detach(), action_mask)
        near_value = old_value + (value - old_value).clamp(-clip, clip)
        loss_t = torch.maximum(loss_t, 0.5 * (near_value - target).square())
    return (loss_t / at_least_one(num_action_tokens)).sum()


@dataclass(frozen=True)
class HLGaussSupport:
    """The interval of values that a categorical value head can express, cut into `num_bins` equal bins."""

    low: float
    high: float
    num_bins: int
    sigma: float  # width of the Gaussian put around a target, in units of the value; about 0.75 of a bin

    def __post_init__(self) -> None:
        if not (self.low < self.high and self.num_bins >= 2 and self.sigma > 0):
            raise ValueError(f"{self}; allowed: low < high, num_bins >= 2, sigma > 0 (value.hl_gauss_*)")

    def edges(self, like: Tensor) -> Tensor:
        """Bin edges [num_bins + 1], on the device and in the dtype of `like`."""
        return torch.linspace(self.low, self.high, self.num_bins + 1, dtype=like.dtype, device=like.device)

    def centers(self, like: Tensor) -> Tensor:
        """Bin centers [num_bins]."""
        edges = self.edges(like)
        return (edges[:-1] + edges[1:]) / 2


def hl_gauss_value(logits: Tensor, support: HLGaussSupport) -> Tensor:
    """The value that the logits stand for: sum_b softmax(logits)_b * center_b.

    Args: logits: float [..., num_bins]. Returns: float [...], float32 at least, with gradient.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.softmax(-1) @ support.centers(logits)


def hl_gauss_target(target: Tensor, support: HLGaussSupport) -> Tensor:
    """Probability of each bin under a Gaussian around the target, cut off at both ends of the support.

    p_b = (Phi((edge_{b+1} - t) / sigma) - Phi((edge_b - t) / sigma)) / (Phi(last edge) - Phi(first edge))

    Args: target: float [...], finite; clamped to the support. Returns: float [..., num_bins], sums to 1.
    """
    edges = support.edges(target)
    target = target.clamp(support.low, support.high)
    cdf = torch.special.erf((edges - target[..., None]) / (support.sigma * math.sqrt(2.0)))
    return cdf.diff(dim=-1) / (cdf[..., -1:] - cdf[..., :1])


def hl_gauss_loss(
    logits: Tensor, target: Tensor, action_mask: Tensor, *, num_action_tokens: int | Tensor, support: HLGaussSupport
) -> Tensor:
    """sum_t cross_entropy(hl_gauss_target(target_t), logits_t) / num_action_tokens.

    Args:
        logits: float [S, num_bins], with gradient; masked rows may hold anything.
        target: float [S]; masked slots may hold anything.
        action_mask, num_action_tokens: as in `value_loss`.
        support: the bins.
    Returns: scalar with gradient.
    Source: HL-Gauss, Farebrother et al. 2024 (arXiv 2403.03950).
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_probs = masked(logits.to(wide), action_mask[..., None]).log_softmax(-1)
    probs = hl_gauss_target(masked(target.detach().to(wide), action_mask), support)
    loss_t = masked(-(probs * log_probs).sum(-1), action_mask)
    return (loss_t / at_least_one(num_action_tokens)).sum()
