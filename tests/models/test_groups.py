"""Parameter groups by module role: complete, independent of fused norms; frozen means untouched in every respect."""

import re

import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from megatron_sao.config import load_config
from megatron_sao.errors import ConfigError, TrainingError
from megatron_sao.models.groups import GROUPS, grouped_parameters, manifest
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.weights import model_tensors
from megatron_sao.parallel.init import start_world
from megatron_sao.train.setup import build_trainer
from megatron_sao.train.value_step import value_update
from megatron_sao.train.values import infer_values
from tests.support.families import FAMILIES_WITH_MTP, make_family_folder
from tests.support.folders import make_folder
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories

TRAJECTORIES = random_trajectories(4, seed=7, longest=24)
DEFAULT_FROZEN = {"attention", "norms", "embeddings"}


# ---- roles, on stand-in trees with the attribute names of both module kinds ------------------------------------


class Tree(torch.nn.Module):
    """A module with the given children and parameters."""

    def __init__(self, **members):
        torch.nn.Module.__init__(self)
        for name, member in members.items():
            setattr(self, name, member)


class Layer(Tree, BaseTransformerLayer):
    pass


class StandInRouter(Router):
    def __init__(self, **members):
        torch.nn.Module.__init__(self)
        for name, member in members.items():
            setattr(self, name, member)

    def routing(self, logits): ...

    def forward(self, hidden): ...


def weight():
    return torch.nn.Parameter(torch.zeros(1))


def linear(**more):
    return Tree(weight=weight(), **more)


def chunk_of(*layers):
    return Tree(
        embedding=Tree(word_embeddings=linear()),
        decoder=Tree(layers=torch.nn.ModuleList(layers), final_layernorm=linear()),
        output_layer=linear(),
    )


def attention_of(fused):
    more = {"layer_norm_weight": weight(), "layer_norm_bias": weight()} if fused else {}
    return Tree(linear_qkv=linear(**more), linear_proj=linear(), q_layernorm=linear(), k_layernorm=linear())


def moe_layer(fused):
    """`fused` = transformer-engine: the input norm is part of linear_qkv; experts are weight0, weight1 of a module."""
    grouped = Tree(**{fc: Tree(weight0=weight(), weight1=weight()) for fc in ("linear_fc1", "linear_fc2")})
    experts = [Tree(linear_fc1=linear(), linear_fc2=linear()) for _ in range(2)]
    sequential = Tree(local_experts=torch.nn.ModuleList(experts))
    return Layer(
        input_layernorm=torch.nn.Identity() if fused else linear(bias=weight()),
        self_attention=attention_of(fused),
        pre_mlp_layernorm=linear(),
        mlp=Tree(
            router=StandInRouter(weight=weight(), expert_bias=weight()),
            experts=grouped if fused else sequential,
            shared_experts=Tree(linear_fc1=linear(), linear_fc2=linear(), gate_weight=weight()),
        ),
    )


def dense_layer(fused):
    more = {"layer_norm_weight": weight(), "layer_norm_bias": weight()} if fused else {}
    return Layer(
        input_layernorm=torch.nn.Identity() if fused else linear(bias=weight()),
        self_attention=attention_of(fused),
        pre_mlp_layernorm=torch.nn.Identity() if fused else linear(bias=weight()),
        mlp=Tree(linear_fc1=linear(**more), linear_fc2=linear()),
    )


def by_name(chunk):
    found = grouped_parameters(chunk)
    assert [p.name for p in found] == [name for name, _ in chunk.named_parameters()], "every parameter, once"
    return {p.name: p.group for p in found}


def test_roles_of_a_layer_with_separate_norms():
    groups = by_name(chunk_of(moe_layer(fused=False)))
    assert {re.sub(r"^decoder.layers.0.", "", name): group for name, group in groups.items()} == {
        "embedding.word_embeddings.weight": "embeddings",
        "input_layernorm.weight": "attention",
        "input_layernorm.bias": "attention",
        "self_attention.linear_qkv.weight": "attention",
        "self_attention.linear_proj.weight": "attention",
        "self_attention.q_layernorm.weight": "attention",
        "self_attention.k_layernorm.weight": "attention",
        "pre_mlp_layernorm.weight": "norms",
        "mlp.router.weight": "router",
        "mlp.router.expert_bias": "router",
        "mlp.experts.local_experts.0.linear_fc1.weight": "experts",
        "mlp.experts.local_experts.0.linear_fc2.weight": "experts",
        "mlp.experts.local_experts.1.linear_fc1.weight": "experts",
        "mlp.experts.local_experts.1.linear_fc2.weight": "experts",
        "mlp.shared_experts.linear_fc1.weight": "shared_experts",
        "mlp.shared_experts.linear_fc2.weight": "shared_experts",
        "mlp.shared_experts.gate_weight": "shared_experts",
        "decoder.final_layernorm.weight": "norms",
        "output_layer.weight": "head",
    }


SAME_ROLE = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "input_layernorm.bias": "self_attention.linear_qkv.layer_norm_bias",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "pre_mlp_layernorm.bias": "mlp.linear_fc1.layer_norm_bias",
    "mlp.experts.local_experts.1.linear_fc1.weight": "mlp.experts.linear_fc1.weight1",
}


@pytest.mark.parametrize("make", [moe_layer, dense_layer], ids=["moe", "dense"])
def test_a_tensor_has_the_same_role_whether_or_not_its_norm_is_fused(make):  # VAL-04
    separate, fused = by_name(chunk_of(make(fused=False))), by_name(chunk_of(make(fused=True)))
    prefix = "decoder.layers.0."
    compared = 0
    for name, group in separate.items():
        twin = prefix + SAME_ROLE.get(name.removeprefix(prefix), name.removeprefix(prefix)) if prefix in name else name
        if twin in fused:
            assert fused[twin] == group, (name, twin)
            compared += 1
    assert compared >= 9 and prefix + SAME_ROLE["input_layernorm.weight"] in fused
    assert fused[prefix + SAME_ROLE["input_layernorm.weight"]] == "attention"
    if make is dense_layer:
        assert fused[prefix + "mlp.linear_fc1.layer_norm_weight"] == "norms"
        assert fused[prefix + "mlp.linear_fc1.weight"] == fused[prefix + "mlp.linear_fc2.weight"] == "dense_mlp"


class MTPLayer(Tree, MultiTokenPredictionLayer):
    pass


def test_latent_attention_and_its_indexer_are_attention():
    indexer = Tree(
        linear_wq_b=linear(), linear_wk=linear(), linear_weights_proj=linear(), k_norm=linear(bias=weight())
    )
    layer = moe_layer(fused=False)
    layer.self_attention = Tree(
        linear_q_down_proj=linear(),
        linear_q_up_proj=linear(layer_norm_weight=weight()),
        linear_kv_down_proj=linear(),
        linear_kv_up_proj=linear(),
        q_layernorm=linear(),
        kv_layernorm=linear(),
        linear_proj=linear(),
        core_attention=Tree(indexer=indexer),
    )
    groups = by_name(chunk_of(layer))
    inside = [name for name in groups if ".self_attention." in name]
    assert len(inside) == 13 and {groups[name] for name in inside} == {"attention"}


def test_roles_around_and_inside_an_mtp_layer():
    chunk = chunk_of(dense_layer(fused=False))
    around = dict(enorm=linear(), hnorm=linear(), eh_proj=linear(), final_layernorm=linear())
    layer = MTPLayer(mtp_model_layer=moe_layer(fused=False), **around)
    chunk.mtp = Tree(layers=torch.nn.ModuleList([layer]))
    groups = by_name(chunk)
    prefix = "mtp.layers.0."
    assert {name: groups[f"{prefix}{name}.weight"] for name in around} == {
        "enorm": "norms",
        "hnorm": "norms",
        "eh_proj": "dense_mlp",
        "final_layernorm": "norms",
    }
    inside = by_name(chunk_of(moe_layer(fused=False)))
    for name, group in inside.items():
        if "layers.0." in name:
            assert groups[name.replace("decoder.layers.0.", prefix + "mtp_model_layer.")] == group, name


def test_stages_without_embedding_or_head_have_their_roles_too():
    middle = Tree(decoder=Tree(layers=torch.nn.ModuleList([moe_layer(fused=True)])))
    assert set(by_name(middle).values()) == {"attention", "norms", "router", "experts", "shared_experts"}


def test_a_parameter_without_a_role_is_refused_by_name():
    chunk = chunk_of(dense_layer(fused=False))
    chunk.mtp = Tree(eh_proj=linear())
    with pytest.raises(ConfigError, match="mtp.eh_proj.weight has no role"):
        grouped_parameters(chunk)


# ---- a real value model ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("moe") / "model")


def trainer_of(folder, overrides):
    config = load_config(None, overrides)
    return build_trainer(config, HFFolder(folder), start_world(config))


def two_updates(folder, overrides):
    """Everything about K = 2 updates at rate 0.1 with weight decay 0.1 that freezing may not touch."""
    trainer = trainer_of(folder, ["value.lr=0.1", "value.weight_decay=0.1", "value.clip_grad=0.0", *overrides])
    learner = trainer.models.value
    (chunk,) = learner.chunks
    names = {id(p): name for name, p in chunk.named_parameters()}
    before = {name: t.detach().clone() for name, t in chunk.named_parameters()}
    share = trainer.share_of_batch(TRAJECTORIES, 0)
    metrics = []
    for _ in range(2):
        value = infer_values(learner.wrapped, share, trainer.models.readout)
        target = torch.ones_like(value)
        metrics.append(value_update(learner, share, target, value, trainer.models.readout))
    buffers = [b for c in learner.wrapped for b in c.buffers + c.expert_parallel_buffers]
    trained = [p for p in chunk.parameters() if p.requires_grad]
    return dict(
        groups={p.name: p.group for p in grouped_parameters(chunk)},
        has_moved={name: not torch.equal(before[name], t) for name, t in chunk.named_parameters()},
        requires_grad={name: p.requires_grad for name, p in chunk.named_parameters()},
        has_gradient=[name for name, p in chunk.named_parameters() if p.grad is not None or hasattr(p, "main_grad")],
        in_buckets=[names[id(p)] for buffer in buffers for p in buffer.params],
        in_optimizer=sum(p.numel() for group in learner.optimizer.param_groups for p in group["params"]),
        num_trained=sum(p.numel() for p in trained),
        grad_norm=metrics[-1]["value/grad_norm"],
        norm_of_trained=sum(float(p.main_grad.double().square().sum()) for p in trained) ** 0.5,
        num_checked=trainer.check_frozen(),
        manifest=trainer.manifest,
    )


@pytest.fixture(scope="module")
def updated(folder):
    (result,) = run_ranks(1, two_updates, folder, [])
    return result


def test_frozen_tensors_keep_their_bits_and_trained_ones_move(updated):  # VAL-04
    for name, group in updated["groups"].items():
        is_frozen = group in DEFAULT_FROZEN
        assert updated["requires_grad"][name] != is_frozen, name
        assert updated["has_moved"][name] != is_frozen, name
    assert set(updated["groups"].values()) == DEFAULT_FROZEN | {"router", "experts", "head"}
    assert updated["num_checked"] == sum(group in DEFAULT_FROZEN for group in updated["groups"].values())


def test_frozen_tensors_have_no_gradient_no_bucket_and_no_optimizer_state(updated):
    trained = {name for name, group in updated["groups"].items() if group not in DEFAULT_FROZEN}
    assert set(updated["has_gradient"]) == trained
    assert sorted(updated["in_buckets"]) == sorted(trained)
    assert updated["in_optimizer"] == updated["num_trained"]


def test_frozen_tensors_are_no_part_of_the_gradient_norm(updated):
    assert updated["grad_norm"] == pytest.approx(updated["norm_of_trained"], rel=1e-5)
    assert updated["grad_norm"] > 0


def test_the_manifest_says_what_each_group_holds(updated):
    lines = updated["manifest"].splitlines()
    assert lines[0].split() == ["group", "state", "lr", "x", "tensors", "parameters", "example"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:7]}
    # 2 layers of hidden 32, 4 query and 2 KV heads of 16, 4 experts of 24; a vocabulary of 128
    assert rows["attention"][:4] == ["frozen", "-", "10", "12,416"]
    assert rows["norms"][:4] == ["frozen", "-", "3", "96"]
    assert rows["embeddings"][:4] == ["frozen", "-", "1", "4,096"]
    assert rows["router"][:4] == ["trained", "1", "2", "256"]
    assert rows["experts"][:4] == ["trained", "1", "16", "18,432"]
    assert rows["head"][:4] == ["trained", "1", "1", "32"]
    assert rows["router"][4] == "decoder.layers.0.mlp.router.weight"
    assert [line.split()[0] for line in lines[1:7]] == [g for g in GROUPS if g in rows]
    assert "the head starts at zero" in lines[7] and len(lines) == 8


def test_every_group_can_be_trained_and_every_one_but_the_head_frozen(folder):
    def trained(*groups, yes):
        return [f"value.groups.{group}.trained={str(yes).lower()}" for group in groups]

    (everything,) = run_ranks(1, two_updates, folder, trained("attention", "norms", "embeddings", yes=True))
    assert all(everything["has_moved"].values()) and everything["num_checked"] == 0
    (head_only,) = run_ranks(1, two_updates, folder, trained("router", "experts", yes=False))
    assert [name for name, moved in head_only["has_moved"].items() if moved] == ["output_layer.weight"]


@pytest.mark.parametrize("family", FAMILIES_WITH_MTP)
def test_frozen_attention_of_every_family_keeps_its_bits(family, tmp_path):  # VAL-04
    """The first layer dense; what attention computes with, and nothing else, stands under these two names."""
    source = make_family_folder(family, tmp_path / family, mtp=True, seed=1)
    (frozen,) = run_ranks(1, two_updates, source, [])
    for name, group in frozen["groups"].items():
        is_attention = ".self_attention." in name or ".input_layernorm." in name
        assert (group == "attention") == is_attention, name
        assert frozen["has_moved"][name] == (group not in DEFAULT_FROZEN), name
    others = {"dense_mlp", "shared_experts", "router", "experts", "head"}
    assert set(frozen["groups"].values()) == DEFAULT_FROZEN | others
    assert not any(name.startswith("mtp.") for name in frozen["groups"]), "a value model has no MTP layer"

    (trained,) = run_ranks(1, two_updates, source, ["value.groups.attention.trained=true"])
    attention = [name for name, group in trained["groups"].items() if group == "attention"]
    fixed = {name for name in attention if not trained["has_moved"][name]}
    assert fixed == {name for name in trained["groups"] if ".indexer." in name}, "an indexer is built frozen"
    assert len(fixed) == (20 if family == "glm_moe_dsa" else 0)


def test_a_stage_on_which_everything_is_frozen_takes_part(folder):
    """pp 2 with the head alone trained: the first stage has no gradient at all."""
    frozen = ["value.groups.router.trained=false", "value.groups.experts.trained=false"]
    first, last = run_ranks(2, two_updates, folder, ["parallel.pp=2", *frozen])
    assert first["in_buckets"] == [] and not any(first["has_moved"].values())
    assert [name for name, moved in last["has_moved"].items() if moved] == ["output_layer.weight"]


# ---- a group that matches nothing ------------------------------------------------------------------------------


def refusal(folder, overrides):
    try:
        return trainer_of(folder, overrides).manifest
    except ConfigError as error:
        return error.args[0]


@pytest.mark.parametrize(
    "override, named",
    [
        ("value.groups.shared_experts.lr_multiplier=2.0", "value.groups.shared_experts"),
        ("value.groups.shared_experts.trained=false", "value.groups.shared_experts"),
        ("value.groups.dense_mlp.trained=false", "value.groups.dense_mlp"),
    ],
)
def test_a_setting_for_a_group_that_holds_nothing_is_refused(folder, override, named):  # VAL-04
    (text,) = run_ranks(1, refusal, folder, [override])
    assert text.startswith(f"{named} matches no parameter of this model")
    assert text.endswith("groups it has: attention, embeddings, experts, head, norms, router")


def test_a_group_on_another_stage_is_no_fault(folder):
    """Under pp 2 the first stage has no head and the last no embedding."""
    overrides = ["parallel.pp=2", "value.groups.embeddings.trained=true", "value.groups.head.lr_multiplier=2.0"]
    first, last = run_ranks(2, refusal, folder, overrides)
    assert "embeddings" in first and "head  " not in first
    assert "embeddings" not in last and "head  " in last
    assert "starts at zero" in first and "starts at zero" in last


# ---- the check that a run ends with ----------------------------------------------------------------------------


def disturbed(folder):
    trainer = trainer_of(folder, [])
    assert trainer.check_frozen() > 0
    tensors = model_tensors(trainer.models.value.chunks)
    name = "0:decoder.layers.1.self_attention.linear_proj.weight"
    with torch.no_grad():
        kept = tensors[name].view(-1)[5].clone()
        tensors[name].view(-1)[5] = torch.nextafter(kept, kept + 1)
    try:
        trainer.check_frozen()
    except TrainingError as error:
        return str(error)
    return "not noticed"


def test_one_changed_bit_of_a_frozen_tensor_is_noticed_and_named(folder):
    (text,) = run_ranks(1, disturbed, folder)
    assert "0:decoder.layers.1.self_attention.linear_proj.weight is frozen" in text


def test_a_manifest_needs_no_ranks():
    groups = load_config(None, ["value.groups.head.lr_multiplier=2.5"]).value.groups
    rows = manifest([chunk_of(dense_layer(fused=True))], groups).splitlines()
    assert [row.split()[0] for row in rows[1:]] == ["attention", "norms", "embeddings", "dense_mlp", "head"]
    assert rows[-1].split()[1:3] == ["trained", "2.5"]
