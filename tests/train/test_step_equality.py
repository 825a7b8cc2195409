"""One whole SAO step gives the same losses, gradients and weights on one process and on every layout of ranks."""

import dataclasses

import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.convert.slices import local_slices, slice_view
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.weights import describe, model_tensors, tensor_ranks
from megatron_sao.parallel.init import start_world
from megatron_sao.train.sao_step import sao_step
from megatron_sao.train.setup import build_trainer
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories

TRAJECTORIES = random_trajectories(9, seed=4)
LAYOUTS = {
    "tp2-ep2": dict(tp=2, ep=2),
    "tp2": dict(tp=2),
    "tp2-etp2": dict(tp=2, etp=2),
    "dp2": dict(dp=2),
    "dp2-ep2": dict(dp=2, ep=2),
    "pp2": dict(pp=2),
    "tp2-pp2-ep2": dict(tp=2, pp=2, ep=2),
    "pp2-dp2-ep2": dict(pp=2, dp=2, ep=2),
    "cp2": dict(cp=2),
    "cp2-tp2-ep4": dict(cp=2, tp=2, ep=4),
    "cp2-pp2": dict(cp=2, pp=2),
}
# Where every weight has one data-parallel copy. With more, the distributed optimizer leaves each rank only its share of
# the reduced gradients, and the weights speak for them: at epsilon 1 and rate 1 Adam's update is the gradient, nearly.
WHOLE_GRADIENTS = ("tp2-ep2", "tp2-etp2", "pp2", "tp2-pp2-ep2")
TOLERANCE = dict(atol=1e-5, rtol=1e-5)


def one_step(folder, overrides):
    """Two SAO steps; -> metrics of each, gradients of the first and weights after the second, as whole HF tensors."""
    config = load_config(
        None,
        ["policy.lr=1.0", "value.lr=1.0", "policy.adam_eps=1.0", "value.adam_eps=1.0", *overrides],
    )
    world = start_world(config)
    trainer = build_trainer(config, HFFolder(folder), world)
    before = {k: v.detach().clone() for k, v in model_tensors(trainer.models.value.chunks).items()}
    metrics, gradients = [], {}
    for number in range(2):
        share = trainer.share_of_batch(TRAJECTORIES, 0)
        result = sao_step(trainer.models, share, config)
        assert result.has_updated_policy
        metrics.append(result.metrics)
        if number == 0:
            gradients = {
                "policy": pieces_of(trainer, trainer.models.policy.chunks, gradient=True),
                "value": pieces_of(trainer, trainer.models.value.chunks, gradient=True),
            }
    weights = {
        "policy": pieces_of(trainer, trainer.models.policy.chunks),
        "value": pieces_of(trainer, trainer.models.value.chunks),
    }
    trainer.check_frozen()
    now = model_tensors(trainer.models.value.chunks)
    frozen_moved = [k for k in trainer.frozen_hashes if not torch.equal(before[k], now[k])]
    trained_still = [k for k in before if k not in trainer.frozen_hashes and torch.equal(before[k], now[k])]
    return metrics, gradients, weights, frozen_moved, trained_still


def pieces_of(trainer, chunks, gradient=False):
    """(HF name, dim, start, length, full shape, tensor) of everything this rank holds, the value head included."""
    tensors = model_tensors(chunks)
    if gradient:
        tensors = {k: v.main_grad.clone() for k, v in tensors.items() if hasattr(v, "main_grad")}
    else:
        tensors = {k: v.detach().clone() for k, v in tensors.items()}
    described = [dataclasses.replace(t, name=t.name) for t in describe(chunks) if t.key in tensors]
    head = [t for t in described if t.name == "output_layer.weight" and t.shape[0] == 1]
    body = [t for t in described if t not in head]
    pieces = local_slices(body, trainer.shape, tensor_ranks(trainer.world))
    found = [(p.hf_name, p.dim, p.start, p.length, p.full_shape, slice_view(p, tensors)) for p in pieces]
    return found + [("value_head", 0, 0, 1, t.shape, tensors[t.key]) for t in head]


def whole(results, which, model):
    """HF name -> tensor put together from all ranks; copies of the same slice must agree."""
    tensors, filled = {}, {}
    for result in results:
        for name, dim, start, length, shape, tensor in result[which][model]:
            target = tensors.setdefault(name, torch.zeros(shape))
            mask = filled.setdefault(name, torch.zeros(shape, dtype=torch.bool))
            seen = mask.narrow(dim, start, length)
            if bool(seen.any()):
                torch.testing.assert_close(target.narrow(dim, start, length), tensor, atol=1e-7, rtol=1e-6)
            target.narrow(dim, start, length).copy_(tensor)
            seen.fill_(True)
    assert all(bool(m.all()) for m in filled.values())
    return tensors


@pytest.fixture(scope="module")
def reference(tiny_folder):
    (result,) = run_ranks(1, one_step, tiny_folder, [], timeout_s=120)
    return result


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_is_equal_on_every_layout(tiny_folder, reference, layout):
    axes = LAYOUTS[layout]
    overrides = [f"parallel.{key}={value}" for key, value in axes.items()]
    world_size = axes.get("tp", 1) * axes.get("pp", 1) * axes.get("cp", 1) * axes.get("dp", 1)
    results = run_ranks(world_size, one_step, tiny_folder, overrides, timeout_s=120)
    for step in range(2):
        for name, expected in reference[0][step].items():
            for metrics, *_ in results:
                assert metrics[step][name] == pytest.approx(expected, abs=2e-5, rel=2e-5), (step, name)
    for model in ("policy", "value"):
        for which in (1, 2) if layout in WHOLE_GRADIENTS else (2,):
            expected, found = whole([reference], which, model), whole(results, which, model)
            assert expected.keys() == found.keys()
            for name in expected:
                torch.testing.assert_close(found[name], expected[name], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


def test_micro_batches_do_not_change_a_step(tiny_folder, reference):
    """Nine trajectories in one micro-batch, or in many of at most 48 tokens: the same step."""
    overrides = ["parallel.micro_batch_tokens=48", "sampling.max_trajectory_tokens=48"]
    (found,) = run_ranks(1, one_step, tiny_folder, overrides, timeout_s=120)
    for step in range(2):
        for name, expected in reference[0][step].items():
            assert found[0][step][name] == pytest.approx(expected, abs=2e-5, rel=2e-5), (step, name)
    for model in ("policy", "value"):
        expected, now = whole([reference], 2, model), whole([found], 2, model)
        for name in expected:
            torch.testing.assert_close(now[name], expected[name], **TOLERANCE)


def test_frozen_tensors_keep_their_bits_and_the_others_move(reference):
    _, gradients, _, frozen_moved, trained_still = reference
    assert frozen_moved == []
    assert trained_still == []
    names = {name for name, *_ in gradients["value"]}
    assert not any("self_attn" in name or "norm" in name or "embed" in name for name in names), "no gradient is kept"
    assert any("experts" in name for name in names) and "value_head" in names
