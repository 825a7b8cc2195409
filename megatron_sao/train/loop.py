"""The trainer's run from first to last step.

receive trajectories -> sao_step -> push -> report -> save if due. Every rank executes every line in step; the link to
the scheduler speaks for all of them. `policy_version` counts pushes: the engines start with version 0, and each step
that updated the policy publishes the next one. Metrics travel to the scheduler with the report of their step, which
writes them down. A run that shall stop hears of it where it asks the scheduler for episodes: it saves and ends there,
between two steps, and the resumed run asks again.
"""

import time
from pathlib import Path

from megatron_sao.records import (
    FINISHED,
    STOPPED,
    TRAIN,
    Ack,
    Batch,
    EvalRequest,
    EvalResult,
    Goodbye,
    NeedBatch,
    StepReport,
)
from megatron_sao.train.export import export_policy
from megatron_sao.train.link import SchedulerLink, StopAsked
from megatron_sao.train.pretrain import pretrain_value
from megatron_sao.train.progress import Progress
from megatron_sao.train.push import Pusher
from megatron_sao.train.sao_step import sao_step
from megatron_sao.train.saving import Checkpoints
from megatron_sao.train.setup import Trainer


def run(
    trainer: Trainer,
    link: SchedulerLink,
    pusher: Pusher,
    checkpoints: Checkpoints,
    progress: Progress,
    export_folder: Path,
) -> dict[str, float] | None:
    """The whole run, or what is left of it.

    Args:
        progress: at its start, or as `checkpoints` restored it.
        export_folder: of the policy, at the end.
    Returns: what the last line of the run reports; None when it was told to stop, and has saved.
    Collective: every rank of the world.
    """
    try:
        pass_rate_after = train(trainer, link, pusher, checkpoints, progress)
    except StopAsked:
        checkpoints.save(progress)
        checkpoints.finish()
        link.request(Goodbye(reason=STOPPED), Ack)
        return None

    summary = {
        "pass_rate_before": progress.pass_rate_before,
        "pass_rate_after": pass_rate_after,
        "steps": float(trainer.config.run.steps),
        "policy_version": float(progress.policy_version),
        "frozen_tensors_unchanged": float(trainer.check_frozen()),
        **progress.outcome.summary(),
    }
    export_policy(trainer, export_folder)
    link.request(Goodbye(reason=FINISHED, result=summary), Ack)
    return summary


def train(
    trainer: Trainer, link: SchedulerLink, pusher: Pusher, checkpoints: Checkpoints, progress: Progress
) -> float:
    """Evaluate, pretrain and warm up the value model, train, evaluate; -> the pass rate at the end.

    Raises: StopAsked; `progress` then stands at the last finished step. Collective: every rank of the world.
    """
    config, save_metrics = trainer.config, {}

    pusher.connect(progress.policy_version)
    if progress.pass_rate_before is None:
        _evaluate(link, progress, "before")
    if progress.wants_evaluation:  # the run was stopped before it could be done
        _evaluate(link, progress, f"step-{progress.step}")
        if checkpoints.is_due(progress):
            save_metrics = checkpoints.save(progress)
    if progress.wants_pretraining:
        pretrain_value(trainer, link, progress.outcome)
        progress.has_pretrained = True
        if config.checkpoint.every_steps:
            save_metrics = checkpoints.save(progress)

    for step, phase in progress.phases:  # value warm-up steps, then policy steps
        asked = time.monotonic()
        need = NeedBatch(
            step=step,
            phase=phase,
            num_trajectories=config.schedule.batch_trajectories,
            policy_version=progress.policy_version,
        )
        batch: Batch = link.request(need, Batch)

        received = time.monotonic()
        share = trainer.share_of_batch(batch.trajectories, progress.policy_version)
        result = sao_step(trainer.models, share, config, trains_policy=phase == TRAIN)

        trained = time.monotonic()
        push_metrics = {}
        if result.has_updated_policy:
            progress.policy_version += 1
            push_metrics = pusher.push(progress.policy_version)

        pushed = time.monotonic()
        times = {
            "time/wait_s": received - asked,
            "time/train_s": trained - received,
            "time/push_s": pushed - trained,
            "time/step_s": pushed - asked,
        }
        report = StepReport(
            step=step,
            phase=phase,
            policy_version=progress.policy_version,
            is_trained=result.has_trained,
            metrics=result.metrics | push_metrics | times | save_metrics,
        )
        link.request(report, Ack)

        progress.finish_step(phase, result)
        if progress.wants_evaluation:
            _evaluate(link, progress, f"step-{step}")
        save_metrics = checkpoints.save(progress) if checkpoints.is_due(progress) else checkpoints.settle()

    pass_rate_after = _evaluate(link, progress, "after")
    if config.checkpoint.every_steps or checkpoints.is_due(progress):
        checkpoints.save(progress)  # a finished run can be prolonged
        checkpoints.finish()
    return pass_rate_after


def _evaluate(link: SchedulerLink, progress: Progress, name: str) -> float:
    """The pass rate on held-out prompts, which `progress` then knows. Raises: StopAsked."""
    evaluated: EvalResult = link.request(EvalRequest(name=name), EvalResult)
    progress.add_evaluation(evaluated.pass_rate)
    return evaluated.pass_rate
