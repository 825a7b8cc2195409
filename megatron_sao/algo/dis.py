"""Direct double-sided importance sampling (DIS): the policy loss of SAO and what is reported about it.

Invariants:
- ratio = exp(logp_learner - logp_sampler), always learner over sampler, both at the sampling temperature;
- a token outside the open interval (1 - eps_low, 1 + eps_high), or whose ratio is not finite, gives exactly 0 to loss
  and gradient, whatever the sign of its advantage; it still counts in the denominator;
- masked slots may hold anything: they change neither loss nor gradient nor statistics.
"""

import torch
from torch import Tensor

from megatron_sao.algo.masked import at_least_one, check_one_shape, masked

LOGP_TOLERANCE = 1e-4  # learner and sampler with the same weights agree to this, router ties excepted


@torch.no_grad()
def dis_weight(
    logp_learner: Tensor, logp_sampler: Tensor, eps_low: float | Tensor, eps_high: float | Tensor
) -> Tensor:
    """Weight of each token in the policy gradient.

    r = exp(logp_learner - logp_sampler); weight = r if 1 - eps_low < r < 1 + eps_high, else 0.

    Args:
        logp_learner, logp_sampler: float, one shape; nats. Not finite: weight 0.
        eps_low, eps_high: numbers, or one per token (domains mixed in a batch).
    Returns: float32 or wider, the shape of `logp_learner`; no gradient.
    Raises: ValueError: the shapes of the log-probs differ.
    Source: SAO (arXiv 2607.07508) equations (1)-(2).
    """
    check_one_shape(logp_learner=logp_learner, logp_sampler=logp_sampler)
    ratio = _ratio(logp_learner, logp_sampler)
    is_kept = (ratio > 1 - eps_low) & (ratio < 1 + eps_high) & ratio.isfinite()
    return torch.where(is_kept, ratio, 0.0)


def dis_loss(
    logp_learner: Tensor,
    logp_sampler: Tensor,
    advantage: Tensor,
    action_mask: Tensor,
    *,
    eps_low: float | Tensor,
    eps_high: float | Tensor,
    num_action_tokens: int | Tensor,
) -> Tensor:
    """The policy loss: - sum_t weight_t * A_t * logp_learner_t / num_action_tokens.

    Args:
        logp_learner: float [S], nats, with gradient; masked slots may hold anything.
        logp_sampler: float [S], nats, as the engine reported them; masked slots may hold anything.
        advantage: float [S]; masked slots may hold anything. Treated as a constant.
        action_mask: bool (or 0/1) [S].
        eps_low, eps_high: numbers, or [S].
        num_action_tokens: action tokens of the WHOLE step, rejected ones included, over all micro-batches and ranks, so
            that the losses of all parts add up. 0 = no signal: loss 0. Or [S], one denominator for each token
            (`masked.trajectory_mean_denominator`).
    Returns: scalar; its gradient at masked and rejected tokens is exactly 0.
    Raises: ValueError: shapes differ.
    Source: SAO (arXiv 2607.07508) equation (3).
    """
    check_one_shape(
        logp_learner=logp_learner, logp_sampler=logp_sampler, advantage=advantage, action_mask=action_mask
    )
    weight = dis_weight(masked(logp_learner, action_mask), masked(logp_sampler, action_mask), eps_low, eps_high)
    return policy_gradient_loss(weight, logp_learner, advantage, action_mask, num_action_tokens=num_action_tokens)


def policy_gradient_loss(
    weight: Tensor, logp_learner: Tensor, advantage: Tensor, action_mask: Tensor, *, num_action_tokens: int | Tensor
) -> Tensor:
    """- sum_t weight_t * A_t * logp_learner_t / num_action_tokens, weight and advantage taken as constants.

    Args: as `dis_loss`; a token of weight 0 is left out, so its log-prob and advantage may be anything.
    Returns: scalar with gradient to `logp_learner` only.
    Raises: ValueError: shapes differ.
    """
    check_one_shape(weight=weight, logp_learner=logp_learner, advantage=advantage, action_mask=action_mask)
    is_kept = action_mask.bool() & (weight != 0)
    coefficient = masked(weight * advantage, is_kept).detach()
    loss_t = -coefficient * masked(logp_learner.to(coefficient.dtype), is_kept)
    return (loss_t / at_least_one(num_action_tokens)).sum()


@torch.no_grad()
def dis_statistics(
    logp_learner: Tensor,
    logp_sampler: Tensor,
    action_mask: Tensor,
    *,
    eps_low: float | Tensor,
    eps_high: float | Tensor,
    lag_t: Tensor | None = None,
    num_lags: int = 0,
) -> dict[str, Tensor]:
    """Counts and sums of one micro-batch from which `dis_metrics` makes rates, once all parts are merged.

    Args:
        logp_learner, logp_sampler, action_mask, eps_low, eps_high: as in `dis_loss`.
        lag_t: int [S]; learner's version minus the version that wrote the token; masked slots may hold anything.
        num_lags: lags 0 ... num_lags - 1 are reported one by one (max_staleness + 1 in a run). Every rank passes the
            same number, so that the tensors add up.
    Returns: each float64 [1 + num_lags]: entry 0 is all action tokens, entry 1 + k those of lag k. Names that begin
        with `max_` merge by maximum, all others by sum (`merged_dis_statistics`; an all-reduce over ranks).
    Raises: ValueError: shapes differ, or an action token's lag lies outside [0, num_lags).
    """
    check_one_shape(logp_learner=logp_learner, logp_sampler=logp_sampler, action_mask=action_mask)
    mask = action_mask.bool()
    learner, sampler = masked(logp_learner, mask).double(), masked(logp_sampler, mask).double()
    ratio = _ratio(logp_learner, logp_sampler)  # as the loss sees it: float32 stays float32
    is_finite = ratio.isfinite() & learner.isfinite() & sampler.isfinite()
    log_ratio = masked(learner - sampler, is_finite)
    members = _members(mask, lag_t, num_lags)

    def count(condition: Tensor) -> Tensor:
        return torch.stack([(member & condition).sum() for member in members]).double()

    def total(x: Tensor) -> Tensor:
        return torch.stack([masked(x, member & is_finite).sum() for member in members])

    def largest(x: Tensor) -> Tensor:
        return torch.stack([_max_or_zero(masked(x, member & is_finite)) for member in members])

    return {
        "num_tokens": count(mask),
        "num_finite": count(is_finite),
        "num_low": count(is_finite & (ratio <= 1 - eps_low)),
        "num_high": count(is_finite & (ratio >= 1 + eps_high)),
        "num_apart": count(is_finite & (log_ratio.abs() > LOGP_TOLERANCE)),
        "sum_ratio": total(log_ratio.exp()),
        "sum_k3": total(log_ratio.expm1() - log_ratio),  # r - 1 - log r, without cancellation near r = 1
        "sum_abs_logp_diff": total(log_ratio.abs()),
        "max_abs_logp_diff": largest(log_ratio.abs()),
    }


def merged_dis_statistics(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """`dis_statistics` of several micro-batches as if they were one."""
    return {
        name: torch.stack([part[name] for part in parts]).amax(0)
        if name.startswith("max_")
        else torch.stack([part[name] for part in parts]).sum(0)
        for name in parts[0]
    }


def dis_metrics(statistics: dict[str, Tensor]) -> dict[str, float]:
    """Rates over action tokens: `dis/rejected_low`, ..., and the same by lag, `dis/rejected_low/lag0`, ...

    rejected_* and logp_apart are fractions of the action tokens; ratio, k3 KL and |logp difference| are over tokens
    with a finite ratio. A lag that no token has is left out; without any action token all are 0.
    """
    metrics: dict[str, float] = {}
    columns = {name: values.tolist() for name, values in statistics.items()}
    for scope, num_tokens in enumerate(columns["num_tokens"]):
        if scope > 0 and num_tokens == 0:
            continue
        suffix = "" if scope == 0 else f"/lag{scope - 1}"
        row = {name: values[scope] for name, values in columns.items()}
        num_tokens, num_finite = max(num_tokens, 1.0), max(row["num_finite"], 1.0)
        num_nonfinite = row["num_tokens"] - row["num_finite"]
        num_rejected = row["num_low"] + row["num_high"] + num_nonfinite
        metrics[f"dis/rejected{suffix}"] = num_rejected / num_tokens
        metrics[f"dis/rejected_low{suffix}"] = row["num_low"] / num_tokens
        metrics[f"dis/rejected_high{suffix}"] = row["num_high"] / num_tokens
        metrics[f"dis/rejected_nonfinite{suffix}"] = num_nonfinite / num_tokens
        metrics[f"dis/mean_ratio{suffix}"] = row["sum_ratio"] / num_finite
        metrics[f"dis/kl_k3{suffix}"] = row["sum_k3"] / num_finite
        metrics[f"dis/mean_abs_logp_diff{suffix}"] = row["sum_abs_logp_diff"] / num_finite
        metrics[f"dis/max_abs_logp_diff{suffix}"] = row["max_abs_logp_diff"]
        metrics[f"dis/logp_apart{suffix}"] = row["num_apart"] / num_tokens
        metrics[f"dis/num_tokens{suffix}"] = row["num_tokens"]
    return metrics


def _ratio(logp_learner: Tensor, logp_sampler: Tensor) -> Tensor:
    """Learner over sampler; computed in float32 at least, since bfloat16 cannot tell 1.003 from 1."""
    wide = torch.promote_types(torch.promote_types(logp_learner.dtype, logp_sampler.dtype), torch.float32)
    return (logp_learner.to(wide) - logp_sampler.to(wide)).exp()


def _members(mask: Tensor, lag_t: Tensor | None, num_lags: int) -> list[Tensor]:
    """Masks of: all action tokens, then those of each lag."""
    if lag_t is None:
        return [mask] + [torch.zeros_like(mask)] * num_lags
    outside = mask & ((lag_t < 0) | (lag_t >= num_lags))
    if bool(outside.any()):
        raise ValueError(f"lag {int(lag_t[outside][0])} of an action token; allowed: 0 to {num_lags - 1}")
    return [mask] + [mask & (lag_t == lag) for lag in range(num_lags)]


def _max_or_zero(x: Tensor) -> Tensor:
    return x.amax() if x.numel() else x.new_zeros(())
