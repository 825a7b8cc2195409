"""Targets and advantages of a share, computed on whole trajectories before anything is cut."""

import torch

from megatron_sao.algo.gae import length_adaptive_lambda_n, packed_plain_gae, packed_skip_observation_gae
from megatron_sao.algo.statistics import explained_variance, explained_variance_sums, moments, whitened
from megatron_sao.config.algo import Algo
from megatron_sao.data.share import Share
from megatron_sao.parallel.exchange import sum_over_data


def value_targets(share: Share, value: torch.Tensor, algo: Algo) -> torch.Tensor:
    """target_t = A_t(value_lambda) + V_t, the Monte-Carlo return for value_lambda = 1: float32 [S], 0 off the mask."""
    _, returns = _estimate(share, value, algo, torch.tensor(algo.value_lambda))
    return returns


def policy_advantages(share: Share, value: torch.Tensor, algo: Algo) -> torch.Tensor:
    """A_t with each trajectory's own lambda: float32 [S], exactly 0 off the mask.

    Collective: the data axis when `algo.whiten` (statistics are of the whole step).
    """
    advantage, _ = _estimate(share, value, algo, policy_lambda(share, algo))
    if not algo.whiten:
        return advantage
    mask = share.batch.action_mask
    totals = moments(advantage, mask)
    names = [str(i) for i in range(len(totals))]
    summed = sum_over_data(dict(zip(names, totals.tolist(), strict=True)))
    return whitened(advantage, mask, totals.new_tensor([summed[name] for name in names]))


def policy_lambda(share: Share, algo: Algo) -> torch.Tensor:
    """lambda of each trajectory: [N]. Length-adaptive: 1 - 1 / (alpha * l), l = action (or response) tokens."""
    batch = share.batch
    if algo.policy_lambda != "length_adaptive":
        return torch.full((batch.num_trajectories,), float(algo.policy_lambda))
    owner = batch.trajectory_of_token()
    counted = batch.action_mask
    if algo.length_counts == "response":  # everything from the first action token on
        before = counted.long().cumsum(0) - counted.long()
        at_start = before[batch.starts[:-1].clamp(max=max(batch.num_tokens - 1, 0))] if batch.num_tokens else before
        counted = (before - at_start[owner] > 0) | counted
    lengths = torch.zeros(batch.num_trajectories, dtype=torch.int64).index_add(0, owner, counted.long())
    return length_adaptive_lambda_n(lengths, algo.alpha)


def _estimate(share: Share, value: torch.Tensor, algo: Algo, lam: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch = share.batch
    estimator = {"skip_observation": packed_skip_observation_gae, "plain": packed_plain_gae}[algo.gae]
    return estimator(
        batch.reward_t,
        value,
        batch.action_mask,
        batch.starts,
        gamma=algo.gamma,
        lam=lam,
        bootstrap_value=_bootstrap(share, value, algo),
    )


def _bootstrap(share: Share, value: torch.Tensor, algo: Algo) -> torch.Tensor:
    """Value after the last action of each trajectory: 0, or V at the end of a cut one if configured: [N].

    V of the whole cut trajectory is not inferred; V before its last token stands in for it.
    """
    batch = share.batch
    last = value[(batch.starts[1:] - 1).clamp(min=0)] if batch.num_tokens else value.new_zeros(batch.num_trajectories)
    return torch.where(batch.is_cut & torch.tensor(algo.bootstrap_cut), last, torch.zeros_like(last))


def value_quality(share: Share, value: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """Explained variance 1 - Var(target - V) / Var(target) over the action tokens of the step, and means.

    Collective: the data axis.
    """
    sums = sum_over_data(explained_variance_sums(value, target, share.batch.action_mask))
    count = max(share.num_step_action_tokens, 1)
    mask = share.batch.action_mask
    means = sum_over_data({"value": float(value[mask].sum()), "target": float(target[mask].sum())})
    return {
        "value/explained_variance": explained_variance(sums),
        "value/mean": means["value"] / count,
        "value/target_mean": means["target"] / count,
    }
