"""The trainer's run from first to last step.

receive trajectories -> sao_step -> push -> save if due -> report. Every rank executes every line in step; only rank 0
speaks to the scheduler and writes files. `policy_version` counts pushes: the weights in the engines are version 0 at
the start, and a step that updated the policy publishes the next one.
"""

import time
from typing import Protocol

from megatron_sao.errors import TrainingError
from megatron_sao.records import Ack, Batch, EvalRequest, EvalResult, Goodbye, NeedBatch, StepReport, Trajectory
from megatron_sao.train.export import export_policy
from megatron_sao.train.link import SchedulerLink
from megatron_sao.train.pretrain import pretrain_value
from megatron_sao.train.push import Pusher
from megatron_sao.train.sao_step import sao_step
from megatron_sao.train.setup import Trainer

MAX_BAD_STEPS = 5  # consecutive steps with a non-finite update before the run stops


class Recorder(Protocol):
    """Where rank 0 writes what happened; the other ranks hold one that does nothing."""

    def log(self, step: int, phase: str, metrics: dict[str, float]) -> None: ...

    def keep_trajectories(self, step: int, trajectories: list[Trajectory]) -> None: ...


def train(trainer: Trainer, link: SchedulerLink, pusher: Pusher, recorder: Recorder, export_folder: str) -> dict[str, float]:
    """The whole run. Returns what the last line reports. Collective: every rank of the world."""
    config, models = trainer.config, trainer.models
    policy_version = bad_steps = 0
    lag0_logp_diff_max = lag_max = 0.0
    lag0_tokens = lag0_above = lagged_steps = 0.0

    pusher.connect(policy_version)
    before: EvalResult = link.request(EvalRequest(name="before"), EvalResult)
    recorder.log(0, "eval", {"eval/pass_rate": before.pass_rate, "eval/mean_reward": before.mean_reward})

    if config.value.pretrain_trajectories:
        wanted = NeedBatch(step=0, phase="value_pretrain", num_trajectories=config.value.pretrain_trajectories, policy_version=0)
        batch: Batch = link.request(wanted, Batch)
        recorder.keep_trajectories(0, batch.trajectories)
        quality = pretrain_value(
            models,
            batch.trajectories,
            trainer.share_of_batch,
            config,
            report=lambda update, metrics: recorder.log(update, "value_pretrain", metrics),
        )
        link.request(
            StepReport(step=0, phase="value_pretrain", policy_version=0, is_trained=True, metrics=quality), Ack
        )

    num_warmup_steps = config.value.warmup_steps
    step = 0
    while step < num_warmup_steps + config.run.steps:
        step += 1
        phase = "value_warmup" if step <= num_warmup_steps else "train"
        started = time.monotonic()
        wanted = NeedBatch(
            step=step,
            phase=phase,
            num_trajectories=config.schedule.batch_trajectories,
            policy_version=policy_version,
        )
        batch = link.request(wanted, Batch)
        received = time.monotonic()

        share = trainer.share_of_batch(batch.trajectories, policy_version)
        result = sao_step(models, share, config, trains_policy=phase == "train")
        metrics = {**batch.metrics, **result.metrics, "time/train_s": time.monotonic() - received}

        if result.has_updated_policy:
            metrics |= pusher.push(policy_version + 1)
            policy_version += 1

        metrics |= {"time/wait_s": received - started, "time/step_s": time.monotonic() - started}
        metrics["policy_version"] = float(policy_version)
        recorder.log(step, phase, metrics)
        recorder.keep_trajectories(step, batch.trajectories)
        report = StepReport(
            step=step, phase=phase, policy_version=policy_version, is_trained=result.has_trained, metrics=metrics
        )
        link.request(report, Ack)

        bad_steps = bad_steps + 1 if result.num_skipped_updates else 0
        if bad_steps >= MAX_BAD_STEPS:
            raise TrainingError(f"{bad_steps} steps in a row had non-finite gradients; the last was step {step}")
        if phase == "value_warmup" and _explains_enough(config.value.warmup_until_explained_variance, metrics):
            num_warmup_steps = step
        if phase == "train":
            lag_max = max(lag_max, metrics.get("lag/token_max", 0.0))
            lagged_steps += metrics.get("lag/lagged_token_fraction", 0.0) > 0
            lag0_logp_diff_max = max(lag0_logp_diff_max, metrics.get("agreement/lag0_logp_diff_max", 0.0))
            lag0_tokens += metrics.get("agreement/lag0_tokens", 0.0)
            lag0_above += metrics.get("agreement/lag0_count_above", 0.0)
            if config.run.eval_every and (step - num_warmup_steps) % config.run.eval_every == 0:
                now: EvalResult = link.request(EvalRequest(name=f"step-{step}"), EvalResult)
                recorder.log(step, "eval", {"eval/pass_rate": now.pass_rate, "eval/mean_reward": now.mean_reward})

    after: EvalResult = link.request(EvalRequest(name="after"), EvalResult)
    recorder.log(step, "eval", {"eval/pass_rate": after.pass_rate, "eval/mean_reward": after.mean_reward})
    num_frozen = trainer.check_frozen()
    export_policy(trainer, export_folder)
    outcome = {
        "pass_rate_before": before.pass_rate,
        "pass_rate_after": after.pass_rate,
        "steps": float(config.run.steps),
        "policy_version": float(policy_version),
        "logp_diff_lag0_max": lag0_logp_diff_max,
        "lag0_tokens": lag0_tokens,
        "lag0_tokens_above": lag0_above,
        "lag_max": lag_max,
        "steps_with_lagged_tokens": lagged_steps,
        "frozen_tensors_unchanged": float(num_frozen),
    }
    link.request(Goodbye(reason="finished", result=outcome), Ack)
    return outcome


def _explains_enough(threshold: float, metrics: dict[str, float]) -> bool:
    return threshold > 0 and metrics.get("value/explained_variance", 0.0) >= threshold
