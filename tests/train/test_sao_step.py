"""The box of the paper on a tiny model: its order, K, its denominators, and what must have no effect at all."""

import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.data.batch import pack
from megatron_sao.data.share import Share, micro_batch_of
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.weights import model_tensors
from megatron_sao.parallel.init import start_world
from megatron_sao.parallel.schedule import run_schedule
from megatron_sao.train.advantages import policy_advantages, value_targets
from megatron_sao.train.logprobs import learner_logprob
from megatron_sao.train.policy_step import policy_loss
from megatron_sao.train.sao_step import sao_step
from megatron_sao.train.setup import build_trainer
from megatron_sao.train.shares import scatter_to_share
from megatron_sao.train.value_step import value_update
from megatron_sao.train.values import infer_values
from tests.support.folders import make_folder
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories

NAN = float("nan")
TRAJECTORIES = random_trajectories(5, seed=4, longest=24)  # rewards 1, 1, 0, 0, 1
FAST = ["value.lr=0.05", "policy.lr=0.05"]  # large, so that an effect shows in one step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("moe") / "model")


def trainer_of(folder, *overrides):
    config = load_config(None, list(overrides))
    return build_trainer(config, HFFolder(folder), start_world(config))


def step(trainer, trajectories=TRAJECTORIES, **options):
    return sao_step(trainer.models, trainer.share_of_batch(trajectories, 0), trainer.config, **options)


def weights_of(learner):
    return {key: tensor.detach().clone() for key, tensor in model_tensors(learner.chunks).items()}


def state_of(trainer):
    """Everything that a step may change: weights, Adam's moments and counts, schedules."""
    found = {}
    for role in ("policy", "value"):
        learner = getattr(trainer.models, role)
        found |= {f"{role} {key}": tensor for key, tensor in weights_of(learner).items()}
        found[f"{role} schedule"] = torch.tensor(learner.schedule.num_steps)
        for i, optimizer in enumerate(learner.optimizer.chained_optimizers):
            for j, group in enumerate(optimizer.optimizer.param_groups):
                found[f"{role} count {i} {j}"] = torch.tensor(group.get("step", 0))
                for k, parameter in enumerate(group["params"]):
                    for name, moment in optimizer.optimizer.state[parameter].items():
                        found[f"{role} {name} {i} {j} {k}"] = moment.clone()
    return found


def changed(before, after):
    assert before.keys() == after.keys()
    return sorted(key for key in before if not torch.equal(before[key], after[key]))


def masked_everywhere(trajectory):
    return replace(trajectory, action_mask=trajectory.action_mask & False)


# ---- no signal -------------------------------------------------------------------------------------------------


def no_signal(folder):
    trainer = trainer_of(folder, *FAST, "value.weight_decay=0.1", "policy.weight_decay=0.1")
    assert step(trainer).has_updated_policy  # Adam has momentum now, on which a zero gradient would still move weights
    before = state_of(trainer)
    results = [step(trainer, [masked_everywhere(t) for t in TRAJECTORIES]), step(trainer, [])]
    return results, changed(before, state_of(trainer)), len(before)


def test_a_step_without_action_tokens_changes_nothing(folder):  # NRM-04
    ((results, moved, num_compared),) = run_ranks(1, no_signal, folder)
    assert moved == [] and num_compared > 100
    for result in results:
        assert not result.has_trained and not result.has_updated_policy and result.metrics == {}


# ---- one denominator -------------------------------------------------------------------------------------------

LOSSES = {"a": [1.0, 1.0, 1.0], "b": [9.0], "c": [2.0, 2.0, 2.0, 2.0]}  # of single tokens; mean 2.5
GROUPINGS = {
    "as reported": [[["a"], ["b"]], [["c"], []]],
    "other rank first": [[["c"], []], [["b"], ["a"]]],
    "all on one rank": [[["a"], ["b"], ["c"]], [[], [], []]],
    "uneven": [[["b"], []], [["a", "c"], []]],
    "alone in one": [[["a", "b", "c"]]],
    "alone in three": [[["c"], ["a"], ["b"]]],
}


def made_of_losses(names):
    """Trajectories whose V is 0 and whose targets give the wanted losses: 0.5 * (0 - target)^2."""
    made, targets = [], []
    for name in names:
        losses = LOSSES[name]
        like = random_trajectories(1)[0]
        length = 1 + len(losses)
        mask = torch.tensor([False] + [True] * len(losses)).numpy()
        arrays = ("token_ids", "logp_sampler", "reward_t", "version_t", "turn_t")
        fields = {array: getattr(like, array)[:length] for array in arrays}
        made.append(replace(like, action_mask=mask, **fields))
        targets += [NAN] + [math.sqrt(2 * loss) for loss in losses]
    return pack(made, 0, lambda domain: (0.8, 3.0)), torch.tensor(targets)


def regrouped(folder, grouping):
    """(loss, gradient norm, head after the update) of the value update on this rank's part of a grouping."""
    overrides = [f"parallel.dp={len(grouping)}", "value.lr=1.0", "value.adam_eps=1.0", "value.clip_grad=0.0"]
    trainer = trainer_of(folder, *overrides)
    mine = grouping[trainer.world.dp]
    names = [name for part in mine for name in part]
    batch, target = made_of_losses(names)
    parts, first = [], 0
    for part in mine:
        numbers = list(range(first, first + len(part)))
        parts.append(micro_batch_of(batch, numbers))
        first += len(part)
    share = Share(batch, parts, 8, 3, [], torch.zeros(3), torch.zeros(3, dtype=torch.int64))
    old = torch.zeros(batch.num_tokens)
    metrics = value_update(trainer.models.value, share, target, old, trainer.models.readout)
    return metrics["value/loss"], metrics["value/grad_norm"], weights_of(trainer.models.value)["0:output_layer.weight"]


@pytest.fixture(scope="module")
def in_one_piece(folder):
    (result,) = run_ranks(1, regrouped, folder, GROUPINGS["alone in one"])
    return result


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_the_loss_is_the_mean_over_all_action_tokens_however_they_are_grouped(folder, in_one_piece, grouping):
    """NRM-02: the mean of micro-batch means would say 3.0."""
    for loss, norm, head in run_ranks(len(GROUPINGS[grouping]), regrouped, folder, GROUPINGS[grouping]):
        assert loss == pytest.approx(2.5, rel=1e-6)
        assert norm == pytest.approx(in_one_piece[1], rel=1e-5)
        torch.testing.assert_close(head, in_one_piece[2], atol=1e-6, rtol=1e-5)


# ---- the order of the box --------------------------------------------------------------------------------------


def learner_logp(trainer, share):
    config, models = trainer.config, trainer.models

    def collect(logits, micro_batch):
        logp, _ = learner_logprob(logits, micro_batch, config.sampling.temperature, models.true_vocab)
        return logits.new_zeros(()), {"logp": logp.cpu()}

    reports = run_schedule(models.policy.wrapped, share.micro_batches, collect, backward=False)
    return scatter_to_share(reports, "logp", share)


def in_order(folder, overrides):
    """The policy loss that a step reports, and what it would be with the values before and after its K updates."""
    trainer = trainer_of(folder, *FAST, *overrides)
    models, algo = trainer.models, trainer.config.algo
    step(trainer)  # so that values are not zero any more
    share = trainer.share_of_batch(TRAJECTORIES, 0)
    logp = learner_logp(trainer, share)
    before = infer_values(models.value.wrapped, share, models.readout)
    result = step(trainer)
    after = infer_values(models.value.wrapped, share, models.readout)

    def loss_for(value):
        advantage = policy_advantages(share, value, algo)
        parts = [(part, part.at_positions(logp[part.token_index])) for part in share.micro_batches]
        return float(sum(policy_loss(algo, logp_here, part, advantage, share) for part, logp_here in parts))

    return result.metrics["policy/loss"], loss_for(before), loss_for(after)


@pytest.mark.parametrize("order", ["updated_values", "values_before"])
def test_advantages_come_from_values_after_or_before_the_updates(folder, order):
    overrides = [] if order == "updated_values" else ["algo.advantages_from=values_before"]
    ((reported, from_before, from_after),) = run_ranks(1, in_order, folder, overrides)
    assert abs(from_before - from_after) > 1e-3, "the test must be able to tell them apart"
    expected = from_after if order == "updated_values" else from_before
    assert reported == pytest.approx(expected, abs=1e-5)


def by_hand(folder, num_updates):
    """A step with K updates, and the same K updates made by hand from the targets before them."""
    overrides = [*FAST, f"value.updates_per_step={num_updates}", "algo.value_lambda=0.5"]
    stepped, manual = trainer_of(folder, *overrides), trainer_of(folder, *overrides)
    for trainer in (stepped, manual):
        step(trainer)
    before = weights_of(stepped.models.policy), stepped.models.value.schedule.num_steps
    result = step(stepped)

    models, share = manual.models, manual.share_of_batch(TRAJECTORIES, 0)
    value = infer_values(models.value.wrapped, share, models.readout)
    target = value_targets(share, value, manual.config.algo)
    losses = []
    for _ in range(num_updates):
        losses.append(value_update(models.value, share, target, value, models.readout)["value/loss"])
    return dict(
        differ=changed(weights_of(stepped.models.value), weights_of(models.value)),
        value_updates=stepped.models.value.schedule.num_steps - before[1],
        policy_updates=stepped.models.policy.schedule.num_steps,
        has_moved=bool(changed(before[0], weights_of(stepped.models.policy))),
        reported=result.metrics["value/loss"],
        losses=losses,
    )


@pytest.mark.parametrize("num_updates", [1, 2, 3])
def test_a_step_makes_k_value_updates_towards_the_same_targets_and_one_policy_update(folder, num_updates):
    (found,) = run_ranks(1, by_hand, folder, num_updates)
    assert found["differ"] == [] and found["has_moved"]
    assert found["value_updates"] == num_updates and found["policy_updates"] == 2
    assert found["reported"] == found["losses"][-1]
    assert len(set(found["losses"])) == num_updates, "each update sees the weights of the one before"


def value_only(folder):
    trainer = trainer_of(folder, *FAST)
    before = weights_of(trainer.models.policy), weights_of(trainer.models.value)
    result = step(trainer, trains_policy=False)
    return dict(
        result=result,
        policy=changed(before[0], weights_of(trainer.models.policy)),
        value=changed(before[1], weights_of(trainer.models.value)),
        schedules=(trainer.models.policy.schedule.num_steps, trainer.models.value.schedule.num_steps),
    )


def test_a_warm_up_step_leaves_the_policy_alone(folder):
    (found,) = run_ranks(1, value_only, folder)
    assert found["result"].has_trained and not found["result"].has_updated_policy
    assert found["policy"] == [] and "0:output_layer.weight" in found["value"]
    assert found["schedules"] == (0, 2)
    assert not any(name.startswith("policy/") for name in found["result"].metrics)


# ---- empty shares ----------------------------------------------------------------------------------------------


def few_trajectories(folder, num_ranks, arm):
    trainer = trainer_of(folder, *FAST, f"parallel.dp={num_ranks}", *arm)
    share = trainer.share_of_batch(TRAJECTORIES[:1], 0)
    results = [sao_step(trainer.models, share, trainer.config) for _ in range(2)]
    return share.batch.num_tokens, [r.metrics for r in results], weights_of(trainer.models.policy)


@pytest.mark.parametrize("arm", [[], ["algo.whiten=true", "algo.aggregation=trajectory"]], ids=["sao", "whiten"])
def test_a_rank_without_trajectories_hangs_nothing_and_adds_nothing(folder, arm):
    ((_, expected, weights),) = run_ranks(1, few_trajectories, folder, 1, arm)
    results = run_ranks(2, few_trajectories, folder, 2, arm)
    assert sorted(num_tokens > 0 for num_tokens, _, _ in results) == [False, True]
    for _, metrics, found in results:
        for step_found, step_expected in zip(metrics, expected, strict=True):
            assert step_found == {k: pytest.approx(v, rel=1e-4, abs=1e-6) for k, v in step_expected.items()}
        for key, tensor in weights.items():
            torch.testing.assert_close(found[key], tensor, atol=2e-4, rtol=0)


# ---- what must have no effect ----------------------------------------------------------------------------------


def at_temperature(folder, temperature):
    trainer = trainer_of(folder, *FAST, f"sampling.temperature={temperature}")
    metrics = [step(trainer).metrics, step(trainer).metrics]
    share = trainer.share_of_batch(TRAJECTORIES, 0)
    value = infer_values(trainer.models.value.wrapped, share, trainer.models.readout)
    return metrics, weights_of(trainer.models.value), value


def test_temperature_never_touches_values(folder):  # VAL-02
    (cold,) = run_ranks(1, at_temperature, folder, 0.5)
    (hot,) = run_ranks(1, at_temperature, folder, 2.0)
    assert torch.equal(cold[2], hot[2]) and cold[2].abs().max() > 0
    assert changed(cold[1], hot[1]) == []
    for a, b in zip(cold[0], hot[0], strict=True):
        same = [name for name in a if name.startswith("value/")]
        assert {n: a[n] for n in same} == {n: b[n] for n in same} and len(same) >= 5
        assert a["policy/entropy"] < b["policy/entropy"], "the policy is scored at the sampling temperature"


def littered(trajectories):
    """The same trajectories with NaN, infinities and huge numbers wherever no action stands."""
    made = []
    for t in trajectories:
        fields = {name: getattr(t, name).copy() for name in ("logp_sampler", "reward_t")}
        for array in fields.values():
            array[~t.action_mask] = np.resize([NAN, -np.inf, np.inf, -1e10], int((~t.action_mask).sum()))
        made.append(replace(t, **fields))
    return made


ARMS = {
    "sao": [],
    "whiten": ["algo.whiten=true"],
    "plain gae": ["algo.arm=sao_plain_gae"],
    "turn average": ["algo.arm=sao_step_average"],
    "one-sided": ["algo.arm=sao_one_sided"],
    "trajectory mean": ["algo.aggregation=trajectory"],
    "vapo": ["algo.arm=vapo"],
    "grpo": ["algo.arm=grpo", "sampling.rollouts_per_prompt=2"],
    "running mean": ["algo.arm=running_mean"],
    "hl_gauss": ["value.loss=hl_gauss"],
    "cut": ["algo.bootstrap_cut=true"],
    "bfloat16": ["model.dtype=bfloat16", "engine.dtype=bfloat16"],
}


def rollouts_of_two_prompts(trajectories):
    """Rewards 1, 0, 1 of one prompt and 1, 0 of the other; the second trajectory was cut."""
    prompts = [replace(t.prompt, prompt_id=f"test/{n % 2}#{n // 2}") for n, t in enumerate(trajectories)]
    return [replace(t, prompt=prompts[n], is_cut=n == 1) for n, t in enumerate(trajectories)]


def every_arm(folder, is_littered):
    """arm -> metrics of two steps, weights of both models after them, which models moved."""
    trajectories = rollouts_of_two_prompts(TRAJECTORIES)
    if is_littered:
        trajectories = littered(trajectories)
    found = {}
    for arm, overrides in ARMS.items():
        trainer = trainer_of(folder, *FAST, *overrides)
        before = {role: weights_of(getattr(trainer.models, role)) for role in ("policy", "value")}
        results = [step(trainer, trajectories) for _ in range(2)]
        after = {role: weights_of(getattr(trainer.models, role)) for role in before}
        found[arm] = dict(
            results=results, weights=after, moved={role: bool(changed(before[role], after[role])) for role in before}
        )
    return found


@pytest.fixture(scope="module")
def arms(folder):
    (found,) = run_ranks(1, every_arm, folder, False, timeout_s=120)
    return found


def test_what_stands_off_the_action_mask_changes_no_bit_of_any_arm(folder, arms):
    (found,) = run_ranks(1, every_arm, folder, True, timeout_s=120)
    for arm, clean in arms.items():
        assert found[arm]["results"] == clean["results"], arm
        for role in ("policy", "value"):
            assert changed(clean["weights"][role], found[arm]["weights"][role]) == [], arm


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_makes_finite_updates(arms, arm):
    found = arms[arm]
    assert found["moved"] == {"policy": True, "value": arm not in ("grpo", "running mean")}
    for result in found["results"]:
        assert result.has_trained and result.has_updated_policy and result.num_skipped_updates == 0
        assert all(math.isfinite(number) for number in result.metrics.values())
        assert result.metrics["policy/grad_norm"] > 0
    for tensors in found["weights"].values():
        assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def test_every_arm_is_an_experiment_of_its_own(arms):
    """Equal losses of two arms would mean that a flag is not read."""
    losses = {arm: found["results"][1].metrics["policy/loss"] for arm, found in arms.items()}
    assert len({round(loss, 6) for loss in losses.values()}) == len(losses), losses


def warm_up_of_a_control_arm(folder):
    trainer = trainer_of(folder, *FAST, "algo.arm=running_mean")
    before = state_of(trainer)
    return step(trainer, trains_policy=False), changed(before, state_of(trainer))


def test_a_control_arm_without_a_value_model_has_nothing_to_warm_up(folder):
    ((result, moved),) = run_ranks(1, warm_up_of_a_control_arm, folder)
    assert not result.has_trained and moved == []


# ---- aggregation -----------------------------------------------------------------------------------------------


def both_aggregations(folder):
    found = {}
    for aggregation in ("token", "trajectory"):
        trainer = trainer_of(folder, *FAST, f"algo.aggregation={aggregation}", "parallel.micro_batch_tokens=128")
        share = trainer.share_of_batch([*TRAJECTORIES, masked_everywhere(TRAJECTORIES[0])], 0)
        logp = learner_logp(trainer, share)
        result = sao_step(trainer.models, share, trainer.config)
        value = infer_values(trainer.models.value.wrapped, share, trainer.models.readout)
        advantage = policy_advantages(share, value, trainer.config.algo)
        found[aggregation] = result.metrics["policy/loss"], share.batch, logp, advantage
    return found


def test_the_policy_loss_is_a_mean_over_tokens_or_over_trajectories(folder):
    (found,) = run_ranks(1, both_aggregations, folder)
    for aggregation, (reported, batch, logp, advantage) in found.items():
        sums, counts = [], []
        starts = batch.starts.tolist()
        for first, end in zip(starts, starts[1:], strict=False):
            terms = []
            for t in range(first, end):
                if batch.action_mask[t]:
                    ratio = math.exp(float(logp[t]) - float(batch.logp_sampler[t]))
                    weight = ratio if 0.2 < ratio < 4.0 else 0.0
                    terms.append(-weight * float(advantage[t]) * float(logp[t]))
            if terms:
                sums.append(sum(terms))
                counts.append(len(terms))
        assert len(counts) == 5, "the sixth trajectory has no action token and counts for nothing"
        by_token = sum(sums) / sum(counts)
        by_trajectory = sum(s / n for s, n in zip(sums, counts, strict=True)) / len(counts)
        assert abs(by_token - by_trajectory) > 1e-3
        assert reported == pytest.approx(by_token if aggregation == "token" else by_trajectory, rel=1e-4)


# ---- bad numbers -----------------------------------------------------------------------------------------------


def bad_reward(folder):
    trainer = trainer_of(folder, *FAST)
    step(trainer)
    before = state_of(trainer)
    reward_t = TRAJECTORIES[1].reward_t.copy()
    reward_t[-1] = NAN  # on an action token: rollout/ drops such samples, so this is the second line of defence
    broken = [TRAJECTORIES[0], replace(TRAJECTORIES[1], reward_t=reward_t), *TRAJECTORIES[2:]]
    result = step(trainer, broken)
    moved = changed(before, state_of(trainer))
    return result, moved, step(trainer).has_updated_policy


def test_a_step_with_bad_numbers_is_left_out_and_counted(folder):
    ((result, moved, goes_on),) = run_ranks(1, bad_reward, folder)
    assert moved == [] and goes_on
    assert result.has_trained and not result.has_updated_policy
    assert result.num_skipped_updates == 3, "two of the value model, one of the policy"


# ---- categorical values ----------------------------------------------------------------------------------------


def categorical(folder):
    bins = ["value.loss=hl_gauss", "value.hl_gauss_bins=11"]
    trainer = trainer_of(folder, *bins, "value.lr=0.01", "value.updates_per_step=1")
    share = trainer.share_of_batch(TRAJECTORIES, 0)
    before = infer_values(trainer.models.value.wrapped, share, trainer.models.readout)
    losses = [step(trainer, trains_policy=False).metrics["value/loss"] for _ in range(15)]
    after = infer_values(trainer.models.value.wrapped, share, trainer.models.readout)
    target = value_targets(share, after, trainer.config.algo)
    mask = share.batch.action_mask
    head = weights_of(trainer.models.value)["0:output_layer.weight"]
    return before[mask], losses, float((after - target)[mask].abs().mean()), tuple(head.shape)


def test_a_categorical_value_model_learns(folder):
    ((before, losses, error, head_shape),) = run_ranks(1, categorical, folder)
    assert head_shape == (11, 32)
    assert before.tolist() == pytest.approx([0.5] * len(before)), "equal bins from -0.5 to 1.5"
    assert losses[0] == pytest.approx(math.log(11), rel=1e-3) and losses[-1] < 0.9 * losses[0]
    assert error < 0.4, "from 0.5 at the start"
