"""SAO steps of a DeepSeek-V3 with its MTP layer: the policy learns as without it, the router's bias never moves."""

from math import prod

import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.errors import CheckpointError
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.weights import model_tensors
from megatron_sao.parallel.init import start_world
from megatron_sao.train.sao_step import sao_step
from megatron_sao.train.setup import build_trainer
from tests.support.families import FAMILIES_WITH_MTP, make_family_folder
from tests.support.folders import make_folder, read_weights
from tests.support.pieces import hf_pieces, put_together
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories

TRAJECTORIES = random_trajectories(8, seed=4)
# At epsilon 1 and rate 1 Adam's update is the gradient, nearly: a wrong one shows in the weights.
SETTINGS = [
    "policy.lr=1.0",
    "value.lr=1.0",
    "policy.adam_eps=1.0",
    "value.adam_eps=1.0",
    "sampling.max_trajectory_tokens=72",
    "parallel.micro_batch_tokens=72",
]
LAYOUTS = {"1": {}, "tp2": dict(tp=2), "pp2": dict(pp=2), "dp2-ep2": dict(dp=2, ep=2)}
MTP_LAYER = "model.layers.4."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_family_folder("deepseek_v3", tmp_path_factory.mktemp("mtp") / "model", mtp=True, seed=3)


def steps(folder, overrides, number=3):
    """-> (metrics of each step, {model: its weights as pieces of HF tensors}, tensors frozen in the value model)."""
    config = load_config(None, [*SETTINGS, *overrides])
    world = start_world(config)
    trainer = build_trainer(config, HFFolder(folder), world)
    models = {"policy": trainer.models.policy.chunks, "value": trainer.models.value.chunks}
    metrics = []
    for _ in range(number):
        result = sao_step(trainer.models, trainer.share_of_batch(TRAJECTORIES, 0), config)
        assert result.has_updated_policy
        metrics.append(result.metrics)
    num_frozen = trainer.check_frozen()
    weights = {}
    for role, chunks in models.items():
        tensors = {key: tensor.detach().clone() for key, tensor in model_tensors(chunks).items()}
        if role == "value":
            tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith("output_layer.weight")}
        weights[role] = hf_pieces(chunks, trainer.shape, world, tensors)
    return metrics, weights, num_frozen


def whole(results, role):
    return put_together([weights[role] for _, weights, _ in results])


@pytest.fixture(scope="module")
def trained(folder):
    return run_ranks(1, steps, folder, ["policy.mtp_loss_weight=0.5"], timeout_s=120)


def test_the_policy_learns_bit_for_bit_as_without_its_mtp_layer(folder, trained):
    without = run_ranks(1, steps, folder, [], timeout_s=120)
    alone, together = whole(without, "policy"), whole(trained, "policy")
    assert not any(name.startswith(MTP_LAYER) for name in alone)
    assert {name for name in together if not name.startswith(MTP_LAYER)} == set(alone)
    moved = [name for name, tensor in alone.items() if not torch.equal(tensor, together[name])]
    assert moved == []
    assert "policy/mtp_loss" not in without[0][0][0]


def test_the_mtp_layer_learns_to_draft(folder, trained):
    losses = [metrics["policy/mtp_loss"] for metrics in trained[0][0]]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.01
    before, after = read_weights(folder), whole(trained, "policy")
    # An expert may have had no token, the bias never learns.
    learns = {name for name in before if ".experts." not in name and "e_score" not in name}
    names = [name for name in learns if name.startswith(MTP_LAYER)]
    assert len(names) > 10
    assert [name for name in names if torch.equal(before[name], after[name])] == []


def test_the_selection_bias_of_the_routers_keeps_its_bits(folder, trained):
    before = {name: tensor for name, tensor in read_weights(folder).items() if "e_score_correction_bias" in name}
    assert len(before) == 4  # three layers with experts, and the MTP layer
    for role in ("policy", "value"):
        after = {name: tensor for name, tensor in whole(trained, role).items() if name in before}
        assert len(after) == (4 if role == "policy" else 3)
        for name, tensor in after.items():
            assert tensor.dtype == torch.float32 and torch.equal(tensor, before[name]), name


def test_the_value_model_has_no_mtp_layer_and_keeps_its_latent_attention(folder, trained):
    before, after = read_weights(folder), whole(trained, "value")
    assert not any(name.startswith(MTP_LAYER) for name in after)
    attention = [name for name in after if "self_attn" in name or "input_layernorm" in name]
    assert len(attention) == 4 * 8  # seven parts of latent attention and the norm before it
    assert [name for name in attention if not torch.equal(before[name], after[name])] == []
    learned = [name for name in after if "shared_experts" in name or name.endswith("mlp.gate.weight")]
    assert learned and not any(torch.equal(before[name], after[name]) for name in learned)
    metrics, _, num_frozen = trained[0]
    assert num_frozen > len(attention)  # embeddings, norms and the routers' bias beside it
    assert metrics[-1]["value/loss"] < metrics[0]["value/loss"]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "1"])
def test_steps_are_equal_on_every_layout(folder, trained, layout):
    axes = LAYOUTS[layout]
    overrides = ["policy.mtp_loss_weight=0.5", *(f"parallel.{axis}={size}" for axis, size in axes.items())]
    world_size = prod(axes.get(axis, 1) for axis in ("tp", "pp", "dp"))
    results = run_ranks(world_size, steps, folder, overrides, timeout_s=150)
    for metrics, *_ in results:
        for found, expected in zip(metrics, trained[0][0], strict=True):
            assert found == pytest.approx(expected, abs=1e-5, rel=1e-5)
    for role in ("policy", "value"):
        expected, found = whole(trained, role), whole(results, role)
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(
                found[name], expected[name], atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{role} {n}: {m}"
            )


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe"])
def test_both_models_of_the_other_families_learn(tmp_path, family):
    """Their MTP layer stands in the folder and is not built."""
    has_mtp = family in FAMILIES_WITH_MTP
    folder = make_family_folder(family, tmp_path / family, mtp=has_mtp, seed=5)
    (result,) = run_ranks(1, steps, folder, [], 2, timeout_s=120)
    metrics, _, num_frozen = result
    assert metrics[1]["value/loss"] < metrics[0]["value/loss"] and num_frozen > 0
    before, after = read_weights(folder), whole([result], "value")
    frozen = [name for name in after if "self_attn" in name]
    assert len(frozen) >= 4 * 6 and all(torch.equal(before[name], after[name]) for name in frozen)
    assert any(name.startswith(MTP_LAYER) for name in before) == has_mtp
    assert not any(name.startswith(MTP_LAYER) for name in whole([result], "policy"))


def refusal(folder):
    try:
        steps(folder, ["policy.mtp_loss_weight=0.5"])
    except CheckpointError as error:
        return str(error)


def test_a_model_without_mtp_layer_cannot_train_one(tmp_path):
    (text,) = run_ranks(1, refusal, make_folder(tmp_path / "moe"))
    assert "counts 0 MTP layers" in text and "policy.mtp_loss_weight = 0" in text


def bias_types(folder):
    config = load_config(None, ["policy.mtp_loss_weight=0.5", "model.dtype=bfloat16", "engine.dtype=bfloat16"])
    trainer = build_trainer(config, HFFolder(folder), start_world(config))
    sao_step(trainer.models, trainer.share_of_batch(TRAJECTORIES, 0), config)
    return {
        f"{role} {key}": tensor.detach().clone()
        for role, model in (("policy", trainer.models.policy), ("value", trainer.models.value))
        for key, tensor in model_tensors(model.chunks).items()
        if key.endswith("expert_bias")
    }


def test_the_selection_bias_stays_float32_in_a_bfloat16_model(folder):
    (found,) = run_ranks(1, bias_types, folder, timeout_s=120)
    saved = [tensor for name, tensor in read_weights(folder).items() if "e_score_correction_bias" in name]
    assert len(found) == 4 + 3
    for name, tensor in found.items():
        assert any(torch.equal(tensor, bias) for bias in saved), name
