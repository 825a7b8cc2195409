"""Two chunks of layers on every pipeline stage: who holds what, what freezes, what is loaded, trained and exported."""

import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.config.stages import stage_chunks
from megatron_sao.models.build import build_model
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.weights import describe
from megatron_sao.parallel.init import start_world
from megatron_sao.train.export import export_policy
from megatron_sao.train.sao_step import sao_step
from megatron_sao.train.setup import build_trainer
from tests.support.families import make_family_folder, read_config
from tests.support.folders import read_weights
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories

TRAJECTORIES = random_trajectories(5, seed=4, longest=24)
CHUNKS = ["parallel.pp=2", "parallel.vpp=2"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Four layers each; the tied model's output layer and embedding are one tensor on different stages."""
    root = tmp_path_factory.mktemp("folders")
    return {
        "glm4_moe": make_family_folder("glm4_moe", root / "glm4_moe", mtp=False, seed=1),
        "tied": make_family_folder("qwen3", root / "tied", mtp=False, seed=2, tie_word_embeddings=True),
    }


def trained(folder, destination, overrides):
    """Exports before and after two steps; -> what this rank's chunks hold."""
    settings = [
        "policy.lr=1.0",
        "policy.adam_eps=1.0",
        "value.lr=1.0",
        "value.adam_eps=1.0",
        "parallel.micro_batch_tokens=64",
        "sampling.max_trajectory_tokens=64",
        "sampling.temperature=40.0",  # large weights: only so hot is this model near the made-up log-probs
    ]
    config = load_config(None, [*settings, *overrides])
    trainer = build_trainer(config, HFFolder(folder), start_world(config))
    export_policy(trainer, destination / "before")
    for _ in range(2):
        assert sao_step(trainer.models, trainer.share_of_batch(TRAJECTORIES, 0), config).has_updated_policy
    trainer.check_frozen()
    export_policy(trainer, destination / "after")
    names = [[t.name for t in describe(trainer.models.policy.chunks) if t.key.startswith(f"{n}:")] for n in range(2)]
    return names, set(trainer.frozen_hashes), trainer.manifest


@pytest.fixture(scope="module", params=["glm4_moe", "tied"])
def runs(request, folders, tmp_path_factory):
    """(source weights, folder of one process, folder of two stages, what the two stages hold)"""
    folder, root = folders[request.param], tmp_path_factory.mktemp("exports")
    for name in ("alone", "chunks"):
        (root / name).mkdir()
    run_ranks(1, trained, folder, root / "alone", [])
    held = run_ranks(2, trained, folder, root / "chunks", CHUNKS)
    return read_weights(folder), root / "alone", root / "chunks", held


def test_an_export_before_training_has_the_bits_of_its_source(runs):
    source, _, chunks, _ = runs
    before = read_weights(chunks / "before")
    assert before.keys() == source.keys()
    assert [name for name in source if not torch.equal(source[name], before[name])] == []


def test_training_in_chunks_gives_the_weights_of_one_process(runs):
    source, alone, chunks, _ = runs
    expected, found = read_weights(alone / "after"), read_weights(chunks / "after")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    still = {name for name in source if torch.equal(source[name], found[name])}
    still -= {name for name in still if ".experts." in name or "e_score_correction_bias" in name}
    assert still == set(), "all but experts without a token and a buffer learn"


def test_layers_alternate_between_stages(runs):
    _, _, _, (first, last) = runs

    def layers(names):
        return sorted({int(name.split(".")[2]) for name in names if name.startswith("decoder.layers.")})

    assert [layers(names) for names in first[0]] == [[0], [2]]
    assert [layers(names) for names in last[0]] == [[1], [3]]
    edges = [{name for name in names if ".layers." not in name} for names in (*first[0], *last[0])]
    assert edges[0] == {"embedding.word_embeddings.weight"} and edges[1] == edges[2] == set()
    assert edges[3] == {"decoder.final_layernorm.weight", "output_layer.weight"}


def layers_held(hf_config, layouts):
    """Global numbers of this rank's layers by chunk, for one layout after another."""
    found = []
    for layout in layouts:
        config = load_config(None, [f"parallel.{key}={value}" for key, value in layout.items()] + IS_CHECKED_ELSEWHERE)
        start_world(config)
        chunks = build_model("policy", hf_config, config.parallel, torch.float32)
        found.append([[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in chunks])
    return found


IS_CHECKED_ELSEWHERE = ["warm_start.enabled=false", "model.path=none"]  # else the demonstration model has to fit


def test_megatron_cuts_the_layers_as_our_own_table_says(tmp_path):
    hf_config = read_config(make_family_folder("qwen3", tmp_path / "six", mtp=False, seed=1, num_hidden_layers=6))
    layouts = [
        dict(pp=2),
        dict(pp=2, first_stage_layers=4),
        dict(pp=2, first_stage_layers=1, last_stage_layers=5),
        dict(pp=2, vpp=3),
        dict(pp=2, vpp=2, first_stage_layers=4),
        dict(pp=2, vpp=2, last_stage_layers=4),
    ]
    for found in zip(layouts, *run_ranks(2, layers_held, hf_config, layouts), strict=True):
        layout, *stages = found
        expected = stage_chunks(6, load_config(None, IS_CHECKED_ELSEWHERE).parallel.model_copy(update=layout))
        assert stages == [[list(layers) for layers in chunks] for chunks in expected], layout


def test_what_freezes_is_watched_in_every_chunk(runs):
    _, _, _, held = runs
    for stage, (_, frozen, manifest) in enumerate(held):
        for chunk in range(2):
            assert f"{chunk}:decoder.layers.0.self_attention.linear_qkv.weight" in frozen
        assert ("0:embedding.word_embeddings.weight" in frozen) == (stage == 0)
        assert ("1:decoder.final_layernorm.weight" in frozen) == (stage == 1)
        row = next(line for line in manifest.splitlines() if line.startswith("attention"))
        num_tensors = int(row.split()[3])
        assert num_tensors == sum(".self_attention." in key or "input_layernorm" in key for key in frozen) > 2
