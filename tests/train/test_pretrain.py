"""Value pretraining on a toy set: quality on held-out episodes rises, and only the value model changes."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.errors import TrainingError
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.weights import model_tensors
from megatron_sao.parallel.init import start_world
from megatron_sao.records import Ack, Batch, NeedBatch, StepReport
from megatron_sao.train.outcome import Outcome
from megatron_sao.train.pretrain import pretrain_value, split
from megatron_sao.train.setup import build_trainer
from tests.support.folders import make_folder
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories

HELD_OUT_EV = "value/heldout_explained_variance"


class Scheduler:
    """Answers as the scheduler would; keeps what it was told."""

    def __init__(self, trajectories):
        self.trajectories, self.needs, self.reports = trajectories, [], []

    def request(self, message, expected, timeout_s=None):
        if isinstance(message, NeedBatch):
            self.needs.append(message)
            return Batch(step=message.step, trajectories=self.trajectories[: message.num_trajectories], metrics={})
        assert isinstance(message, StepReport) and expected is Ack
        self.reports.append(message)
        return Ack()


def telling_trajectories(count):
    """Episodes that end with reward 1 are written in three token ids, the others in three others."""
    made = []
    for n, t in enumerate(random_trajectories(count, seed=5, longest=24)):
        reward = float(n % 2)
        ids = t.token_ids % 3 if reward else 100 + t.token_ids % 3
        reward_t = np.zeros_like(t.reward_t)
        reward_t[-1] = reward
        made.append(replace(t, token_ids=ids, reward=reward, reward_t=reward_t))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("moe") / "model")


def pretrained(folder, trajectories, overrides):
    count = f"value.pretrain_trajectories={len(trajectories)}"
    config = load_config(None, ["value.lr=0.01", count, *overrides])
    trainer = build_trainer(config, HFFolder(folder), start_world(config))
    before = {k: t.detach().clone() for k, t in model_tensors(trainer.models.policy.chunks).items()}
    scheduler = Scheduler(trajectories)
    pretrain_value(trainer, scheduler, Outcome(config.run.stop_after_bad_steps))
    policy = model_tensors(trainer.models.policy.chunks)
    return dict(
        needs=scheduler.needs,
        reports=scheduler.reports,
        policy_moved=[k for k in before if not torch.equal(before[k], policy[k])],
        policy_updates=trainer.models.policy.schedule.num_steps,
        value_updates=trainer.models.value.schedule.num_steps,
        num_frozen=trainer.check_frozen(),
    )


@pytest.fixture(scope="module")
def run(folder):
    overrides = [
        "value.pretrain_batch_trajectories=16",
        "value.pretrain_epochs=5",
        "value.pretrain_holdout=0.2",
        "value.lr_warmup_steps=2",
    ]
    (found,) = run_ranks(1, pretrained, folder, telling_trajectories(80), overrides, timeout_s=120)
    return found


def test_explained_variance_on_held_out_episodes_rises(run):
    quality = [r.metrics[HELD_OUT_EV] for r in run["reports"] if HELD_OUT_EV in r.metrics]
    assert len(quality) == 6, "before the first update and after each of five epochs"
    assert quality[0] == pytest.approx(0.0, abs=1e-6), "a zero head explains nothing"
    assert quality[-1] > 0.8
    last = run["reports"][-1].metrics
    assert last["value/heldout_mean"] == pytest.approx(last["value/heldout_target_mean"], abs=0.15)


def test_one_batch_is_fetched_and_every_update_reported(run):
    (need,) = run["needs"]
    assert (need.phase, need.num_trajectories, need.policy_version) == ("value_pretrain", 80, 0)
    reports = run["reports"]
    assert [r.step for r in reports] == list(range(1 + 5 * 4)), "64 episodes to train on, 16 in an update"
    assert [r.is_trained for r in reports] == [False] + [True] * 20
    assert {(r.phase, r.policy_version) for r in reports} == {("value_pretrain", 0)}
    assert [r.metrics["value/pretrain_trajectories"] for r in reports] == [16.0 * n for n in range(21)]
    losses = [r.metrics["value/loss"] for r in reports[1:]]
    assert np.mean(losses[-4:]) < 0.5 * np.mean(losses[:4])


def test_only_the_value_model_changes_and_its_optimizer_begins_anew(run):
    assert run["policy_moved"] == [] and run["policy_updates"] == 0
    assert run["value_updates"] == 0, "the schedule of RL starts from its own warm-up"
    assert run["num_frozen"] > 0
    assert run["reports"][1].metrics["value/learning_rate"] == 0.0
    assert run["reports"][-1].metrics["value/learning_rate"] == pytest.approx(0.01)


def test_copies_of_the_model_pretrain_together(folder):
    trajectories, overrides = telling_trajectories(20), ["value.pretrain_batch_trajectories=6"]
    (alone,) = run_ranks(1, pretrained, folder, trajectories, overrides)
    for found in run_ranks(2, pretrained, folder, trajectories, [*overrides, "parallel.dp=2"]):
        for report, expected in zip(found["reports"], alone["reports"], strict=True):
            assert report.metrics == {k: pytest.approx(v, abs=1e-3) for k, v in expected.metrics.items()}


def test_batches_without_action_tokens_train_nothing_but_the_epoch_is_measured(folder):
    silent = [replace(t, action_mask=t.action_mask & False) for t in telling_trajectories(20)]
    (found,) = run_ranks(1, pretrained, folder, silent, ["value.pretrain_batch_trajectories=6"])
    assert [r.is_trained for r in found["reports"]] == [False] * 4
    assert [HELD_OUT_EV in r.metrics for r in found["reports"]] == [True, False, False, True]


def test_held_out_episodes_are_drawn_by_seed_and_never_trained_on():
    trajectories = telling_trajectories(10)
    names = {t.prompt.prompt_id for t in trajectories}
    splits = []
    for seed in range(5):
        held_out, training = split(trajectories, 3, seed)
        parts = [{t.prompt.prompt_id for t in part} for part in (held_out, training)]
        assert len(held_out) == 3 and len(training) == 7 and parts[0] | parts[1] == names
        assert [t.prompt.prompt_id for t in split(trajectories, 3, seed)[0]] == [t.prompt.prompt_id for t in held_out]
        splits.append(frozenset(parts[0]))
    assert len(set(splits)) > 1


def poisoned(folder):
    """Pretraining on rewards that are not finite; -> (why it stopped, reported updates)."""
    trajectories = [replace(t, reward_t=np.where(t.action_mask, np.nan, 0)) for t in telling_trajectories(40)]
    overrides = ["value.pretrain_trajectories=40", "value.pretrain_batch_trajectories=4", "run.stop_after_bad_steps=4"]
    config = load_config(None, overrides)
    trainer, scheduler = build_trainer(config, HFFolder(folder), start_world(config)), Scheduler(trajectories)
    with pytest.raises(TrainingError) as caught:
        pretrain_value(trainer, scheduler, Outcome(config.run.stop_after_bad_steps))
    return str(caught.value), len(scheduler.reports) - 1


def test_bad_updates_in_a_row_end_the_run(folder):
    ((text, num_updates),) = run_ranks(1, poisoned, folder)
    assert text.startswith("4 steps in a row") and "of phase value_pretrain" in text and num_updates == 4
