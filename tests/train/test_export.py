"""An exported folder has the bits of its source before training, and appears whole or not at all."""

import json
import os
import signal

import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.hf_writer import HFWriter
from megatron_sao.models.weights import left_out_names, model_tensors, policy_shapes
from megatron_sao.parallel.init import start_world
from megatron_sao.train import export
from megatron_sao.train.export import export_policy
from megatron_sao.train.push import Pusher
from megatron_sao.train.sao_step import sao_step
from megatron_sao.train.setup import build_trainer
from megatron_sao.transport.hf_shapes import read_shapes
from megatron_sao.transport.plan import name_faults
from tests.support.families import YARN, make_family_folder
from tests.support.folders import make_folder, read_weights, with_fused_experts, write_weights
from tests.support.ranks import RankFailure, run_ranks
from tests.support.trajectories import random_trajectories

VOCAB = 129  # padded to 130 under tp 2
LAYOUTS = {"1": {}, "tp2": dict(tp=2), "tp2-ep2": dict(tp=2, ep=2), "pp2": dict(pp=2), "dp2-ep2": dict(dp=2, ep=2)}
CASES = [("moe", "1"), ("moe", "tp2-ep2"), ("moe", "pp2"), ("moe", "dp2-ep2"), ("tied", "tp2"), ("tied", "pp2")]
TRAJECTORIES = random_trajectories(5, seed=4, vocab=VOCAB, longest=24)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    return {
        "moe": make_folder(root / "moe", vocab=VOCAB, seed=1),
        "tied": make_folder(root / "tied", family="qwen3", tied=True, vocab=VOCAB, seed=2),
    }


def trainer_of(folder, layout):
    overrides = [f"parallel.{key}={value}" for key, value in layout.items()]
    gradient_descent = ["policy.lr=1.0", "policy.adam_eps=1.0"]  # Adam moves each weight by its gradient, nearly
    config = load_config(None, [*gradient_descent, *overrides])
    return build_trainer(config, HFFolder(folder), start_world(config))


def exports(folder, destination, layout):
    """Export before training and after a step."""
    trainer = trainer_of(folder, layout)
    export_policy(trainer, destination / "before")
    assert sao_step(trainer.models, trainer.share_of_batch(TRAJECTORIES, 0), trainer.config).has_updated_policy
    export_policy(trainer, destination / "after")
    return {p.hf_name for pieces in trainer.exporter.slices_by_rank for p in pieces}


@pytest.mark.parametrize("name, layout", CASES)
def test_an_export_before_training_has_the_bits_of_its_source(folders, tmp_path, name, layout):
    run_ranks(1 if layout == "1" else 2, exports, folders[name], tmp_path, LAYOUTS[layout])
    source, before, after = (read_weights(f) for f in (folders[name], tmp_path / "before", tmp_path / "after"))
    assert source.keys() == before.keys() == after.keys()
    for tensor in source:
        assert torch.equal(source[tensor], before[tensor]) and source[tensor].dtype == before[tensor].dtype, tensor
    assert [tensor for tensor in source if torch.equal(source[tensor], after[tensor])] == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["after", "before"]


def test_every_layout_exports_the_same_trained_policy(folders, tmp_path):
    for layout in ("1", "tp2-ep2"):
        (tmp_path / layout).mkdir()
        run_ranks(1 if layout == "1" else 2, exports, folders["moe"], tmp_path / layout, LAYOUTS[layout])
    alone, cut = (read_weights(tmp_path / layout / "after") for layout in ("1", "tp2-ep2"))
    for name, tensor in alone.items():
        torch.testing.assert_close(cut[name], tensor, atol=1e-5, rtol=1e-5)


def test_transformers_opens_an_export(folders, tmp_path):
    from transformers import AutoModelForCausalLM

    for name, folder in folders.items():
        (tmp_path / name).mkdir()
        run_ranks(1, exports, folder, tmp_path / name, {})
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name / "after", dtype=torch.float32)
        expected = read_weights(tmp_path / name / "after")["model.embed_tokens.weight"]
        assert torch.equal(model.get_input_embeddings().weight, expected)
        config = json.loads((tmp_path / name / "after" / "config.json").read_text())
        assert config == json.loads((folder / "config.json").read_text())


def test_side_files_are_copied_and_others_are_not(folders, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for file in folders["moe"].iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ x }}")
    (source / "optimizer.pt").write_text("not for the export")
    write_weights(source, read_weights(source) | {"value_head.weight": torch.ones(1, 32)})
    destination = tmp_path / "runs"
    destination.mkdir()
    names = run_ranks(1, exports, source, destination, {})[0]
    held = {p.name for p in (destination / "before").iterdir()}
    assert held >= {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert "optimizer.pt" not in held
    assert set(read_weights(destination / "before")) == names, "the value head is no part of the policy"


# ---- what the folder holds besides the policy (CKP-06) ---------------------------------------------------------

COPIES = {
    "model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.4.shared_head.head.weight": "lm_head.weight",
}


@pytest.mark.parametrize("family, layout", [("glm4_moe", "1"), ("deepseek_v3", "tp2-ep2"), ("glm_moe_dsa", "pp2")])
def test_mtp_layers_that_are_not_trained_are_passed_through(tmp_path, family, layout):
    fields = dict(vocab_size=VOCAB) | (dict(rope_parameters=YARN) if family == "deepseek_v3" else {})  # CKP-03
    folder = make_family_folder(family, tmp_path / "source", mtp=True, mtp_copies=True, seed=5, **fields)
    written = tmp_path / "exports"
    written.mkdir()
    names = set().union(*run_ranks(1 if layout == "1" else 2, exports, folder, written, LAYOUTS[layout]))
    source, before, after = (read_weights(f) for f in (folder, written / "before", written / "after"))
    assert source.keys() == before.keys() == after.keys()
    assert all(torch.equal(source[name], before[name]) for name in source)
    mtp = {name for name in source if name.startswith("model.layers.4.")}
    assert len(mtp) > 30 and names == source.keys() - mtp, "a push leaves them alone"
    unchanged = {name for name in source if torch.equal(source[name], after[name])}
    fixed = {name for name in names if "e_score_correction_bias" in name or ".indexer." in name}
    assert (mtp - COPIES.keys()) | fixed <= unchanged
    idle = unchanged - mtp - fixed  # experts that no token chose
    assert all(".mlp.experts." in name for name in idle) and len(idle) < sum(".mlp.experts." in n for n in names) / 2
    for copy, original in COPIES.items():
        assert torch.equal(after[copy], after[original]), "a copy follows what it is a copy of"
    config = json.loads((written / "after" / "config.json").read_text())
    assert config == json.loads((folder / "config.json").read_text()) and config["num_nextn_predict_layers"] == 1


def exports_with_mtp(folder, destination, layout):
    """As `exports`, the MTP layer trained; -> (names of the slices, this rank's embedding after the step or None)."""
    axes = [f"parallel.{key}={value}" for key, value in layout.items()]
    config = load_config(None, ["policy.lr=1.0", "policy.adam_eps=1.0", "policy.mtp_loss_weight=0.3", *axes])
    trainer = build_trainer(config, HFFolder(folder), start_world(config))
    export_policy(trainer, destination / "before")
    assert sao_step(trainer.models, trainer.share_of_batch(TRAJECTORIES, 0), config).has_updated_policy
    export_policy(trainer, destination / "after")
    embedding = model_tensors(trainer.models.policy.chunks).get("0:embedding.word_embeddings.weight")
    names = {p.hf_name for pieces in trainer.exporter.slices_by_rank for p in pieces}
    return names, None if embedding is None else embedding.detach().clone()


def test_an_mtp_layer_that_is_trained_is_exported_and_pushed(tmp_path):
    folder = make_family_folder("glm4_moe", tmp_path / "source", mtp=True, mtp_copies=True, seed=5, vocab_size=VOCAB)
    source, after = read_weights(folder), {}
    for layout in ("1", "pp2"):
        written = tmp_path / layout
        written.mkdir()
        ranks = run_ranks(1 if layout == "1" else 2, exports_with_mtp, folder, written, LAYOUTS[layout])
        assert ranks[0][0] == source.keys() - COPIES.keys()
        before, after[layout] = read_weights(written / "before"), read_weights(written / "after")
        assert source.keys() == before.keys() == after[layout].keys()
        assert all(torch.equal(source[name], before[name]) for name in source)
        for _, embedding in ranks:
            assert torch.equal(embedding, after[layout]["model.embed_tokens.weight"]), "of the MTP layer's stage, too"
    moved = {name for name in source if not torch.equal(source[name], after["1"][name])}
    around = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "self_attn.o_proj", "mlp.gate")
    assert {f"model.layers.4.{part}.weight" for part in around} | COPIES.keys() <= moved
    for name, tensor in after["1"].items():
        torch.testing.assert_close(after["pp2"][name], tensor, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def faults_of_a_push(folder):
    """What an engine that was loaded from the folder finds wrong with the trainer's plan."""
    trainer = trainer_of(folder, {})
    names, left_out = policy_shapes(trainer.folder, trainer.shape), left_out_names(trainer.folder, trainer.shape)
    plan = Pusher(trainer.exporter, names, trainer.config, link=None, host="", excluded=left_out)._plan
    held = read_shapes(folder)
    return name_faults(plan.expected, held, plan.excluded), name_faults(plan.expected, held)


@pytest.mark.parametrize("is_fused", [False, True])
def test_engines_expect_what_a_push_delivers(tmp_path, is_fused):
    folder = make_family_folder("glm4_moe", tmp_path / "source", mtp=True, mtp_copies=True, seed=5, vocab_size=VOCAB)
    if is_fused:
        write_weights(folder, with_fused_experts(read_weights(folder)))
    ((faults, without_exclusion),) = run_ranks(1, faults_of_a_push, folder)
    assert faults == []
    assert "model.layers.4.eh_proj.weight is in the model folder but no rank sends it" in without_exclusion


def test_what_is_no_copy_is_kept_and_no_layer_is_counted_that_is_not_there(tmp_path):
    folder = make_family_folder("glm4_moe", tmp_path / "source", mtp=True, mtp_copies=True, seed=5, vocab_size=VOCAB)
    weights = read_weights(folder)
    own = weights["model.layers.4.shared_head.head.weight"].clone() + 1
    write_weights(folder, weights | {"model.layers.4.shared_head.head.weight": own})
    (tmp_path / "exports").mkdir()
    run_ranks(1, exports, folder, tmp_path / "exports", {})
    after = read_weights(tmp_path / "exports" / "after")
    assert torch.equal(after["model.layers.4.shared_head.head.weight"], own)
    assert torch.equal(after["model.layers.4.embed_tokens.weight"], after["model.embed_tokens.weight"])

    write_weights(folder, {name: t for name, t in weights.items() if not name.startswith("model.layers.4.")})
    run_ranks(1, replaced, folder, tmp_path / "without")
    config = json.loads((folder / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    written = json.loads((tmp_path / "without" / "config.json").read_text())
    assert written == config | {"num_nextn_predict_layers": 0}


def in_bfloat16(folder, destination):
    layout = ["parallel.tp=2", "parallel.ep=2"]
    config = load_config(None, ["model.dtype=bfloat16", "engine.dtype=bfloat16", *layout])
    export_policy(build_trainer(config, HFFolder(folder), start_world(config)), destination)


def test_an_export_has_the_type_that_was_trained(folders, tmp_path):
    run_ranks(2, in_bfloat16, folders["moe"], tmp_path / "export")
    source, written = read_weights(folders["moe"]), read_weights(tmp_path / "export")
    assert all(torch.equal(written[name], source[name].bfloat16()) for name in source)


# ---- exports that do not end well ------------------------------------------------------------------------------


def killed(folder, destination, moment):
    """Rank 0 dies while it writes: in the middle of the weights, or just before the folder gets its name."""

    def half_written(self, name, tensor, write=HFWriter.write):
        write(self, name, tensor)
        if name.startswith("model.layers.1."):
            os.kill(os.getpid(), signal.SIGKILL)

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    trainer = trainer_of(folder, dict(tp=2, ep=2))
    if trainer.world.is_first:
        if moment == "weights":
            HFWriter.write = half_written
        else:
            export._check = die
    export_policy(trainer, destination)


@pytest.mark.parametrize("moment", ["weights", "name"])
@pytest.mark.parametrize("has_older", [False, True], ids=["first", "again"])
def test_a_killed_export_leaves_nothing_that_looks_finished(folders, tmp_path, moment, has_older):
    destination = tmp_path / "export"
    if has_older:
        destination.mkdir()
        (destination / "config.json").write_text("older")
    with pytest.raises(RankFailure, match="ended with status"):
        run_ranks(2, killed, folders["moe"], destination, moment)
    assert destination.exists() == has_older
    if has_older:
        assert (destination / "config.json").read_text() == "older", "the older export is replaced by a whole one only"
    leftovers = [p.name for p in tmp_path.iterdir() if p != destination]
    assert len(leftovers) == 1 and leftovers[0].startswith("export.partial-")


def replaced(folder, destination):
    export_policy(trainer_of(folder, {}), destination)


def test_a_whole_export_takes_the_place_of_an_older_one(folders, tmp_path):
    destination = tmp_path / "export"
    destination.mkdir()
    (destination / "stale.safetensors").write_text("older")
    run_ranks(1, replaced, folders["moe"], destination)
    assert not (destination / "stale.safetensors").exists() and (destination / "model.safetensors").exists()


def incomplete(folder, destination):
    def write_less(self, name, tensor, write=HFWriter.write):
        if name != "model.norm.weight":
            write(self, name, tensor)

    HFWriter.write = write_less
    export_policy(trainer_of(folder, {}), destination)


def test_an_export_that_lacks_a_tensor_is_refused_by_name(folders, tmp_path):
    with pytest.raises(RankFailure, match=r"CheckpointError: .* not written, .* \['model.norm.weight'\]"):
        run_ranks(1, incomplete, folders["moe"], tmp_path / "export")
    assert not (tmp_path / "export").exists()
