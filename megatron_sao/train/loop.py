"""The trainer's run from first to last step.

receive trajectories -> sao_step -> push -> report. Every rank executes every line in step; the link to the scheduler
speaks for all of them. `policy_version` counts pushes: the engines start with version 0, and each step that updated the
policy publishes the next one. Metrics travel to the scheduler with the report of their step, which writes them down.
"""

import time
from pathlib import Path

from megatron_sao.records import Ack, Batch, EvalRequest, EvalResult, Goodbye, NeedBatch, StepReport
from megatron_sao.train.export import export_policy
from megatron_sao.train.link import SchedulerLink
from megatron_sao.train.outcome import Outcome
from megatron_sao.train.pretrain import pretrain_value
from megatron_sao.train.push import Pusher
from megatron_sao.train.sao_step import sao_step
from megatron_sao.train.setup import Trainer


def train(trainer: Trainer, link: SchedulerLink, pusher: Pusher, export_folder: Path) -> dict[str, float]:
    """The whole run: evaluate, pretrain and warm up the value model, train, evaluate, export.

    Returns: what the last line of the run reports. Collective: every rank of the world.
    """
    config, models, outcome = trainer.config, trainer.models, Outcome()
    policy_version = 0

    pusher.connect(policy_version)
    before: EvalResult = link.request(EvalRequest(name="before"), EvalResult)

    has_value_model = config.algo.baseline == "value"  # the other control arms have nothing to pretrain or warm up
    if has_value_model and config.value.pretrain_trajectories:
        pretrain_value(trainer, link)

    num_warmup_steps, step = config.value.warmup_steps if has_value_model else 0, 0
    while step < num_warmup_steps + config.run.steps:
        step += 1
        phase = "value_warmup" if step <= num_warmup_steps else "train"

        asked = time.monotonic()
        need = NeedBatch(
            step=step,
            phase=phase,
            num_trajectories=config.schedule.batch_trajectories,
            policy_version=policy_version,
        )
        batch: Batch = link.request(need, Batch)

        received = time.monotonic()
        share = trainer.share_of_batch(batch.trajectories, policy_version)
        result = sao_step(models, share, config, trains_policy=phase == "train")

        trained = time.monotonic()
        metrics = dict(result.metrics)
        if result.has_updated_policy:
            policy_version += 1
            metrics |= pusher.push(policy_version)

        metrics |= {
            "time/wait_s": received - asked,
            "time/train_s": trained - received,
            "time/push_s": time.monotonic() - trained,
            "time/step_s": time.monotonic() - asked,
        }
        report = StepReport(
            step=step, phase=phase, policy_version=policy_version, is_trained=result.has_trained, metrics=metrics
        )
        link.request(report, Ack)
        outcome.add(phase, metrics, result.num_skipped_updates)

        threshold = config.value.warmup_until_explained_variance
        if phase == "value_warmup" and 0 < threshold <= metrics.get("value/explained_variance", 0.0):
            num_warmup_steps = step
        num_policy_steps = step - num_warmup_steps
        if config.run.eval_every and num_policy_steps > 0 and num_policy_steps % config.run.eval_every == 0:
            link.request(EvalRequest(name=f"step-{step}"), EvalResult)

    after: EvalResult = link.request(EvalRequest(name="after"), EvalResult)
    num_frozen = trainer.check_frozen()
    export_policy(trainer, export_folder)
    summary = {
        "pass_rate_before": before.pass_rate,
        "pass_rate_after": after.pass_rate,
        "steps": float(config.run.steps),
        "policy_version": float(policy_version),
        "frozen_tensors_unchanged": float(num_frozen),
        **outcome.summary(),
    }
    link.request(Goodbye(reason="finished", result=summary), Ack)
    return summary
