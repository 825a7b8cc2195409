"""The order of a run, as the scheduler and the pusher see it: versions, phases, steps without signal, bad steps."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.checkpoints import finished, read_manifest
from megatron_sao.config import load_config
from megatron_sao.errors import TrainingError
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.parallel.init import start_world
from megatron_sao.records import (
    Ack,
    Batch,
    EvalRequest,
    EvalResult,
    Goodbye,
    NeedBatch,
    SaveState,
    StepReport,
)
from megatron_sao.train import loop
from megatron_sao.train.link import StopAsked
from megatron_sao.train.outcome import Outcome
from megatron_sao.train.progress import Progress
from megatron_sao.train.saving import Checkpoints
from megatron_sao.train.setup import build_trainer
from tests.support.folders import make_folder, read_weights
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories


DEFAULT_LIMIT = 5  # run.stop_after_bad_steps


class Scheduler:
    """Answers the trainer and writes down what happened, pushes included.

    `batches` says by step number what a batch is like: "silent" = no action token, "bad" = a reward that is not
    finite, "stale" = written one version ago, "stop" = there is none, the run shall end.
    """

    def __init__(self, batches):
        self.batches, self.events = batches, []

    def connect(self, policy_version):
        self.events.append(("connect", policy_version))

    def push(self, policy_version):
        self.events.append(("push", policy_version))
        return {"push/total_s": 0.5}

    def request(self, message, expected, timeout_s=None):
        self.events.append(message)
        wanted = {EvalRequest: "name", NeedBatch: "step"}.get(type(message))
        if wanted and self.batches.get(getattr(message, wanted)) == "stop":
            raise StopAsked("test")
        if isinstance(message, EvalRequest):
            rate = {"before": 0.25, "step-3": 0.625, "after": 0.75}.get(message.name, 0.5)
            answer = EvalResult(name=message.name, pass_rate=rate, mean_reward=rate, num_episodes=4)
        elif isinstance(message, NeedBatch):
            answer = Batch(step=message.step, trajectories=self.batch(message), metrics={})
        else:
            assert isinstance(message, StepReport | SaveState | Goodbye)
            answer = Ack()
        assert isinstance(answer, expected)
        return answer

    def batch(self, need):
        kind = self.batches.get(need.step, "")
        version = need.policy_version - (kind == "stale")
        made = random_trajectories(need.num_trajectories, seed=4, longest=24, newest_version=version)
        if kind == "silent":
            made = [replace(t, action_mask=t.action_mask & False) for t in made]
        if kind == "bad":
            made = [replace(t, reward_t=np.where(t.action_mask, np.nan, 0).astype(np.float32)) for t in made]
        return made

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def names(self):
        """The events, shortened."""
        short = {NeedBatch: lambda m: f"need {m.step} {m.phase} v{m.policy_version}", Goodbye: lambda m: m.reason}
        short[StepReport] = lambda m: f"report {m.step} {m.phase} v{m.policy_version} {m.is_trained}"
        short[EvalRequest] = lambda m: f"eval {m.name}"
        short[SaveState] = lambda m: f"save {m.step}"
        return [f"{e[0]} {e[1]}" if isinstance(e, tuple) else short[type(e)](e) for e in self.events]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("moe") / "model")


def whole_run(folder, export, batches, overrides, resume=None):
    config = load_config(None, ["schedule.batch_trajectories=4", *overrides])
    trainer = build_trainer(config, HFFolder(folder), start_world(config))
    scheduler = Scheduler(batches)
    checkpoints = Checkpoints(trainer, scheduler, export.parent / "checkpoints")
    progress = checkpoints.restore(resume) if resume else Progress.at_start(config)
    try:
        summary = loop.run(trainer, scheduler, scheduler, checkpoints, progress, export)
    except TrainingError as error:
        summary = str(error)
    return scheduler, summary


def run(folder, tmp_path, batches=None, *overrides, saves=False, resume=None):
    overrides = overrides if saves else (*overrides, "checkpoint.every_steps=0")
    ((scheduler, summary),) = run_ranks(1, whole_run, folder, tmp_path / "export", batches or {}, overrides, resume)
    return scheduler, summary


def test_a_run_from_first_to_last_message(folder, tmp_path):
    overrides = ["run.steps=2", "value.warmup_steps=2", "run.eval_every=1"]
    scheduler, summary = run(folder, tmp_path, {4: "stale"}, *overrides)
    assert scheduler.names() == [
        "connect 0",
        "eval before",
        "need 1 value_warmup v0",
        "report 1 value_warmup v0 True",
        "need 2 value_warmup v0",
        "report 2 value_warmup v0 True",
        "need 3 train v0",
        "push 1",
        "report 3 train v1 True",
        "eval step-3",
        "need 4 train v1",
        "push 2",
        "report 4 train v2 True",
        "eval step-4",
        "eval after",
        "finished",
    ]
    assert {need.num_trajectories for need in scheduler.of(NeedBatch)} == {4}
    assert summary["pass_rate_before"] == 0.25 and summary["pass_rate_after"] == 0.75
    assert summary["policy_version"] == 2 and summary["lag_max"] == 1 and summary["steps_with_lagged_tokens"] == 1
    assert summary["frozen_tensors_unchanged"] > 0 and summary["bad_steps"] == 0
    assert scheduler.of(Goodbye)[0].result == summary
    assert read_weights(tmp_path / "export").keys() == read_weights(folder).keys()


def test_reports_say_what_the_step_did_and_how_long_it_took(folder, tmp_path):
    scheduler, _ = run(folder, tmp_path, {}, "run.steps=1", "value.warmup_steps=1")
    warmup, step = (report.metrics for report in scheduler.of(StepReport))
    assert "value/explained_variance" in warmup and "policy/loss" not in warmup and "push/total_s" not in warmup
    assert {"value/explained_variance", "policy/loss", "dis/rejected", "lag/token_max"} <= step.keys()
    assert step["push/total_s"] == 0.5
    for metrics in (warmup, step):
        assert all(metrics[f"time/{part}_s"] >= 0 for part in ("wait", "train", "push", "step"))


def test_a_run_saves_after_pretraining_when_due_and_at_its_end(folder, tmp_path):
    pretraining = ["value.pretrain_trajectories=8", "value.pretrain_batch_trajectories=4", "value.warmup_steps=1"]
    scheduler, _ = run(folder, tmp_path, {}, "run.steps=4", "checkpoint.every_steps=2", *pretraining, saves=True)
    names = [name for name in scheduler.names() if name.startswith(("save", "need", "eval", "finished"))]
    assert names == [
        "eval before",
        "need 0 value_pretrain v0",
        "save 0",
        "need 1 value_warmup v0",
        "need 2 train v0",
        "save 2",
        "need 3 train v1",
        "need 4 train v2",
        "save 4",
        "need 5 train v3",
        "eval after",
        "save 5",
        "finished",
    ]
    reports = {report.step: report.metrics for report in scheduler.of(StepReport) if report.phase != "value_pretrain"}
    assert {step: metrics.get("save/bytes", 0) > 0 for step, metrics in reports.items()} == {
        1: True, 2: False, 3: True, 4: False, 5: True,
    }  # a save is reported with the step after it
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000004", "step-000005"]


def pass_rates(tmp_path):
    """By step, of the checkpoints that are left."""
    manifests = [read_manifest(path) for path in finished(tmp_path / "checkpoints")]
    return {manifest.step: manifest.pass_rate for manifest in manifests}


def test_the_best_is_the_policy_that_was_evaluated_and_is_saved_right_after(folder, tmp_path):
    """Evaluations count policy steps, saves all steps: with a warm-up of one step they never fall together."""
    overrides = ["run.steps=4", "value.warmup_steps=1", "run.eval_every=2", "checkpoint.every_steps=2"]
    scheduler, _ = run(folder, tmp_path, {}, *overrides, "checkpoint.keep_last=2", "checkpoint.keep_best=1", saves=True)
    assert [name for name in scheduler.names() if name.startswith(("save", "eval"))] == [
        "eval before", "save 2", "eval step-3", "save 3", "save 4", "eval step-5", "save 5", "eval after",
    ]
    assert pass_rates(tmp_path) == {3: 0.625, 4: None, 5: 0.5}


def test_what_was_saved_before_it_was_evaluated_is_saved_again_with_its_pass_rate(folder, tmp_path):
    overrides = ["run.steps=3", "value.warmup_steps=0", "run.eval_every=2", "checkpoint.keep_best=1"]
    run(folder, tmp_path, {"step-2": "stop"}, *overrides)
    assert pass_rates(tmp_path) == {2: None}
    resumed, _ = run(folder, tmp_path, {}, *overrides, resume=tmp_path / "checkpoints" / "step-000002")
    assert [name for name in resumed.names() if name.startswith(("save", "eval"))] == [
        "eval step-2", "save 2", "eval after", "save 3",
    ]
    assert pass_rates(tmp_path)[3] == 0.75


@pytest.mark.parametrize("where", ["before", 2, "step-2", "after"])
def test_a_stopped_run_saves_and_the_resumed_one_does_the_rest(folder, tmp_path, where):
    overrides = ["run.steps=3", "value.warmup_steps=0", "run.eval_every=2"]
    whole, whole_summary = run(folder, tmp_path / "whole", {}, *overrides)
    stopped, nothing = run(folder, tmp_path, {where: "stop"}, *overrides)
    assert nothing is None and not (tmp_path / "export").exists()
    step = {"before": 0, 2: 1, "step-2": 2, "after": 3}[where]
    assert stopped.names()[-2:] == [f"save {step}", "stopped"]
    resumed, summary = run(folder, tmp_path, {}, *overrides, resume=tmp_path / "checkpoints" / f"step-{step:06d}")
    assert resumed.names()[0] == f"connect {step}"
    rest = whole.names()[1:]
    assert stopped.names()[1:-3] + resumed.names()[1:] == rest
    assert summary == whole_summary
    exports = [read_weights(path / "export") for path in (tmp_path / "whole", tmp_path)]
    assert all(torch.equal(weight, exports[1][name]) for name, weight in exports[0].items())


def test_a_step_without_signal_pushes_nothing_and_keeps_the_version(folder, tmp_path):
    scheduler, summary = run(folder, tmp_path, {2: "silent"}, "run.steps=3", "value.warmup_steps=0")
    assert [name for name in scheduler.names() if name.startswith(("push", "report"))] == [
        "push 1",
        "report 1 train v1 True",
        "report 2 train v1 False",
        "push 2",
        "report 3 train v2 True",
    ]
    assert summary["policy_version"] == 2 and summary["bad_steps"] == 0


def test_a_step_with_bad_numbers_pushes_nothing_and_is_counted(folder, tmp_path):
    scheduler, summary = run(folder, tmp_path, {1: "bad"}, "run.steps=2", "value.warmup_steps=0")
    assert [name for name in scheduler.names() if name.startswith(("push", "report"))] == [
        "report 1 train v0 True",
        "push 1",
        "report 2 train v1 True",
    ]
    assert summary["bad_steps"] == 1 and summary["policy_version"] == 1


def test_bad_steps_in_a_row_end_the_run(folder, tmp_path):
    batches = dict.fromkeys(range(1, 20), "bad")
    scheduler, text = run(folder, tmp_path, batches, "run.steps=9", "value.warmup_steps=1")
    assert text.startswith(f"{DEFAULT_LIMIT} steps in a row (run.stop_after_bad_steps) had gradients that are not fin")
    assert len(scheduler.of(StepReport)) == DEFAULT_LIMIT and not scheduler.of(Goodbye)
    assert not (tmp_path / "export").exists()


def poisoned_run(folder, export, overrides, bad_rank):
    """A run in which one rank's gradient of one parameter of each model is infinite from the first step on."""
    config = load_config(None, ["schedule.batch_trajectories=4", *overrides])
    world = start_world(config)
    trainer = build_trainer(config, HFFolder(folder), world)
    models = (trainer.models.policy, trainer.models.value)
    if world.rank == bad_rank:
        for model in models:
            router = model.chunks[0].decoder.layers[0].mlp.router.weight
            router.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    before = [p.detach().clone() for model in models for p in model.chunks[0].parameters()]
    scheduler = Scheduler({})
    with pytest.raises(TrainingError) as caught:
        checkpoints = Checkpoints(trainer, scheduler, export.parent / "checkpoints")
        loop.run(trainer, scheduler, scheduler, checkpoints, Progress.at_start(config), export)
    after = [p.detach() for model in models for p in model.chunks[0].parameters()]
    is_unmoved = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return str(caught.value), len(scheduler.of(StepReport)), is_unmoved, scheduler.names()


@pytest.mark.parametrize("layout", [["parallel.tp=2", "parallel.ep=2"], ["parallel.dp=2"]], ids=["tp2-ep2", "dp2"])
def test_an_infinite_gradient_on_one_rank_ends_the_run_on_every_rank(folder, tmp_path, layout):
    overrides = ["run.steps=9", "value.warmup_steps=1", "run.stop_after_bad_steps=3", *layout]
    for text, num_reports, is_unmoved, names in run_ranks(2, poisoned_run, folder, tmp_path / "export", overrides, 1):
        assert text.startswith("3 steps in a row (run.stop_after_bad_steps) had gradients that are not finite")
        assert "of phase train" in text
        assert num_reports == 3 and is_unmoved and not any(name.startswith("push") for name in names)


def test_the_warm_up_ends_early_once_values_explain_enough(folder, tmp_path):
    overrides = ["run.steps=1", "value.warmup_steps=30", "value.lr=0.05", "value.warmup_until_explained_variance=0.05"]
    scheduler, _ = run(folder, tmp_path, {}, *overrides)
    *warmup, last = scheduler.of(StepReport)
    assert last.phase == "train" and {report.phase for report in warmup} == {"value_warmup"}
    explained = [report.metrics["value/explained_variance"] for report in warmup]
    assert len(warmup) < 30 and explained[-1] >= 0.05 and all(number < 0.05 for number in explained[:-1])


@pytest.mark.parametrize("arm", ["running_mean", "grpo"])
def test_an_arm_without_a_value_model_has_neither_pretraining_nor_warm_up(folder, tmp_path, arm):
    rollouts = ["sampling.rollouts_per_prompt=4"] if arm == "grpo" else []
    pretraining = ["value.pretrain_trajectories=8", "value.pretrain_batch_trajectories=4"]
    scheduler, summary = run(folder, tmp_path, {}, "run.steps=2", f"algo.arm={arm}", *rollouts, *pretraining)
    assert [need.phase for need in scheduler.of(NeedBatch)] == ["train", "train"]
    assert summary["policy_version"] == 2


# ---- what is remembered over steps -----------------------------------------------------------------------------


def step_metrics(lag_max=0.0, lagged=0.0, **lag0):
    return {
        "lag/token_max": lag_max,
        "lag/lagged_token_fraction": lagged,
        **{f"dis/{name}/lag0": number for name, number in lag0.items()},
    }


def test_the_outcome_adds_up_policy_steps_only():
    outcome = Outcome(stop_after_bad_steps=DEFAULT_LIMIT)
    outcome.add("value_warmup", step_metrics(lag_max=9.0, lagged=1.0), 0)
    outcome.add("train", step_metrics(num_tokens=100.0, logp_apart=0.02, max_abs_logp_diff=0.3), 0)
    outcome.add("train", step_metrics(lag_max=3.0, lagged=1.0), 0)
    outcome.add("train", step_metrics(2.0, 0.5, num_tokens=50.0, logp_apart=0.0, max_abs_logp_diff=1e-6), 0)
    outcome.add("train", {}, 0)  # no signal
    assert outcome.summary() == {
        "logp_diff_lag0_max": 0.3,
        "lag0_tokens": 150.0,
        "lag0_tokens_above_1e-4": 2,
        "lag_max": 3.0,
        "steps_with_lagged_tokens": 2.0,
        "bad_steps": 0.0,
    }


def test_a_good_step_in_between_starts_the_count_of_bad_ones_anew():
    outcome = Outcome(stop_after_bad_steps=DEFAULT_LIMIT)
    for _ in range(3):
        for _ in range(DEFAULT_LIMIT - 1):
            outcome.add("train", {}, 2)
        outcome.add("train", {}, 0)
    assert outcome.summary()["bad_steps"] == 3.0 * (DEFAULT_LIMIT - 1)
    for _ in range(DEFAULT_LIMIT - 1):
        outcome.add("value_warmup", {}, 1)
    with pytest.raises(TrainingError, match="lower policy.lr or value.lr"):
        outcome.add("train", {}, 1)
