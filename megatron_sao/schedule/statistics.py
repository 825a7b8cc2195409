"""What is reported about the trajectories of one step. Pure: records in, named numbers out."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megatron_sao.records import Trajectory
from megatron_sao.schedule.freshness import lag

PASS_REWARD = 1.0  # an episode counts as passed from this reward on


def pass_rate(rewards: Sequence[float]) -> float:
    """Share of episodes with reward >= 1, in [0, 1]. Raises ValueError when there is none."""
    if not rewards:
        raise ValueError("a pass rate needs at least one episode")
    return sum(reward >= PASS_REWARD for reward in rewards) / len(rewards)


def batch_metrics(trajectories: Sequence[Trajectory], policy_version: int) -> dict[str, float]:
    """Rewards, lengths and lags of the trajectories that version `policy_version` trains on.

    Args:
        trajectories: N > 0 trajectories, each with at least one action token.
        policy_version: the version that trains them.

    Returns:
        rollout/*: per trajectory; lag/mean and lag/max: of the oldest action token of each trajectory;
        lag/share_ge1: share of all action tokens with lag >= 1;
        environment/*: mean over the trajectories that report it.

    Raises:
        ProtocolError: a token is newer than `policy_version`.
    """
    rewards = [trajectory.reward for trajectory in trajectories]
    num_action_tokens = [trajectory.num_action_tokens for trajectory in trajectories]
    oldest_lags = [lag(policy_version, trajectory.oldest_version) for trajectory in trajectories]
    versions = np.concatenate([trajectory.version_t[trajectory.action_mask] for trajectory in trajectories])
    lag(policy_version, int(versions.max()))
    metrics = {
        "rollout/reward_mean": float(np.mean(rewards)),
        "rollout/reward_std": float(np.std(rewards)),
        "rollout/pass_rate": pass_rate(rewards),
        "rollout/action_tokens_mean": float(np.mean(num_action_tokens)),
        "rollout/action_tokens_max": float(np.max(num_action_tokens)),
        "rollout/tokens_mean": float(np.mean([trajectory.num_tokens for trajectory in trajectories])),
        "rollout/num_turns_mean": float(np.mean([trajectory.turn_t.max() + 1 for trajectory in trajectories])),
        "rollout/cut_fraction": float(np.mean([trajectory.is_cut for trajectory in trajectories])),
        "rollout/seconds_mean": float(np.mean([t.finished_s - t.started_s for t in trajectories])),
        "lag/mean": float(np.mean(oldest_lags)),
        "lag/max": float(np.max(oldest_lags)),
        "lag/share_ge1": float(np.mean(versions < policy_version)),
    }
    reported = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            reported[name].append(value)
    metrics |= {f"environment/{name}": float(np.mean(values)) for name, values in sorted(reported.items())}
    return metrics
