"""HF folder -> distributed checkpoint -> HF folder: bit-equal through any layout, or refused with the reason."""

import json
import os
import re
import shutil
import signal

import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.convert.family import read_shape
from megatron_sao.errors import CheckpointError
from megatron_sao.models import conversion
from megatron_sao.models.build import build_model
from megatron_sao.models.checkpoint import StoredWeights, load_saved_weights, weight_shards
from megatron_sao.models.conversion import hf_to_megatron, megatron_to_hf
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.value_head import ValueHead
from megatron_sao.models.weights import Exporter, load_weights, model_tensors
from megatron_sao.parallel.init import start_world
from tests.support.checkpoints import save_shards, save_weights
from tests.support.families import FAMILIES, FAMILIES_WITH_MTP, YARN, make_family_folder
from tests.support.folders import read_weights, write_weights
from tests.support.ranks import RankFailure, run_ranks

VOCAB = 129  # padded to 130 under tp 2
FIRST, SECOND = dict(tp=2, pp=2, ep=2), dict(dp=4, ep=4)
DENSE_FIRST, DENSE_SECOND = dict(tp=2, pp=2), dict(pp=4)
DENSE = ("qwen3", "tied")


def in_bfloat16(folder):
    """The folder's weights in bfloat16, but for the router's bias: what released folders look like."""
    weights = read_weights(folder)
    write_weights(folder, {n: t if n.endswith("score_correction_bias") else t.bfloat16() for n, t in weights.items()})
    return folder


def numbered(folder):
    """Every tensor filled with running numbers of its own, so that a permutation of anything shows (CKP-09)."""
    weights, start = {}, 0
    for name, tensor in read_weights(folder).items():
        weights[name] = (torch.arange(start, start + tensor.numel()) % 65521).view(tensor.shape).to(torch.float32)
        start += tensor.numel()
    write_weights(folder, weights)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """name -> HF folder: every family with what released folders hold, a tied one, and one of running numbers."""
    root, made = tmp_path_factory.mktemp("sources"), {}
    for family in FAMILIES:
        fields = dict(vocab_size=VOCAB) | (dict(rope_parameters=YARN) if family == "deepseek_v3" else {})
        has_mtp = family in FAMILIES_WITH_MTP
        folder = make_family_folder(family, root / family, mtp=has_mtp, mtp_copies=has_mtp, seed=3, **fields)
        made[family] = in_bfloat16(folder)
    made["tied"] = make_family_folder(
        "qwen3", root / "tied", mtp=False, seed=2, vocab_size=VOCAB, tie_word_embeddings=True
    )
    made["numbered"] = numbered(make_family_folder("qwen3_moe", root / "numbered", mtp=False, seed=4, vocab_size=VOCAB))
    return made


@pytest.fixture(scope="module")
def checkpoints(sources, tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for name, folder in sources.items():
        hf_to_megatron(folder, root / name, max_file_bytes=200_000)
    return {name: root / name for name in sources}


def model_of(folder, config, role="policy"):
    hf = HFFolder(folder)
    shape = read_shape(hf.config)
    dtype = hf.dtype("model.norm.weight")
    with_mtp = role == "policy" and folder.name in FAMILIES_WITH_MTP
    return build_model(role, hf.config, config.parallel, dtype, with_mtp=with_mtp), hf, shape


def resaved(cases):
    """Load each checkpoint in its layout and save it from there; -> per case what is not as if loaded from HF."""
    found = []
    for folder, layout, checkpoint, destination in cases:
        config = load_config(None, [f"parallel.{key}={value}" for key, value in layout.items()])
        world = start_world(config)
        chunks, hf, shape = model_of(folder, config)
        assert load_saved_weights(chunks, shape, checkpoint) == []
        expected, _, _ = model_of(folder, config)
        load_weights(expected, hf, shape, world)
        same = {k: torch.equal(t, model_tensors(chunks)[k]) for k, t in without_padding(expected, shape, world).items()}
        found.append([key for key, is_equal in same.items() if not is_equal])
        if world.is_first:
            destination.mkdir()
        Exporter(chunks, shape, world)  # meets all ranks: the folder is there
        save_weights(chunks, shape, destination)
    return found


def without_padding(chunks, shape, world):
    """The tensors but the last rank's vocabulary, of which rows beyond the true one hold anything."""
    vocabulary = ("embedding.word_embeddings.weight", "output_layer.weight")
    is_padded = shape.vocab % world.tp_size and world.tp == world.tp_size - 1
    return {k: t for k, t in model_tensors(chunks).items() if not (is_padded and k.endswith(vocabulary))}


def assert_equal_folders(source, written):
    before, after = HFFolder(source), HFFolder(written)
    assert set(before.names()) == set(after.names())
    for name in before.names():
        assert before.dtype(name) == after.dtype(name), name
        bits = [folder.read_whole(name).flatten().view(torch.uint8) for folder in (before, after)]
        assert torch.equal(*bits), name


def test_every_family_survives_two_layouts_bit_by_bit(sources, checkpoints, tmp_path):  # CKP-09, CKP-06, CKP-03
    cases = []
    for name, folder in sources.items():
        first, second = (DENSE_FIRST, DENSE_SECOND) if name in DENSE else (FIRST, SECOND)
        cases.append((folder, first, checkpoints[name], tmp_path / f"0-{name}"))
        cases.append((folder, second, tmp_path / f"0-{name}", tmp_path / f"1-{name}"))
    for differ in run_ranks(4, resaved, cases, timeout_s=240):
        assert differ == [[]] * len(cases)
    for name, folder in sources.items():
        megatron_to_hf(tmp_path / f"1-{name}", tmp_path / f"hf-{name}", hf_source=folder)
        assert_equal_folders(folder, tmp_path / f"hf-{name}")
        config = json.loads((tmp_path / f"hf-{name}" / "config.json").read_text())
        assert config == json.loads((folder / "config.json").read_text()), "rope, YaRN, the count of MTP layers"


def test_a_conversion_and_its_way_back_give_the_folder_again(sources, checkpoints, tmp_path):
    for name, folder in sources.items():
        megatron_to_hf(checkpoints[name], tmp_path / name, max_file_bytes=300_000)
        assert_equal_folders(folder, tmp_path / name)
        assert (tmp_path / name / "model.safetensors.index.json").exists()
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config == json.loads((folder / "config.json").read_text())


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def test_a_tied_output_layer_that_is_there_too_comes_back_or_is_refused(sources, tmp_path):
    folder = tmp_path / "tied"
    shutil.copytree(sources["tied"], folder)
    weights = read_weights(folder)
    write_weights(folder, weights | {HEAD: weights[EMBEDDING].clone()})
    assert hf_to_megatron(folder, tmp_path / "checkpoint").carried == [HEAD]
    megatron_to_hf(tmp_path / "checkpoint", tmp_path / "back")
    assert_equal_folders(folder, tmp_path / "back")
    shutil.rmtree(tmp_path / "checkpoint" / "hf")
    megatron_to_hf(tmp_path / "checkpoint", tmp_path / "again", hf_source=folder)
    assert_equal_folders(folder, tmp_path / "again")

    write_weights(folder, weights | {HEAD: weights[EMBEDDING] + 1})
    with pytest.raises(CheckpointError, match="another lm_head.weight than .* tie_word_embeddings = true"):
        hf_to_megatron(folder, tmp_path / "out")
    with pytest.raises(CheckpointError, match="another lm_head.weight than .* tie_word_embeddings = true"):
        megatron_to_hf(tmp_path / "checkpoint", tmp_path / "out", hf_source=folder)
    assert hf_to_megatron(folder, tmp_path / "value", "value").dropped == [HEAD]


@pytest.mark.parametrize("change", ["sign of zero", "number format"])
def test_what_differs_from_the_embedding_in_bits_alone_is_no_copy(sources, tmp_path, change):
    folder, copy = tmp_path / "source", "model.layers.4.embed_tokens.weight"
    shutil.copytree(sources["glm4_moe"], folder)
    weights = read_weights(folder)
    if change == "sign of zero":
        weights[EMBEDDING][0, 0] = weights[copy][0, 0] = 0.0
        weights[copy][0, 0] *= -1
    else:
        weights[copy] = weights[copy].float()
    write_weights(folder, weights)
    hf_to_megatron(folder, tmp_path / "checkpoint")
    megatron_to_hf(tmp_path / "checkpoint", tmp_path / "back")
    assert_equal_folders(folder, tmp_path / "back")


# ---- value models ----------------------------------------------------------------------------------------------


def value_model_of(folder, checkpoint):
    config = load_config(None, [])
    start_world(config)
    (chunk,), _, shape = model_of(folder, config, "value")
    kept = load_saved_weights([chunk], shape, checkpoint)
    assert isinstance(chunk.output_layer, ValueHead)
    assert not weight_shards(chunk, shape)["output_layer.weight"].allow_shape_mismatch, "its rows are no vocabulary"
    return kept, chunk.output_layer.weight.detach().clone(), chunk.embedding.word_embeddings.weight.detach().clone()


def test_a_value_head_is_created_or_kept(sources, checkpoints, tmp_path):
    folder = sources["glm4_moe"]
    weights = read_weights(folder)
    done = hf_to_megatron(folder, tmp_path / "fresh", "value")
    in_mtp = {name for name in weights if name.startswith("model.layers.4.")}
    assert done.has_fresh_head and set(done.dropped) == in_mtp | {"lm_head.weight"} and done.carried == []
    assert StoredWeights(tmp_path / "fresh").shapes["output_layer.weight"] == (1, 64)
    megatron_to_hf(tmp_path / "fresh", tmp_path / "fresh-hf")
    found = read_weights(tmp_path / "fresh-hf")
    body = weights.keys() - in_mtp - {"lm_head.weight"}
    assert found.keys() == body | {"value_head.weight"}
    assert all(torch.equal(found[name], weights[name]) for name in body)
    assert found["value_head.weight"].dtype == torch.float32 and not found["value_head.weight"].any()
    config = json.loads((tmp_path / "fresh-hf" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0, "no MTP layer is counted that is not there"

    head = torch.arange(64.0)[None]
    trained = tmp_path / "glm4_moe"
    trained.mkdir()
    (trained / "config.json").write_text(json.dumps(config))
    write_weights(trained, found | {"value_head.weight": head})
    assert not hf_to_megatron(trained, tmp_path / "kept", "value").has_fresh_head
    megatron_to_hf(tmp_path / "kept", tmp_path / "kept-hf")
    assert_equal_folders(trained, tmp_path / "kept-hf")
    assert hf_to_megatron(trained, tmp_path / "bins", "value", num_value_outputs=5).has_fresh_head
    assert StoredWeights(tmp_path / "bins").shapes["output_layer.weight"] == (5, 64)

    for checkpoint, expected in ((tmp_path / "kept", head), (checkpoints["glm4_moe"], torch.zeros(1, 64))):
        ((kept, loaded, embedding),) = run_ranks(1, value_model_of, trained, checkpoint)
        assert torch.equal(loaded, expected), "a policy's checkpoint gives a value model with a fresh head"
        assert kept == ([] if expected.any() else ["output_layer.weight"])
        assert torch.equal(embedding, weights["model.embed_tokens.weight"])


# ---- what is refused, and what a killed conversion leaves ------------------------------------------------------


@pytest.fixture
def variant(sources, tmp_path):
    """variant(drop=NAME, add={...}, **config) -> a changed copy of the tiny GLM."""

    def make(drop=None, add=None, **config):
        folder = tmp_path / f"variant{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        fields = json.loads((sources["glm4_moe"] / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | config))
        weights = read_weights(sources["glm4_moe"]) | (add or {})
        weights.pop(drop, None)
        write_weights(folder, weights)
        return folder

    return make


def test_a_folder_that_does_not_fit_is_refused_by_the_names_of_its_tensors(variant, tmp_path):
    name, bias = "model.layers.2.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.gate.e_score_correction_bias"
    cases = {
        f"lacks the tensor {name} of shape": variant(drop=name),
        f"lacks the tensor {bias} of shape": variant(drop=bias),
        r"holds model.norm.weight with shape \[65\], expected \[64\]": variant(
            add={"model.norm.weight": torch.ones(65)}
        ),
        "no model of ours has: model.layers.0.self_attn.sinks": variant(
            add={"model.layers.0.self_attn.sinks": torch.ones(4)}
        ),
        "one tensor in Megatron and need one number format": variant(add={name: torch.ones(32, 64)}),
    }
    for number, (message, folder) in enumerate(cases.items()):
        with pytest.raises(CheckpointError, match=message):
            hf_to_megatron(folder, tmp_path / f"out{number}")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")], "nothing is left"


def test_files_that_are_missing_or_cut_are_named_before_anything_is_built(variant, checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "build_model", None)
    folder = variant()
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read \(truncated\?\)"):
        hf_to_megatron(folder, tmp_path / "out")

    copy = tmp_path / "copy"
    copy.mkdir()
    for file in checkpoints["glm4_moe"].iterdir():
        if file.is_file():
            os.link(file, copy / file.name)
    cut = copy / "__0_1.distcp"
    size = cut.stat().st_size
    cut.unlink()
    with pytest.raises(CheckpointError, match="lacks __0_1.distcp"):
        megatron_to_hf(copy, tmp_path / "out")
    cut.write_bytes(b"\0" * (size - 100))
    with pytest.raises(CheckpointError, match="__0_1.distcp is truncated"):
        megatron_to_hf(copy, tmp_path / "out")
    (copy / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="is no distributed checkpoint"):
        megatron_to_hf(copy, tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists already"):
        hf_to_megatron(variant(), copy)


def test_a_checkpoint_of_another_model_is_refused(sources, checkpoints, tmp_path):
    with pytest.raises(CheckpointError, match="lacks the tensor decoder.layers.0.mlp.linear_fc1.weight_w of shape"):
        megatron_to_hf(checkpoints["qwen3_moe"], tmp_path / "out", hf_source=sources["qwen3"])
    assert not (tmp_path / "out").exists()


def test_a_source_may_be_called_as_the_checkpoints_own_part_is(sources, checkpoints, tmp_path):
    other = make_family_folder("qwen3", tmp_path / "hf", mtp=False, seed=9, vocab_size=VOCAB)
    megatron_to_hf(checkpoints["qwen3"], tmp_path / "out", hf_source=other)
    assert_equal_folders(sources["qwen3"], tmp_path / "out")


def test_a_carried_tensor_that_the_checkpoint_holds_too_is_refused(sources, tmp_path):
    hf_to_megatron(sources["qwen3"], tmp_path / "checkpoint")
    write_weights(tmp_path / "checkpoint" / "hf", {"model.norm.weight": torch.ones(64)})
    with pytest.raises(CheckpointError, match="/hf holds tensors that .*checkpoint holds itself: model.norm.weight"):
        megatron_to_hf(tmp_path / "checkpoint", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def vocabulary_faults(folder, checkpoint, sizes):
    """What loading says where config.json gives such a size; "" where it loads."""
    config, faults = load_config(None, []), []
    start_world(config)
    for size in sizes:
        hf = HFFolder(folder).config | {"vocab_size": size}
        (chunk,) = build_model("policy", hf, config.parallel, torch.float32)
        try:
            load_saved_weights([chunk], read_shape(hf), checkpoint)
            faults.append("")
        except CheckpointError as fault:
            faults.append(str(fault))
    return faults


def test_another_vocabulary_is_neither_cut_nor_filled_with_zeros(sources, checkpoints, tmp_path):
    run_ranks(1, saved_stacked, [(sources["tied"], tmp_path / "unsaid")])  # an older checkpoint does not say its own
    for checkpoint, expected in (
        (checkpoints["tied"], ["", "vocab_size = 129, .* says 150", "vocab_size = 129, .* says 100"]),
        (tmp_path / "unsaid", ["", "word_embeddings.weight with 129 rows, config.json says vocab_size = 150", ""]),
    ):
        (faults,) = run_ranks(1, vocabulary_faults, sources["tied"], checkpoint, [VOCAB, 150, 100])
        assert [bool(fault) for fault in faults] == [bool(said) for said in expected]
        assert all(re.search(said, fault) for said, fault in zip(expected, faults, strict=True)), faults
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(HFFolder(sources["tied"]).config | {"vocab_size": 150}))
    for checkpoint in (checkpoints["tied"], tmp_path / "unsaid"):
        with pytest.raises(CheckpointError, match="config.json .*says .*150"):
            megatron_to_hf(checkpoint, tmp_path / "out", hf_source=other)


def test_an_interrupted_way_back_does_not_leave_its_checkpoint_in_memory(sources, tmp_path):
    def interrupted(done, total):
        raise KeyboardInterrupt

    hf_to_megatron(sources["qwen3"], tmp_path / "checkpoint", max_file_bytes=100_000)
    with pytest.raises(KeyboardInterrupt):
        megatron_to_hf(tmp_path / "checkpoint", tmp_path / "out", report=interrupted)
    shutil.rmtree(tmp_path / "checkpoint")
    hf_to_megatron(sources["qwen3"], tmp_path / "checkpoint")
    megatron_to_hf(tmp_path / "checkpoint", tmp_path / "out")
    assert_equal_folders(sources["qwen3"], tmp_path / "out")


def killed(folder, checkpoint, destination, at):
    """Dies when so many bytes of the conversion are done."""

    def report(done, total):
        if done >= at * total:
            os.kill(os.getpid(), signal.SIGKILL)

    if checkpoint is None:
        hf_to_megatron(folder, destination, report=report)
    megatron_to_hf(checkpoint, destination, report=report)


@pytest.mark.parametrize("at", [0.5, 1.0])
def test_a_killed_conversion_leaves_nothing_that_looks_finished(sources, checkpoints, tmp_path, at):
    for checkpoint in (None, checkpoints["qwen3"]):
        with pytest.raises(RankFailure, match="rank 0 ended with status -9"):
            run_ranks(1, killed, sources["qwen3"], checkpoint, tmp_path / "out", at)
    assert not (tmp_path / "out").exists()
    left = list(tmp_path.iterdir())
    assert len(left) == 2 and all(path.name.startswith("out.partial-") for path in left)


# ---- checkpoints of Megatron's own form ------------------------------------------------------------------------


def saved_stacked(cases):
    """Save models as Megatron-LM does: the experts of a layer, and equal layers, stacked in one stored tensor."""
    for folder, destination in cases:
        config = load_config(None, [])
        world = start_world(config)
        (chunk,), hf, shape = model_of(folder, config)
        load_weights([chunk], hf, shape, world)
        destination.mkdir()
        save_shards(weight_shards(chunk, shape, {}), destination, content={"singleton_local_shards": False})


def test_a_checkpoint_with_stacked_layers_and_experts_is_read(sources, tmp_path):
    cases = [(sources[name], tmp_path / name) for name in ("tied", "numbered", "deepseek_v3")]
    run_ranks(1, saved_stacked, cases)
    assert StoredWeights(tmp_path / "tied").shapes["decoder.layers.self_attention.linear_proj.weight"] == (4, 64, 128)
    experts = "decoder.layers.2.mlp.experts.experts.linear_fc1.weight"
    assert StoredWeights(tmp_path / "numbered").shapes[experts] == (8, 64, 64)
    for folder, checkpoint in cases:
        megatron_to_hf(checkpoint, tmp_path / f"{checkpoint.name}-hf", hf_source=folder)
        assert_equal_folders(folder, tmp_path / f"{checkpoint.name}-hf")
