"""What a run remembers, and what becomes of it when the run goes on with other settings."""

import json

import pytest

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.train.progress import Progress
from megatron_sao.train.sao_step import StepResult

EXPLAINED = {"value/explained_variance": 0.5}


def progress_after(num_steps, *overrides, metrics=EXPLAINED):
    progress = Progress.at_start(load_config(None, overrides))
    for step, phase in progress.phases:
        progress.finish_step(phase, StepResult(True, metrics=metrics))
        if step == num_steps:
            break
    return progress


def restored(progress, *overrides):
    return Progress.restored(load_config(None, overrides), json.loads(json.dumps(progress.saved())))


def rest(progress):
    """The phases of the steps that are left; does them."""
    phases = []
    for step, phase in progress.phases:
        assert step == progress.step + 1
        phases.append(phase)
        progress.finish_step(phase, StepResult(True))
    return phases


def test_all_of_it_comes_back():
    metrics = {"lag/token_max": 2.0, "lag/lagged_token_fraction": 0.5, "policy/skipped_updates": 1.0}
    progress = progress_after(5, "value.warmup_steps=2", "run.stop_after_bad_steps=6", metrics=metrics)
    progress.policy_version, progress.has_pretrained = 57, True
    for rate in (0.25, 0.5):
        progress.add_evaluation(rate)
    back = restored(progress, "value.warmup_steps=2", "run.stop_after_bad_steps=9")
    assert back.saved() | {"outcome": 0} == progress.saved() | {"outcome": 0}
    assert back.outcome.summary() == progress.outcome.summary() != Progress.at_start(load_config(None)).outcome.summary()
    assert (back.step, back.policy_version, back.pass_rate_before, back.pass_rate) == (5, 57, 0.25, 0.5)
    assert back.outcome.stop_after_bad_steps == 9, "what is configured now"


def test_a_step_that_was_not_finished_is_done_again():
    progress = progress_after(3, "value.warmup_steps=2", "run.steps=4")
    next(iter(progress.phases))  # a stop is asked for in the middle of step 4
    assert progress.step == 3
    assert rest(restored(progress, "value.warmup_steps=2", "run.steps=4")) == ["train"] * 3


@pytest.mark.parametrize(
    "num_steps, configured, left",
    [
        (3, 2, ["train"] * 3),  # a warm-up of 2 is over, whatever is configured now
        (3, 0, ["train"] * 3),
        (3, 9, ["train"] * 3),
        (1, 2, ["value_warmup"] + ["train"] * 4),
        (1, 4, ["value_warmup"] * 3 + ["train"] * 4),
        (1, 0, ["train"] * 4),  # ends at once
    ],
)
def test_a_warm_up_that_is_under_way_follows_the_settings(num_steps, configured, left):
    progress = progress_after(num_steps, "value.warmup_steps=2", "run.steps=4")
    assert rest(restored(progress, f"value.warmup_steps={configured}", "run.steps=4")) == left


def test_a_warm_up_that_ended_early_stays_ended():
    overrides = ["value.warmup_steps=20", "value.warmup_until_explained_variance=0.4", "run.steps=3"]
    progress = progress_after(1, *overrides)
    assert rest(restored(progress, *overrides)) == ["train"] * 3


def test_a_run_may_be_prolonged():
    progress = progress_after(5, "value.warmup_steps=2", "run.steps=3")
    assert rest(restored(progress, "value.warmup_steps=2", "run.steps=3")) == []
    assert rest(restored(progress, "value.warmup_steps=2", "run.steps=5")) == ["train"] * 2


def test_pretraining_is_done_once():
    overrides = ["value.pretrain_trajectories=80"]
    progress = Progress.at_start(load_config(None, overrides))
    assert progress.wants_pretraining and restored(progress, *overrides).wants_pretraining
    progress.has_pretrained = True
    assert not restored(progress, *overrides).wants_pretraining
    late = progress_after(1, "value.warmup_steps=2")
    assert not restored(late, *overrides).wants_pretraining, "nothing is made up for after a step"


def test_an_evaluation_that_was_due_is_owed_until_it_is_done():
    overrides = ["value.warmup_steps=0", "run.eval_every=2"]
    assert not progress_after(1, *overrides).wants_evaluation
    owed = restored(progress_after(2, *overrides), *overrides)
    assert owed.wants_evaluation
    owed.add_evaluation(0.5)
    assert not owed.wants_evaluation and not restored(owed, *overrides).wants_evaluation


def test_a_pass_rate_is_of_the_policy_that_was_evaluated_until_the_next_step():
    progress = progress_after(2, "value.warmup_steps=0")
    assert progress.pass_rate_now is None
    progress.add_evaluation(0.5)
    assert progress.pass_rate_now == restored(progress, "value.warmup_steps=0").pass_rate_now == 0.5
    progress.finish_step("train", StepResult(True))
    assert (progress.pass_rate_now, progress.pass_rate) == (None, 0.5)
