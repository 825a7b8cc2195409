"""Recompute: the same gradients from activations that are computed twice instead of kept, in policy and value model."""

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.convert.family import read_shape
from megatron_sao.data.batch import pack
from megatron_sao.data.share import share_of
from megatron_sao.models.build import build_model
from megatron_sao.models.groups import freeze
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.optimizer import make_trained_model
from megatron_sao.models.weights import load_weights, model_tensors
from megatron_sao.parallel.init import start_world
from megatron_sao.parallel.schedule import run_schedule
from tests.support.families import make_family_folder
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories

NUM_LAYERS = 4
FAMILIES = ("qwen3_moe", "deepseek_v3", "glm_moe_dsa")  # grouped, latent and sparse attention


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {name: make_family_folder(name, root / name, mtp=False, seed=1) for name in FAMILIES}


def backward(folder, recompute, role, keeps_hook=True):
    """One forward and backward -> calls of layers and of core attentions, bytes kept for backward, gradients."""
    config = load_config(None, [f"parallel.recompute={recompute}"])
    world = start_world(config)
    hf = HFFolder(folder)
    shape = read_shape(hf.config)
    (chunk,) = build_model(role, hf.config, config.parallel, torch.float32)
    load_weights([chunk], hf, shape, world)
    multipliers = None
    if role == "value":
        torch.nn.init.normal_(chunk.output_layer.weight, generator=torch.Generator().manual_seed(0))
        multipliers = freeze([chunk], config.value.groups)
    if not keeps_hook:
        chunk.embedding._forward_hooks.clear()
    model = make_trained_model([chunk], config.value, multipliers)

    calls = {"layer": 0, "attention": 0}

    def count(what):
        def hook(*_):
            calls[what] += 1

        return hook

    for module in chunk.modules():
        if isinstance(module, TransformerLayer):
            module.register_forward_hook(count("layer"))
            module.self_attention.core_attention.register_forward_hook(count("attention"))
    kept: dict[int, int] = {}

    def keep(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch = pack(random_trajectories(4, seed=3), 0, lambda domain: (0.8, 3.0))
    share = share_of(batch, 0, 1, budget_tokens=10_000, multiple=1)

    def loss_function(outputs, micro_batch):
        bytes_kept.append(sum(kept.values()))  # the backward pass keeps things of its own
        return outputs.float().tanh().mean(), {}

    bytes_kept: list[int] = []
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run_schedule(model.wrapped, share.micro_batches, loss_function, backward=True)
    found = model_tensors([chunk])
    gradients = {key: p.main_grad.clone() for key, p in found.items() if hasattr(p, "main_grad")}
    return calls["layer"], calls["attention"], bytes_kept[0], gradients


def three_ways(folder, role):
    return {way: backward(folder, way, role) for way in ("none", "selective", "full")}


@pytest.mark.parametrize("role", ["policy", "value"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_equal_and_activations_are_not_kept(folders, family, role):
    (ways,) = run_ranks(1, three_ways, folders[family], role)
    layers = {way: result[0] for way, result in ways.items()}
    assert layers == {"none": NUM_LAYERS, "selective": NUM_LAYERS, "full": 2 * NUM_LAYERS}
    attentions = {way: result[1] for way, result in ways.items()}
    # Nothing below the first layer's attention learns in the value model: backward never comes to it.
    again = NUM_LAYERS if role == "policy" else NUM_LAYERS - 1
    assert attentions == {"none": NUM_LAYERS, "selective": NUM_LAYERS + again, "full": 2 * NUM_LAYERS}
    kept = {way: result[2] for way, result in ways.items()}
    assert kept["full"] < 0.5 * kept["none"] and kept["full"] < kept["selective"] < kept["none"], kept
    expected = ways["none"][3]
    assert all(bool(g.any()) for key, g in expected.items() if "router" in key or "mlp.linear_fc" in key)
    for way in ("selective", "full"):
        assert ways[way][3].keys() == expected.keys()
        for key, gradient in expected.items():
            assert torch.equal(ways[way][3][key], gradient), (way, key)


def test_without_our_hook_frozen_embeddings_would_leave_the_value_model_without_gradients(folders):
    """The negative control: should it fail one day, Megatron no longer needs the hook in models/build.py."""
    ((_, _, _, gradients),) = run_ranks(1, backward, folders["qwen3_moe"], "full", "value", False)
    assert {key for key, gradient in gradients.items() if bool(gradient.any())} == {"0:output_layer.weight"}
