"""Steps under context parallelism on awkward shares: short trajectories, none at all, micro-batches of fillers.

That ordinary steps are equal stands in test_step_equality.py.
"""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.weights import model_tensors
from megatron_sao.parallel.init import start_world
from megatron_sao.train.sao_step import sao_step
from megatron_sao.train.setup import build_trainer
from megatron_sao.train.values import infer_values
from tests.support.families import make_family_folder
from tests.support.folders import make_folder
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories

LONG = random_trajectories(6, seed=4, longest=24)


def cut_to(trajectory, length):
    """Its first tokens; all but the first are actions."""
    arrays = ("token_ids", "logp_sampler", "reward_t", "version_t", "turn_t")
    fields = {name: getattr(trajectory, name)[:length] for name in arrays}
    fields["logp_sampler"] = np.full(length, -4.5, np.float32)
    fields["reward_t"] = np.eye(1, length, length - 1, dtype=np.float32)[0]
    fields["version_t"] = np.zeros(length, np.int32)
    return replace(trajectory, action_mask=np.arange(length) > 0, **fields)


def masked(trajectory):
    return replace(trajectory, action_mask=trajectory.action_mask & False)


# The batches of five steps. A micro-batch has at most 32 tokens, so that ranks differ in how many they have.
STEPS = {
    "one trajectory of two tokens": [cut_to(LONG[0], 2)],
    "five short ones": [cut_to(trajectory, length) for trajectory, length in zip(LONG, (2, 3, 5, 3, 7), strict=False)],
    "long and short": [*LONG[:3], cut_to(LONG[3], 2), masked(LONG[4])],
    "one long, the others without actions": [masked(LONG[0]), LONG[1], masked(LONG[2]), masked(LONG[3])],
    "one whose only action is its second token": [replace(cut_to(LONG[5], 3), action_mask=np.array([0, 1, 0]) > 0)],
}
LAYOUTS = {"cp2-dp2": dict(cp=2, dp=2, ep=4), "cp4": dict(cp=4), "cp2-tp2": dict(cp=2, tp=2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("moe") / "model")


def steps(folder, layout):
    """Metrics and values, token by token, of each step; the policy's dense weights and the value head after all."""
    overrides = [f"parallel.{key}={value}" for key, value in layout.items()]
    rates = ["policy.lr=0.3", "value.lr=0.3", "policy.adam_eps=1.0", "value.adam_eps=1.0"]
    small = [f"{name}=32" for name in ("parallel.micro_batch_tokens", "sampling.max_trajectory_tokens")]
    config = load_config(None, [*rates, *small, "sampling.max_tokens_per_turn=16", *overrides])
    trainer = build_trainer(config, HFFolder(folder), start_world(config))
    found, num_filler_only = {}, 0
    for name, trajectories in STEPS.items():
        share = trainer.share_of_batch(trajectories, 0)
        num_filler_only += sum(not len(part.token_index) for part in share.micro_batches)
        result = sao_step(trainer.models, share, config)
        assert result.has_updated_policy and result.num_skipped_updates == 0
        value = infer_values(trainer.models.value.wrapped, share, trainer.models.readout)
        values = dict(zip(share.numbers, value.split(share.batch.lengths().tolist()), strict=True))
        found[name] = result.metrics, values
    policy, head = (model_tensors(model.chunks) for model in (trainer.models.policy, trainer.models.value))
    weights = {key: tensor.detach().clone() for key, tensor in policy.items() if "norm" in key or "router" in key}
    weights["head"] = head["0:output_layer.weight"].detach().clone()
    return found, weights, num_filler_only


@pytest.fixture(scope="module")
def expected(folder):
    (result,) = run_ranks(1, steps, folder, {}, timeout_s=90)
    return result


def assert_equal_steps(results, expected):
    """Every rank reports the metrics, has the values of its trajectories and ends with the weights of one process."""
    found_in_one, weights_of_one, _ = expected
    for name, (metrics, values) in found_in_one.items():
        seen = set()
        for found, _, _ in results:
            for key, wanted in metrics.items():
                assert found[name][0][key] == pytest.approx(wanted, abs=1e-5, rel=1e-5), (name, key)
            for number, value in found[name][1].items():
                torch.testing.assert_close(value, values[number], atol=1e-5, rtol=1e-5)
            seen |= set(found[name][1])
        assert seen == set(values) and len(values) == len(STEPS[name])
    for _, weights, _ in results:
        for key, wanted in weights_of_one.items():
            torch.testing.assert_close(weights[key], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_awkward_shares_give_the_steps_of_one_process(folder, expected, layout):
    results = run_ranks(4, steps, folder, LAYOUTS[layout], timeout_s=90)
    assert_equal_steps(results, expected)
    if layout == "cp2-dp2":
        assert max(num for *_, num in results) > 0, "a rank without trajectories runs fillers alone"


FAMILIES = {  # latent attention, and sparse attention that layers share, in which a token sees 8 others at most
    "deepseek_v3": {},
    "glm_moe_dsa": dict(num_hidden_layers=3, indexer_types=["full", "shared", "full"]),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_latent_and_sparse_attention_give_the_steps_of_one_process(tmp_path, family):
    folder = make_family_folder(family, tmp_path / family, mtp=False, seed=6, **FAMILIES[family])
    (in_one,) = run_ranks(1, steps, folder, {}, timeout_s=90)
    assert_equal_steps(run_ranks(4, steps, folder, dict(cp=2, tp=2, ep=4), timeout_s=120), in_one)
