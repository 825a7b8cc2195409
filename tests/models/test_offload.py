"""A sleeping model holds no memory of its device, and sleeping changes no bit of what is trained."""

import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.weights import model_tensors
from megatron_sao.parallel.init import start_world
from megatron_sao.train.export import export_policy
from megatron_sao.train.sao_step import sao_step
from megatron_sao.train.setup import build_trainer
from tests.support.folders import make_folder, read_weights
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories

LAYOUTS = {
    "1": (1, []),
    "bfloat16": (1, ["model.dtype=bfloat16", "engine.dtype=bfloat16"]),
    "dp2": (2, ["parallel.dp=2"]),
    "pp2": (2, ["parallel.pp=2"]),
    "tp2-ep2-bfloat16": (
        2,
        ["parallel.tp=2", "parallel.ep=2", "model.dtype=bfloat16", "engine.dtype=bfloat16"],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("moe") / "model")


def held_tensors(model):
    """Weights, gradients, masters and moments of a model, by name."""
    found = {f"weight {name}": tensor for name, tensor in model_tensors(model.chunks).items()}
    found = {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.nn.Parameter)}
    for b, buffer in enumerate(model.grad_buffers()):
        found[f"gradients {b}"] = buffer.grad_data
        found[f"weights {b}"] = buffer.param_data
    for o, optimizer in enumerate(model.optimizers()):
        for g, group in enumerate(optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                found[f"master {o} {g} {p}"] = parameter
                for name, value in optimizer.state[parameter].items():
                    found[f"{name} {o} {g} {p}"] = value
    return found


def num_bytes(model):
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in held_tensors(model).values()}
    return sum(storage.nbytes() for storage in storages.values())


def trained(folder, overrides, export):
    """Four steps, the last one of the value model alone; -> what is left of it, and the bytes on the way."""
    config = load_config(None, ["policy.lr=0.01", "value.lr=0.01", *overrides])
    trainer = build_trainer(config, HFFolder(folder), start_world(config))
    models, metrics = trainer.models, []
    sizes = [(num_bytes(models.policy), num_bytes(models.value))]
    for step, trains_policy in enumerate((True, True, True, False)):
        share = trainer.share_of_batch(random_trajectories(6, seed=step), 0)
        metrics.append(sao_step(models, share, config, trains_policy=trains_policy).metrics)
        sizes.append((num_bytes(models.policy), num_bytes(models.value)))
    num_frozen = trainer.check_frozen()
    export_policy(trainer, export)
    state = {}
    for name, model in (("policy", models.policy), ("value", models.value)):
        models.turns.take(model)
        state[name] = {k: t.detach().clone() for k, t in held_tensors(model).items() if "gradients" not in k}
    return dict(metrics=metrics, sizes=sizes, num_frozen=num_frozen, state=state)


def with_and_without(folder, overrides, exports):
    return [
        trained(folder, [*overrides, f"parallel.offload_sleeping_model={flag}"], export)
        for flag, export in zip(("false", "true"), exports, strict=True)
    ]


@pytest.fixture(scope="module", params=LAYOUTS)
def both(request, folder, tmp_path_factory):
    """By rank: (without, with offloading); and the two exports."""
    world_size, overrides = LAYOUTS[request.param]
    exports = [tmp_path_factory.mktemp("exports") / name for name in ("kept", "offloaded")]
    return run_ranks(world_size, with_and_without, folder, overrides, exports, timeout_s=120), exports


def test_sleeping_changes_no_bit(both):
    results, exports = both
    for kept, offloaded in results:
        assert kept["metrics"] == offloaded["metrics"] and len(kept["metrics"]) == 4
        assert kept["num_frozen"] == offloaded["num_frozen"] > 0
        for model in ("policy", "value"):
            assert kept["state"][model].keys() == offloaded["state"][model].keys()
            assert any(name.startswith("exp_avg_sq") for name in kept["state"][model])
            for name, tensor in kept["state"][model].items():
                assert torch.equal(tensor, offloaded["state"][model][name]), (model, name)
    kept, offloaded = (read_weights(export) for export in exports)
    assert kept.keys() == offloaded.keys()
    assert all(torch.equal(kept[name], offloaded[name]) for name in kept)


def test_only_one_model_holds_memory(both):
    results, _ = both
    for kept, offloaded in results:
        # Built with the value model awake; policy steps end with the policy awake, value steps with the value model.
        value_is_awake = [True, False, False, False, True]
        for (policy_kept, value_kept), (policy, value), is_value in zip(
            kept["sizes"], offloaded["sizes"], value_is_awake, strict=True
        ):
            assert policy_kept > 0 and value_kept > 0
            assert (policy, value) == ((0, value_kept) if is_value else (policy_kept, 0))
        weights, after_moments = kept["sizes"][0], kept["sizes"][1]
        assert all(b > a for a, b in zip(weights, after_moments, strict=True)), "Adam's moments are counted"
