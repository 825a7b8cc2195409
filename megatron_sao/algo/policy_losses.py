"""The control arms that SAO is compared with: PPO clipping, one-sided masking, group and running-mean baselines, turns.

All of them share `dis.policy_gradient_loss`, the masks and the denominators of SAO, so that an ablation differs in
one thing only. Invariants: as in `dis.py`; advantages of an arm carry no gradient.
"""

import torch
from torch import Tensor

from megatron_sao.algo.dis import dis_weight
from megatron_sao.algo.gae import packed_skip_observation_gae
from megatron_sao.algo.masked import at_least_one, check_one_shape, masked

LOG_RATIO_LIMIT = 20.0  # e^20: far outside every clip range, and finite in float32


def ppo_clip_loss(
    logp_learner: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    action_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    num_action_tokens: int | Tensor,
) -> Tensor:
    """PPO's clipped surrogate: - sum_t min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A) / num_action_tokens.

    Unlike DIS, the ratio itself carries the gradient and a token far out on the harmless side of its sign keeps it.

    Args:
        logp_learner, advantage, action_mask, num_action_tokens: as in `dis.dis_loss`.
        logp_old: float [S], the behaviour policy's; masked slots may hold anything.
        clip_low, clip_high: >= 0.
    Returns: scalar with gradient. Log ratios are clamped to +-20, so that no single token is infinite.
    Raises: ValueError: shapes differ.
    Source: PPO (arXiv 1707.06347) equation (7); two clip widths as in DAPO (arXiv 2503.14476).
    """
    check_one_shape(logp_learner=logp_learner, logp_old=logp_old, advantage=advantage, action_mask=action_mask)
    log_ratio = masked(logp_learner, action_mask) - masked(logp_old.detach(), action_mask)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    advantage = masked(advantage.detach(), action_mask)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    return (-surrogate / at_least_one(num_action_tokens)).sum()


@torch.no_grad()
def one_sided_weight(
    logp_learner: Tensor,
    logp_sampler: Tensor,
    advantage: Tensor,
    eps_low: float | Tensor,
    eps_high: float | Tensor,
) -> Tensor:
    """The weight of DIS with only the side that the update would push further out masked, as PPO does.

    weight = r, but 0 where A > 0 and r >= 1 + eps_high, where A < 0 and r <= 1 - eps_low, or where r is not finite.

    Args: as `dis.dis_weight`, and advantage float [S] (finite on action tokens; elsewhere the weight means nothing).
    Returns: float [S], no gradient; for `dis.policy_gradient_loss`.
    """
    ratio = dis_weight(logp_learner, logp_sampler, torch.inf, torch.inf)  # every finite ratio
    too_high = (advantage > 0) & (ratio >= 1 + eps_high)
    too_low = (advantage < 0) & (ratio <= 1 - eps_low)
    return torch.where(too_high | too_low, 0.0, ratio)


@torch.no_grad()
def group_advantages(reward_n: Tensor, group_n: Tensor, *, divide_by_std: bool = True) -> Tensor:
    """GRPO: how much better a trajectory did than the others of its prompt.

    A_n = (reward_n - mean of the group) / (std of the group + 1e-6)

    Args:
        reward_n: float [N], finite.
        group_n: int64 [N], not negative; the prompt that trajectory n answers.
        divide_by_std: False = only the mean is subtracted.
    Returns: float [N]; exactly 0 in a group of one and where all rewards are equal.
    Source: GRPO (arXiv 2402.03300) section 4.1; the std divides by (members - 1).
    """
    reward = reward_n.double()
    num_groups = int(group_n.max()) + 1 if group_n.numel() else 0
    zeros = torch.zeros(num_groups, dtype=torch.float64, device=reward.device)
    count = zeros.index_add(0, group_n, torch.ones_like(reward))
    mean = zeros.index_add(0, group_n, reward) / count
    deviation = reward - mean[group_n]
    std = (zeros.index_add(0, group_n, deviation.square()) / (count - 1).clamp(min=1)).sqrt()
    is_equal = std <= 1e-9 * mean.abs().clamp(min=1.0)  # round-off of the mean must not be blown up by a tiny std
    advantage = deviation / (std[group_n] + 1e-6) if divide_by_std else deviation
    return torch.where(is_equal[group_n], 0.0, advantage).to(reward_n.dtype)


@torch.no_grad()
def running_mean_advantages(reward_n: Tensor, baseline: float | None, *, decay: float = 0.9) -> tuple[Tensor, float]:
    """REINFORCE with one baseline for all prompts: the running mean of past rewards.

    A_n = reward_n - baseline; new baseline = decay * baseline + (1 - decay) * mean(reward_n)

    Args:
        reward_n: float [N], finite.
        baseline: from the step before; None = first step, which takes its own mean.
        decay: in [0, 1).
    Returns: advantages [N] against the OLD baseline, and the new baseline. Without rewards the baseline is unchanged.
    """
    if reward_n.numel() == 0:
        return reward_n, 0.0 if baseline is None else baseline
    mean = float(reward_n.double().mean())
    old = mean if baseline is None else baseline
    return reward_n - old, decay * old + (1 - decay) * mean


@torch.no_grad()
def token_advantages(advantage_n: Tensor, action_mask_t: Tensor, trajectory_start: Tensor) -> Tensor:
    """Gives each action token its trajectory's advantage: [N] -> [S], 0 off the mask."""
    return masked(torch.repeat_interleave(advantage_n, trajectory_start.diff()), action_mask_t)


@torch.no_grad()
def turn_level_gae(
    reward_t: Tensor,
    value_t: Tensor,
    action_mask_t: Tensor,
    turn_t: Tensor,
    trajectory_start: Tensor,
    *,
    action_level: str,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    bootstrap_value: float | Tensor = 0.0,
) -> tuple[Tensor, Tensor]:
    """GAE with a whole turn as one action; every action token of a turn gets the turn's advantage and return.

    V_turn = mean of V over the turn's action tokens ("turn_average"), or V of the last one ("turn_last");
    r_turn = sum of its rewards.

    Args:
        reward_t, value_t, action_mask_t, trajectory_start, gamma, lam, bootstrap_value: as in
            `gae.packed_skip_observation_gae`; gamma and lam now count per turn.
        turn_t: int [S]; index of the turn that a token belongs to, rising inside a trajectory.
        action_level: "turn_average" or "turn_last".
    Returns: advantage_t, return_t [S], 0 off the mask, no gradient.
    Raises: ValueError: unknown `action_level`.
    """
    if action_level not in ("turn_average", "turn_last"):
        raise ValueError(f'action_level = "{action_level}"; allowed: "turn_average", "turn_last" (algo.action_level)')
    mask = action_mask_t.bool()
    is_first_t = torch.ones_like(mask)
    is_first_t[1:] = turn_t[1:] != turn_t[:-1]
    is_first_t[trajectory_start[:-1][trajectory_start.diff() > 0]] = True
    turns_before = torch.nn.functional.pad(is_first_t.cumsum(0), (1, 0))  # [S + 1]
    segment_t = turns_before[1:] - 1  # index of the token's turn among all turns of the pack
    num_turns = int(turns_before[-1])

    zeros = torch.zeros(num_turns, dtype=torch.float64, device=value_t.device)
    num_actions = zeros.index_add(0, segment_t, mask.double())
    reward_turn = zeros.index_add(0, segment_t, masked(reward_t, mask).double())
    if action_level == "turn_average":
        value_turn = zeros.index_add(0, segment_t, masked(value_t, mask).double()) / num_actions.clamp(min=1)
    else:
        action = mask.nonzero().squeeze(1)
        last = torch.zeros(num_turns, dtype=torch.int64, device=value_t.device)
        last.scatter_reduce_(0, segment_t[action], action, "amax")
        value_turn = masked(value_t[last].double(), num_actions > 0)

    advantage_turn, return_turn = packed_skip_observation_gae(
        reward_turn,
        value_turn,
        num_actions > 0,
        turns_before[trajectory_start],
        gamma=gamma,
        lam=lam,
        bootstrap_value=bootstrap_value,
    )
    dtype = torch.promote_types(value_t.dtype, torch.float32)
    return masked(advantage_turn[segment_t].to(dtype), mask), masked(return_turn[segment_t].to(dtype), mask)
