"""The planned push of a run equals the one that its real ranks agree on."""

import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.convert.expected import expected_tensors
from megatron_sao.convert.family import read_shape
from megatron_sao.models.build import build_model
from megatron_sao.models.weights import Exporter
from megatron_sao.parallel.init import start_world
from megatron_sao.train.push import push_plan
from megatron_sao.train.push_plan import plan_push
from tests.support.ranks import run_ranks

MOE = dict(
    model_type="qwen3_moe",
    vocab_size=131,  # odd, so that rows are padded under tp2
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    rope_theta=10000.0,
    hidden_act="silu",
    tie_word_embeddings=False,
)


def planned(hf_config, overrides):
    plan = plan_push(load_config(None, overrides), hf_config, lambda done, total: None)
    return plan.hash, plan.num_trainer_ranks, len(plan.buckets)


def real(hf_config, overrides):
    config = load_config(None, overrides)
    world = start_world(config)
    policy = build_model("policy", hf_config, config.parallel, getattr(torch, config.model.dtype))
    exporter = Exporter(policy, read_shape(hf_config), world)
    plan = push_plan(exporter.slices_by_rank, exporter.shape, config, expected_tensors(hf_config))
    return plan.hash, plan.num_trainer_ranks, len(plan.buckets)


@pytest.mark.parametrize(
    ("hf_config", "world_size", "overrides"),
    [
        (MOE, 4, ["parallel.tp=2", "parallel.ep=2", "parallel.dp=2", "engine.tensor_parallel=2"]),
        (MOE, 2, ["parallel.pp=2", "engine.tensor_parallel=4"]),  # more workers than KV heads
        (MOE | dict(model_type="qwen3", tie_word_embeddings=True), 2, ["parallel.tp=2", "model.dtype=bfloat16"]),
    ],
    ids=["tp2-ep2-dp2", "pp2", "tied"],
)
def test_planned_push_equals_that_of_real_ranks(hf_config, world_size, overrides):
    overrides = [*overrides, "push.bucket_bytes=20000", "warm_start.enabled=false", "model.path=a folder"]
    if "model.dtype=bfloat16" in overrides:
        overrides.append("engine.dtype=bfloat16")
    (expected,) = run_ranks(1, planned, hf_config, overrides)
    assert expected[2] > 1
    assert run_ranks(world_size, real, hf_config, overrides) == [expected] * world_size


def test_the_folder_of_a_push_through_files_means_the_same_everywhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    own = ["warm_start.enabled=false", "model.path=a folder", "run.name=mine"]

    def folder(*overrides):
        return push_plan([[]], read_shape(MOE), load_config(None, [*own, *overrides]), {}).folder

    assert folder() == ""
    assert folder("push.transport=disk") == str(tmp_path / "runs" / "mine" / "push")
    assert folder("push.transport=disk", "push.folder=shared") == str(tmp_path / "shared")
