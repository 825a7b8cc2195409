"""Targets and advantages of a share, computed on whole trajectories before anything is cut."""

import torch

from megatron_sao.algo.gae import length_adaptive_lambda_n, packed_plain_gae, packed_skip_observation_gae
from megatron_sao.algo.masked import masked_sum
from megatron_sao.algo.policy_losses import group_advantages, running_mean_advantages, token_advantages, turn_level_gae
from megatron_sao.algo.statistics import explained_variance, explained_variance_sums, moments, whitened
from megatron_sao.config.algo import Algo
from megatron_sao.data.share import Share
from megatron_sao.parallel.exchange import merge_over_data


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
    return whitened(advantage, mask, merge_over_data({"moments": moments(advantage, mask)})["moments"])


def group_baseline_advantages(share: Share) -> torch.Tensor:
    """GRPO's advantages, (reward - mean of the prompt's group) / std, on every action token: float32 [S]."""
    advantage_n = group_advantages(share.step_reward_n, share.step_group_n)[share.numbers]
    return token_advantages(advantage_n, share.batch.action_mask, share.batch.starts)


class RunningMean:
    """The baseline of REINFORCE without a value model: the running mean of past rewards, one for all prompts."""

    def __init__(self):
        self.mean: float | None = None

    def advantages(self, share: Share) -> torch.Tensor:
        """reward - (mean before this step), on every action token: float32 [S]. Effect: takes the step's rewards in."""
        advantage_n, self.mean = running_mean_advantages(share.step_reward_n, self.mean)
        return token_advantages(advantage_n[share.numbers], share.batch.action_mask, share.batch.starts)


def policy_lambda(share: Share, algo: Algo) -> torch.Tensor:
    """lambda of each trajectory: [N]. Length-adaptive: 1 - 1 / (alpha * l), l = how many steps GAE takes over it.

    l counts action tokens; all tokens from the first action on (`length_counts` "response"); or, where a whole turn is
    one action, turns.
    """
    batch = share.batch
    if algo.policy_lambda != "length_adaptive":
        return torch.full((batch.num_trajectories,), float(algo.policy_lambda))
    owner, mask = batch.trajectory_of_token(), batch.action_mask
    before = _cumulative_inside(mask, batch.starts)
    counted = mask
    if algo.action_level != "token":
        counted = mask & _is_first_action_of_turn(owner, batch.turn_t, mask)
    elif algo.length_counts == "response":
        counted = mask | (before > 0)
    lengths = torch.zeros(batch.num_trajectories, dtype=torch.int64).index_add(0, owner, counted.long())
    return length_adaptive_lambda_n(lengths, algo.alpha)


def _cumulative_inside(mask: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """How many tokens of `mask` come before each token in its own trajectory: int64 [S]."""
    before = torch.nn.functional.pad(mask.long().cumsum(0), (1, 0))
    return before[:-1] - torch.repeat_interleave(before[starts[:-1]], starts.diff())


def _is_first_action_of_turn(owner: torch.Tensor, turn_t: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """True at the first action token of each turn: bool [S]."""
    at = mask.nonzero().squeeze(-1)
    key = torch.stack([owner[at], turn_t[at]])
    is_new = torch.ones(len(at), dtype=torch.bool)
    is_new[1:] = (key[:, 1:] != key[:, :-1]).any(0)
    first = torch.zeros_like(mask)
    first[at[is_new]] = True
    return first


def _estimate(share: Share, value: torch.Tensor, algo: Algo, lam: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch = share.batch
    given = (batch.reward_t, value, batch.action_mask)
    options = dict(gamma=algo.gamma, lam=lam, bootstrap_value=_bootstrap(share, value, algo))
    if algo.action_level != "token":
        return turn_level_gae(*given, batch.turn_t, batch.starts, action_level=algo.action_level, **options)
    estimator = {"skip_observation": packed_skip_observation_gae, "plain": packed_plain_gae}[algo.gae]
    return estimator(*given, batch.starts, **options)


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
    mask = share.batch.action_mask
    totals = merge_over_data(
        {
            "explained": explained_variance_sums(value, target, mask),
            "value": masked_sum(value, mask),
            "target": masked_sum(target, mask),
        }
    )
    count = max(share.num_step_action_tokens, 1)
    return {
        "value/explained_variance": explained_variance(totals["explained"]),
        "value/mean": float(totals["value"]) / count,
        "value/target_mean": float(totals["target"]) / count,
    }
