"""One whole SAO step gives the same losses, gradients and weights on one process and on every layout of ranks."""

import dataclasses
from math import prod

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.convert.slices import local_slices, slice_view
from megatron_sao.models import build
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.weights import describe, model_tensors, tensor_ranks
from megatron_sao.parallel.init import start_world
from megatron_sao.train.sao_step import sao_step
from megatron_sao.train.setup import build_trainer
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories

TRAJECTORIES = random_trajectories(9, seed=4)
LAYOUTS = {
    "tp2": dict(tp=2),
    "pp2": dict(pp=2),
    "dp2": dict(dp=2),
    "dp2-ep2": dict(dp=2, ep=2),
    "tp2-ep2": dict(tp=2, ep=2),
    "tp2-etp2": dict(tp=2, etp=2),
    "dp2-etp2": dict(dp=2, etp=2),
    "tp2-dp2-ep2-etp2": dict(tp=2, dp=2, ep=2, etp=2),
    "tp2-dp2-ep4": dict(tp=2, dp=2, ep=4),
    "tp2-pp2-ep2": dict(tp=2, pp=2, ep=2),
    "pp2-dp2-ep2": dict(pp=2, dp=2, ep=2),
    "cp2": dict(cp=2),
    "cp2-tp2-ep4": dict(cp=2, tp=2, ep=4),
    "cp2-pp2": dict(cp=2, pp=2),
    # two chunks of layers on every stage
    "pp2-vpp2": dict(pp=2, vpp=2),
    "tp2-pp2-vpp2-ep2": dict(tp=2, pp=2, vpp=2, ep=2),
    "pp2-vpp2-dp2-ep2": dict(pp=2, vpp=2, dp=2, ep=2),
    # stages of unequal length
    "pp2-first3": dict(pp=2, first_stage_layers=3),
    "pp2-last3": dict(pp=2, last_stage_layers=3),
    "pp3-first2": dict(pp=3, first_stage_layers=2),
    # tokens gathered by all ranks that share the experts, also where each has its own trajectories
    "tp2-ep2-allgather": dict(tp=2, ep=2, expert_dispatcher="allgather"),
    "dp2-ep2-allgather": dict(dp=2, ep=2, expert_dispatcher="allgather"),
    "tp2-dp2-ep2-etp2-allgather": dict(tp=2, dp=2, ep=2, etp=2, expert_dispatcher="allgather"),
    # activations computed twice
    "selective": dict(recompute="selective"),
    "full": dict(recompute="full"),
    "tp2-ep2-selective": dict(tp=2, ep=2, recompute="selective"),
    "tp2-pp2-ep2-full": dict(tp=2, pp=2, ep=2, recompute="full"),
    "pp2-vpp2-dp2-ep2-full": dict(pp=2, vpp=2, dp=2, ep=2, recompute="full"),
}
TOLERANCE = dict(atol=1e-5, rtol=1e-5)
# At epsilon 1 and rate 1 Adam's update is the gradient, nearly: a wrong one would show in the weights too. Schedule and
# group multipliers are part of the step; the budget makes several micro-batches of different lengths.
SETTINGS = [
    "policy.lr=1.0",
    "value.lr=1.0",
    "policy.adam_eps=1.0",
    "value.adam_eps=1.0",
    "policy.lr_warmup_steps=2",
    "value.lr_warmup_steps=3",
    "value.groups.experts.lr_multiplier=0.5",
    "value.groups.head.lr_multiplier=2.0",
    "sampling.max_trajectory_tokens=72",
    "parallel.micro_batch_tokens=72",
]


def settings_without(*names):
    return [setting for setting in SETTINGS if setting.split("=")[0] not in names]


def world_size(axes):
    return prod(axes.get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))


def overrides_of(axes):
    return [f"parallel.{key}={value}" for key, value in axes.items()]


def one_step(folder, overrides, trajectories=TRAJECTORIES, settings=SETTINGS):
    """Two SAO steps; -> metrics of each, gradients and weights after the second as slices of HF tensors.

    The value head starts at zero and the schedule at rate 0: only in the second step do all weights have gradients.
    """
    config = load_config(None, [*settings, *overrides])
    world = start_world(config)
    trainer = build_trainer(config, HFFolder(folder), world)
    trainer.models.turns.take(trainer.models.value)
    before = {k: v.detach().clone() for k, v in model_tensors(trainer.models.value.chunks).items()}
    metrics, gradients = [], {}
    for number in range(2):
        share = trainer.share_of_batch(trajectories, 0)
        result = sao_step(trainer.models, share, config)
        assert result.has_updated_policy
        metrics.append(result.metrics)
        if number == 1:
            gradients = {name: gradients_of(trainer, getattr(trainer.models, name)) for name in ("policy", "value")}
    weights = {name: weights_of(trainer, getattr(trainer.models, name)) for name in ("policy", "value")}
    trainer.check_frozen()
    now = model_tensors(trainer.models.value.chunks)
    frozen_moved = [k for k in trainer.frozen_hashes if not torch.equal(before[k], now[k])]
    trained_still = [k for k in before if k not in trainer.frozen_hashes and torch.equal(before[k], now[k])]
    return metrics, gradients, weights, frozen_moved, trained_still


def weights_of(trainer, model):
    trainer.models.turns.take(model)
    return pieces_of(trainer, model.chunks)


def gradients_of(trainer, model):
    """Whole ones: the distributed optimizer left each rank its own part of the sums."""
    trainer.models.turns.take(model)
    for chunk in model.wrapped:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                own = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=ranks)
    return pieces_of(trainer, model.chunks, gradient=True)


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


def assert_equal_steps(results, reference, what=("metrics", "gradients", "weights")):
    """Metrics of both steps on every rank; gradients and weights of the second."""
    for step in range(2) if "metrics" in what else ():
        for name, expected in reference[0][step].items():
            for metrics, *_ in results:
                assert metrics[step][name] == pytest.approx(expected, abs=1e-5, rel=1e-5), (step, name)
    for model in ("policy", "value"):
        for which in [number for number, name in ((1, "gradients"), (2, "weights")) if name in what]:
            expected, found = whole([reference], which, model), whole(results, which, model)
            assert expected.keys() == found.keys()
            for name in expected:
                torch.testing.assert_close(found[name], expected[name], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def reference(tiny_folder):
    (result,) = run_ranks(1, one_step, tiny_folder, [], timeout_s=120)
    return result


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_is_equal_on_every_layout(tiny_folder, reference, layout):
    axes = LAYOUTS[layout]
    results = run_ranks(world_size(axes), one_step, tiny_folder, overrides_of(axes), timeout_s=120)
    assert_equal_steps(results, reference)


def test_micro_batches_do_not_change_a_step(tiny_folder, reference):
    """Nine trajectories in several micro-batches of at most 72 tokens, or all in one: the same step."""
    settings = settings_without("parallel.micro_batch_tokens")
    results = run_ranks(
        1, one_step, tiny_folder, ["parallel.micro_batch_tokens=1000"], TRAJECTORIES, settings, timeout_s=120
    )
    assert_equal_steps(results, reference)


def test_a_model_of_several_chunks_may_sleep(tiny_folder, reference):
    """The value model's gradients are gone by the end of a step; the weights of both models speak for them."""
    axes = LAYOUTS["pp2-vpp2-dp2-ep2"] | {"offload_sleeping_model": "true"}
    results = run_ranks(world_size(axes), one_step, tiny_folder, overrides_of(axes), timeout_s=120)
    assert_equal_steps(results, reference, what=("metrics", "weights"))


def one_step_with_means(*args):
    """Gradients averaged over micro-batches and data-parallel ranks, as Megatron does by default."""
    original = build.transformer_config

    def with_means(*given, **options):
        config = original(*given, **options)
        config.calculate_per_token_loss = False
        return config

    build.transformer_config = with_means
    return one_step(*args)


def test_a_wrong_scale_of_the_loss_would_show(tiny_folder, reference):
    """The negative control: the same layout passes with sums."""
    results = run_ranks(2, one_step_with_means, tiny_folder, overrides_of(LAYOUTS["dp2-ep2"]), timeout_s=120)
    for what in ("metrics", "gradients", "weights"):
        with pytest.raises(AssertionError):
            assert_equal_steps(results, reference, what=(what,))


def masked(trajectory):
    """The same tokens, none of them an action: nothing to learn from."""
    return msgspec.structs.replace(trajectory, action_mask=np.zeros_like(trajectory.action_mask))


@pytest.fixture(scope="module")
def reference_of_one(tiny_folder):
    (result,) = run_ranks(1, one_step, tiny_folder, [], TRAJECTORIES[:1], timeout_s=120)
    return result


@pytest.mark.parametrize("layout", ["dp2-ep2-allgather", "tp2-dp2-ep2-etp2", "pp2-dp2-ep2", "pp2-vpp2-dp2-ep2-full"])
@pytest.mark.parametrize("other_rank", ["nothing", "masked"])
def test_a_rank_with_nothing_to_learn_from_changes_nothing(tiny_folder, reference_of_one, layout, other_rank):
    """One trajectory for two data-parallel ranks; the other has fillers only, or a trajectory without actions."""
    axes = LAYOUTS[layout]
    given = TRAJECTORIES[:1] + ([masked(TRAJECTORIES[1])] if other_rank == "masked" else [])
    results = run_ranks(world_size(axes), one_step, tiny_folder, overrides_of(axes), given, timeout_s=120)
    assert_equal_steps(results, reference_of_one)


def masked_step(folder, overrides):
    """-> (whether a step without any action trained something, which weights it moved)."""
    config = load_config(None, [*SETTINGS, *overrides])
    trainer = build_trainer(config, HFFolder(folder), start_world(config))
    chunks = trainer.models.policy.chunks, trainer.models.value.chunks
    before = [{key: tensor.detach().clone() for key, tensor in model_tensors(held).items()} for held in chunks]
    share = trainer.share_of_batch([masked(trajectory) for trajectory in TRAJECTORIES], 0)
    result = sao_step(trainer.models, share, config)
    after = [model_tensors(held) for held in chunks]
    moved = [key for old, new in zip(before, after, strict=True) for key in old if not torch.equal(old[key], new[key])]
    return result.has_trained, moved


@pytest.mark.parametrize("layout", ["pp2-vpp2-dp2-ep2-full", "tp2-dp2-ep2-etp2-allgather"])
def test_a_step_without_any_action_trains_nothing(tiny_folder, layout):
    axes = LAYOUTS[layout]
    assert run_ranks(world_size(axes), masked_step, tiny_folder, overrides_of(axes)) == [(False, [])] * 4


GROUPS = ("attention", "norms", "embeddings", "router", "experts")  # all that this model has besides the head


@pytest.mark.parametrize("layout", ["pp2", "pp2-vpp2-dp2-ep2-full"])
@pytest.mark.parametrize("trained", ["head", "everything"])
def test_what_learns_may_be_as_little_or_as_much_as_one_likes(tiny_folder, layout, trained):
    """With the head alone a pipeline's first stage has nothing to learn, no gradient, no optimizer state."""
    groups = [f"value.groups.{group}.trained={'true' if trained == 'everything' else 'false'}" for group in GROUPS]
    given = (TRAJECTORIES, settings_without("value.groups.experts.lr_multiplier"))
    (expected,) = run_ranks(1, one_step, tiny_folder, groups, *given, timeout_s=120)
    have_gradients, all_names = ({name for name, *_ in expected[which]["value"]} for which in (1, 2))
    assert have_gradients == ({"value_head"} if trained == "head" else all_names)
    axes = LAYOUTS[layout]
    results = run_ranks(world_size(axes), one_step, tiny_folder, overrides_of(axes) + groups, *given, timeout_s=120)
    assert_equal_steps(results, expected)


def test_frozen_tensors_keep_their_bits_and_the_others_move(reference):
    _, gradients, _, frozen_moved, trained_still = reference
    assert frozen_moved == []
    assert trained_still == []
    names = {name for name, *_ in gradients["value"]}
    assert not any("self_attn" in name or "norm" in name or "embed" in name for name in names), "no gradient is kept"
    assert any("experts" in name for name in names) and "value_head" in names
