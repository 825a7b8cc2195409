"""Value pretraining: the value model learns the returns of the frozen initial policy before any policy update.

Some trajectories are held out; explained variance on them says how good the judge is before RL starts.
"""

import random
from collections.abc import Sequence

from megatron_sao.algo.statistics import calibration_error, calibration_sums, calibration_table
from megatron_sao.config.derived import num_pretrain_holdout
from megatron_sao.parallel.exchange import merge_over_data
from megatron_sao.records import PRETRAIN, Ack, Batch, NeedBatch, StepReport, Trajectory
from megatron_sao.train.advantages import value_quality, value_targets
from megatron_sao.train.link import SchedulerLink
from megatron_sao.train.outcome import Outcome
from megatron_sao.train.setup import Trainer
from megatron_sao.train.value_step import value_update
from megatron_sao.train.values import infer_values

CALIBRATION = {"low": 0.0, "high": 1.0, "num_bins": 10}  # an outcome reward lies in [0, 1]; the outer bins are open


def pretrain_value(trainer: Trainer, link: SchedulerLink, outcome: Outcome) -> None:
    """Fetch `value.pretrain_trajectories` episodes and regress V on their returns, `value.pretrain_epochs` times.

    Reports after every update; before the first and after every epoch also the quality on the held-out episodes.
    Effect: the value model keeps what it learned; its optimizer and its schedule begin anew for RL.
    Raises: TrainingError after `run.stop_after_bad_steps` updates in a row whose gradients were not finite.
    Collective: every rank of the world.
    """
    config, models = trainer.config.value, trainer.models
    need = NeedBatch(step=0, phase=PRETRAIN, num_trajectories=config.pretrain_trajectories, policy_version=0)
    batch: Batch = link.request(need, Batch)
    models.turns.take(models.value)  # not before: while it waits, the scheduler may want a push
    held_out, training = split(batch.trajectories, num_pretrain_holdout(config), trainer.config.run.seed)

    def report(number: int, metrics: dict[str, float], is_trained: bool) -> None:
        message = StepReport(step=number, phase=PRETRAIN, policy_version=0, is_trained=is_trained, metrics=metrics)
        link.request(message, Ack)

    number = num_seen = 0
    report(number, held_out_quality(trainer, held_out) | {"value/pretrain_trajectories": 0.0}, is_trained=False)
    for epoch in range(config.pretrain_epochs):
        order = random.Random(f"{trainer.config.run.seed}/{epoch}").sample(training, len(training))
        for first in range(0, len(order), config.pretrain_batch_trajectories):
            part = order[first : first + config.pretrain_batch_trajectories]
            number, num_seen = number + 1, num_seen + len(part)
            metrics = regress(trainer, part)
            is_trained = bool(metrics)
            metrics["value/pretrain_trajectories"] = float(num_seen)
            if first + len(part) == len(order):
                metrics |= held_out_quality(trainer, held_out)
            report(number, metrics, is_trained)
            outcome.add(PRETRAIN, metrics, int(metrics.get("value/skipped_updates", 0)))
    models.value.restart()


def regress(trainer: Trainer, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """One update of the value model on its targets; {} (nothing done) without action tokens. Collective: the world."""
    share, models = trainer.share_of_batch(trajectories, 0), trainer.models
    if share.num_step_action_tokens == 0:
        return {}
    value = infer_values(models.value.wrapped, share, models.readout)
    target = value_targets(share, value, trainer.config.algo)
    return value_update(models.value, share, target, value, models.readout) | value_quality(share, value, target)


def split(
    trajectories: Sequence[Trajectory], num_held_out: int, seed: int
) -> tuple[list[Trajectory], list[Trajectory]]:
    """(held out, training), drawn by seed."""
    order = random.Random(seed).sample(list(trajectories), len(trajectories))
    return order[:num_held_out], order[num_held_out:]


def held_out_quality(trainer: Trainer, held_out: Sequence[Trajectory]) -> dict[str, float]:
    """Explained variance, means and calibration on episodes that are not trained on.

    Collective: every rank of the world.
    """
    share = trainer.share_of_batch(held_out, 0)
    value = infer_values(trainer.models.value.wrapped, share, trainer.models.readout)
    target = value_targets(share, value, trainer.config.algo)
    quality = value_quality(share, value, target)
    bins = calibration_sums(value, target, share.batch.action_mask, **CALIBRATION)
    rows = calibration_table(merge_over_data({"bins": bins})["bins"], low=CALIBRATION["low"], high=CALIBRATION["high"])
    quality["value/calibration_error"] = calibration_error(rows)
    return {name.replace("value/", "value/heldout_"): number for name, number in quality.items()}
