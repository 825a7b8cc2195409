"""Value pretraining: the value model learns the returns of the frozen initial policy before any policy update.

Some trajectories are held out; explained variance and calibration on them say how good the judge is before RL starts.
"""

import random
from collections.abc import Callable, Sequence

from megatron_sao.algo.statistics import calibration_table
from megatron_sao.config import Config
from megatron_sao.data.share import Share
from megatron_sao.records import Trajectory
from megatron_sao.train.advantages import value_quality, value_targets
from megatron_sao.train.sao_step import Models
from megatron_sao.train.value_step import value_update
from megatron_sao.train.values import infer_values

ShareOf = Callable[[Sequence[Trajectory], int], Share]
Report = Callable[[int, dict[str, float]], None]


def pretrain_value(
    models: Models, trajectories: Sequence[Trajectory], share_of_batch: ShareOf, config: Config, report: Report
) -> dict[str, float]:
    """Regress V on the returns of `trajectories`, a share of which is held out.

    Args:
        trajectories: episodes of the initial policy, the same list on every rank.
        share_of_batch: (trajectories, policy_version) -> this rank's share.
        report: (update number, metrics), called after every update.
    Returns: held-out explained variance and calibration of the finished model.
    Collective: every rank of the world.
    """
    held_out, training = split(trajectories, config.value.pretrain_holdout, config.run.seed)
    size = config.value.pretrain_batch_trajectories
    update = 0
    quality = held_out_quality(models, share_of_batch(held_out, 0), config)
    report(update, quality | {"value/pretrain_trajectories": 0.0})
    for epoch in range(config.value.pretrain_epochs):
        order = random.Random(f"{config.run.seed}/{epoch}").sample(range(len(training)), len(training))
        for first in range(0, len(order), size):
            share = share_of_batch([training[n] for n in order[first : first + size]], 0)
            if share.num_step_action_tokens == 0:
                continue
            value = infer_values(models.value.wrapped, share, models.readout)
            target = value_targets(share, value, config.algo)
            metrics = value_update(models.value, share, target, value, models.readout)
            update += 1
            metrics["value/pretrain_trajectories"] = float(epoch * len(order) + min(first + size, len(order)))
            report(update, metrics | value_quality(share, value, target))
        quality = held_out_quality(models, share_of_batch(held_out, 0), config)
        report(update, quality)
    return quality


def split(
    trajectories: Sequence[Trajectory], holdout: float, seed: int
) -> tuple[list[Trajectory], list[Trajectory]]:
    """(held out, training), drawn by seed; at least one of each where there are two."""
    order = random.Random(seed).sample(range(len(trajectories)), len(trajectories))
    count = min(max(1, round(len(order) * holdout)), len(order) - 1)
    return [trajectories[n] for n in order[:count]], [trajectories[n] for n in order[count:]]


def held_out_quality(models: Models, share: Share, config: Config) -> dict[str, float]:
    """Explained variance and calibration error on trajectories that were not trained on. Collective: the world."""
    value = infer_values(models.value.wrapped, share, models.readout)
    target = value_targets(share, value, config.algo)
    quality = value_quality(share, value, target)
    return {
        "value/heldout_explained_variance": quality["value/explained_variance"],
        "value/heldout_mean": quality["value/mean"],
        "value/heldout_target_mean": quality["value/target_mean"],
    }
