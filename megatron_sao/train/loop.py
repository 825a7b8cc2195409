"""The trainer's run from first to last step.

receive trajectories -> sao_step -> push -> report. Every rank executes every line in step; the link to the scheduler
speaks for all of them. `policy_version` counts pushes: the engines start with version 0, and each step that updated the
policy publishes the next one. Metrics travel to the scheduler with the report of their step, which writes them down.
"""

import time
from pathlib import Path

from megatron_sao.records import TRAIN, Ack, Batch, EvalRequest, EvalResult, Goodbye, NeedBatch, StepReport
from megatron_sao.train.export import export_policy
from megatron_sao.train.link import SchedulerLink
from megatron_sao.train.pretrain import pretrain_value
from megatron_sao.train.progress import Progress
from megatron_sao.train.push import Pusher
from megatron_sao.train.sao_step import sao_step
from megatron_sao.train.setup import Trainer


def train(trainer: Trainer, link: SchedulerLink, pusher: Pusher, export_folder: Path) -> dict[str, float]:
    """The whole run: evaluate, pretrain and warm up the value model, train, evaluate, export.

    Returns: what the last line of the run reports. Collective: every rank of the world.
    """
    config, progress = trainer.config, Progress.at_start(trainer.config)

    pusher.connect(progress.policy_version)
    before: EvalResult = link.request(EvalRequest(name="before"), EvalResult)
    progress.add_evaluation(before.pass_rate)
    if progress.wants_pretraining:
        pretrain_value(trainer, link, progress.outcome)
        progress.has_pretrained = True

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
            metrics=result.metrics | push_metrics | times,
        )
        link.request(report, Ack)

        progress.finish_step(phase, result)
        if progress.phases.evaluation_is_due:
            evaluated: EvalResult = link.request(EvalRequest(name=f"step-{step}"), EvalResult)
            progress.add_evaluation(evaluated.pass_rate)

    after: EvalResult = link.request(EvalRequest(name="after"), EvalResult)
    summary = {
        "pass_rate_before": progress.pass_rate_before,
        "pass_rate_after": after.pass_rate,
        "steps": float(config.run.steps),
        "policy_version": float(progress.policy_version),
        "frozen_tensors_unchanged": float(trainer.check_frozen()),
        **progress.outcome.summary(),
    }
    export_policy(trainer, export_folder)
    link.request(Goodbye(reason="finished", result=summary), Ack)
    return summary
