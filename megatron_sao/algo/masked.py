"""Sums and means over action tokens, and the denominators of a loss.

Invariants:
- masked slots are never selected: `0 * inf` and `0 * NaN` are NaN, therefore nothing here multiplies by a mask;
- the gradient at a masked slot is exactly 0;
- a denominator counts tokens of the whole step and is clamped to 1 once, there, never sample by sample.
"""

import torch
from torch import Tensor


def check_one_shape(**tensors: Tensor) -> None:
    """Raises: ValueError naming the tensors whose shapes differ: broadcast, they would give a wrong number silently."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{shapes}: all must have one shape")


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """x where `mask` is True, exactly 0 elsewhere; gradient 0 there. Shapes must broadcast."""
    return torch.where(mask.bool(), x, 0.0)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x over the tokens of `mask`.

    Args:
        x: float, any shape; masked slots may hold anything, NaN and inf included.
        mask: bool (or 0/1), the same shape.
    Returns: scalar, with gradient (exactly 0 at masked slots); 0 when the mask is empty.
    """
    return masked(x, mask).sum()


def masked_mean(x: Tensor, mask: Tensor, count: int | Tensor | None = None) -> Tensor:
    """Mean of x over the tokens of `mask`: masked_sum(x) / max(1, count).

    Args:
        x: float, any shape; masked slots may hold anything.
        mask: bool (or 0/1), the same shape.
        count: tokens to divide by, for a mean over more than this call sees (other micro-batches, other ranks);
            None = the tokens of `mask`. The results of all parts then add up to the mean of the whole.
    Returns: scalar, with gradient; 0 when nothing is counted.
    """
    return masked_sum(x, mask) / at_least_one(mask.bool().sum() if count is None else count)


def at_least_one(count: int | Tensor) -> int | Tensor:
    """`count`, or 1 where it is 0, so that a step without action tokens has loss 0 instead of 0 / 0."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def trajectory_mean_denominator(action_mask_t: Tensor, trajectory_start: Tensor, num_trajectories: int) -> Tensor:
    """Per-token denominators that turn a token sum into a mean over trajectories of each one's token mean.

    denominator_t = num_trajectories * (action tokens of the trajectory of t). Pass it as `num_action_tokens` of a loss.

    Args:
        action_mask_t: bool [S], packed.
        trajectory_start: int64 [N + 1]; trajectory n is tokens [start[n], start[n + 1]).
        num_trajectories: trajectories with an action token in the whole step, over all micro-batches and ranks.
    Returns: float32 [S], at least 1, no gradient.
    """
    num_before = torch.nn.functional.pad(action_mask_t.bool().cumsum(0), (1, 0))
    num_actions_n = num_before[trajectory_start[1:]] - num_before[trajectory_start[:-1]]
    num_actions_t = torch.repeat_interleave(num_actions_n, trajectory_start.diff())
    return at_least_one(num_actions_t * num_trajectories).to(torch.float32)
