"""bfloat16 weights: float32 masters, gradients and moments; float32 value head, router and expert bias."""

import pytest
import torch
from megatron.core.transformer.moe.router import Router

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.convert.family import read_shape
from megatron_sao.models.build import build_model
from megatron_sao.models.groups import freeze
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.optimizer import make_trained_model
from megatron_sao.models.weights import load_weights
from megatron_sao.parallel.cpu_adam import GroupStepAdam
from megatron_sao.parallel.init import start_world
from megatron_sao.train.sao_step import sao_step
from megatron_sao.train.setup import build_trainer
from tests.support.families import make_family_folder
from tests.support.folders import make_folder, read_weights
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories

BF16 = ["model.dtype=bfloat16", "engine.dtype=bfloat16"]
LAYOUTS = {"1": [], "tp2-ep2": ["parallel.tp=2", "parallel.ep=2"]}
START = 0.1  # bfloat16 has steps of 4.9e-4 here, so an update of LR alone rounds back to the same number
LR, NUM_UPDATES = 1e-5, 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("moe") / "model")


def ranks_of(layout):
    return 1 if layout == "1" else 2


# ---- master weights --------------------------------------------------------------------------------------------


def tiny_updates(folder, layout):
    """Updates by LR each, of a value model whose trained weights all begin at START; the head at 0."""
    optimizer = [f"value.lr={LR}", "value.clip_grad=0.0", "value.weight_decay=0.0"]
    config = load_config(None, [*BF16, *optimizer, *layout])
    world, hf = start_world(config), HFFolder(folder)
    chunks = build_model("value", hf.config, config.parallel, torch.bfloat16)
    load_weights(chunks, hf, read_shape(hf.config), world)
    multipliers = freeze(chunks, config.value.groups)
    trained = {n: p for chunk in chunks for n, p in chunk.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.fill_(0.0 if name == "output_layer.weight" else START)
    model = make_trained_model(chunks, config.value, multipliers)
    for _ in range(NUM_UPDATES):
        model.zero_grad()
        for parameter in trained.values():
            parameter.main_grad.fill_(1.0)  # with an unchanging gradient each of Adam's updates is LR
        assert model.update()[0]
    kinds = {(o, kind) for o in model.optimizers() for kind in ("exp_avg", "exp_avg_sq")}
    return dict(
        weights={name: parameter.detach() for name, parameter in trained.items()},
        gradients={buffer.grad_data.dtype for buffer in model.grad_buffers()},
        masters={m.dtype for o in model.optimizers() for group in o.param_groups for m in group["params"]},
        moments={o.state[m][kind].dtype for o, kind in kinds for group in o.param_groups for m in group["params"]},
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_too_small_for_bfloat16_add_up_in_the_masters(folder, layout):
    start = torch.tensor(START).bfloat16().float()
    moved = start - NUM_UPDATES * LR
    for found in run_ranks(ranks_of(layout), tiny_updates, folder, LAYOUTS[layout]):
        assert found["gradients"] == found["masters"] == found["moments"] == {torch.float32}
        head = found["weights"].pop("output_layer.weight")
        assert head.dtype == torch.float32
        torch.testing.assert_close(head, torch.full_like(head, -NUM_UPDATES * LR), atol=1e-8, rtol=1e-4)
        assert len(found["weights"]) >= 2 * 3, "router and experts of two layers"
        for name, weight in found["weights"].items():
            assert weight.dtype == torch.bfloat16, name
            assert torch.equal(weight, torch.full_like(weight, float(moved.bfloat16()))), name
    assert moved.bfloat16() != start.bfloat16()


def test_without_masters_the_same_updates_would_be_lost():
    weight = torch.nn.Parameter(torch.full((4,), START, dtype=torch.bfloat16))
    adam = GroupStepAdam([weight], lr=LR)
    for _ in range(NUM_UPDATES):
        weight.grad = torch.ones_like(weight)
        adam.step()
    assert torch.equal(weight.detach(), torch.full((4,), START, dtype=torch.bfloat16))


def reduced_gradient(folder):
    """Data-parallel ranks give 1 and 2**-10: their sum needs more digits than bfloat16 has."""
    config = load_config(None, [*BF16, "parallel.dp=2"])
    world, hf = start_world(config), HFFolder(folder)
    chunks = build_model("policy", hf.config, config.parallel, torch.bfloat16)
    model = make_trained_model(chunks, config.policy)
    model.zero_grad()
    for parameter in chunks[0].parameters():
        parameter.main_grad.fill_((1.0, 2.0**-10)[world.rank])
    model.wrapped[0].finish_grad_sync()
    found = set()
    for buffer in model.grad_buffers():
        for bucket in buffer.buckets:  # the distributed optimizer leaves each rank its part of the sum
            found |= set(bucket.grad_data.chunk(world.dp_size)[world.dp].tolist())
    return found


def test_gradients_are_reduced_in_float32(folder):
    for found in run_ranks(2, reduced_gradient, folder):
        assert found - {0.0} == {1.0 + 2.0**-10}, "0 is padding"


# ---- what is computed in float32 -------------------------------------------------------------------------------


def computed(folder, layout):
    """dtypes that a SAO step goes through; and log-probs' agreement with themselves."""
    config = load_config(None, [*BF16, *layout])
    trainer = build_trainer(config, HFFolder(folder), start_world(config))
    (policy,), (value,) = trainer.models.policy.chunks, trainer.models.value.chunks
    dtypes = {}

    def note(name, number=0):
        def hook(module, inputs, outputs):
            dtypes.setdefault(name, set()).add((inputs[0].dtype, outputs[number].dtype))

        return hook

    for router in (module for module in policy.modules() if isinstance(module, Router)):
        router.register_forward_hook(note("router probabilities"))
        gating = router.gating

        def gate(hidden, gating=gating):
            logits = gating(hidden)
            dtypes.setdefault("router logits", set()).add((hidden.dtype, logits.dtype))
            return logits

        router.gating = gate
    policy.output_layer.register_forward_hook(note("policy head"))
    value.output_layer.register_forward_hook(note("value head"))
    share = trainer.share_of_batch(random_trajectories(6, seed=0), 0)
    metrics = sao_step(trainer.models, share, config).metrics
    finite = all(number == number for number in metrics.values())
    return dtypes, value.output_layer.weight.dtype, finite and metrics["policy/skipped_updates"] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_router_and_value_head_compute_in_float32(folder, layout):
    for dtypes, head, is_sound in run_ranks(ranks_of(layout), computed, folder, LAYOUTS[layout]):
        assert is_sound and head == torch.float32
        assert dtypes == {
            "router logits": {(torch.bfloat16, torch.float32)},
            "router probabilities": {(torch.bfloat16, torch.float32)},
            "policy head": {(torch.bfloat16, torch.bfloat16)},
            "value head": {(torch.bfloat16, torch.float32)},
        }


def expert_biases(folder, layout):
    config = load_config(None, [*BF16, *layout])
    world, hf = start_world(config), HFFolder(folder)
    chunks = build_model("policy", hf.config, config.parallel, torch.bfloat16)
    load_weights(chunks, hf, read_shape(hf.config), world)
    make_trained_model(chunks, config.policy)
    return [module.expert_bias for module in chunks[0].modules() if isinstance(module, Router)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_expert_bias_keeps_every_digit(tmp_path, layout):
    folder = make_family_folder("glm4_moe", tmp_path / "glm", mtp=False, seed=1)
    on_disk = [tensor for name, tensor in read_weights(folder).items() if name.endswith("e_score_correction_bias")]
    assert on_disk and not any(torch.equal(bias, bias.bfloat16().float()) for bias in on_disk)
    for found in run_ranks(ranks_of(layout), expert_biases, folder, LAYOUTS[layout]):
        assert len(found) == len(on_disk)
        for bias, expected in zip(found, on_disk, strict=True):
            assert bias.dtype == torch.float32 and torch.equal(bias, expected)
