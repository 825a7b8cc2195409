"""Loading both models from HF folders: exactly the value head may be missing; tied and padded vocabularies."""

import json

import pytest
import torch
import torch.nn.functional as F

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.convert.family import read_shape
from megatron_sao.data.batch import pack
from megatron_sao.data.share import share_of
from megatron_sao.errors import CheckpointError
from megatron_sao.models.build import build_model
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.weights import Exporter, check_names, load_weights, model_tensors
from megatron_sao.parallel.init import start_world
from megatron_sao.parallel.schedule import run_schedule
from megatron_sao.train.logprobs import learner_logprob
from megatron_sao.train.sao_step import sao_step
from megatron_sao.train.setup import build_trainer
from megatron_sao.train.shares import scatter_to_share
from tests.support.families import FAMILIES_WITH_MTP, make_family_folder
from tests.support.folders import make_folder, read_weights, write_weights
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories

VOCAB = 129  # odd: padded to 130 under tp 2
TRAJECTORIES = random_trajectories(5, seed=4, vocab=VOCAB, longest=24)
ROUTER, EMBEDDING = "model.layers.0.mlp.gate.weight", "model.embed_tokens.weight"
LAYOUTS = {"1": {}, "tp2": dict(tp=2), "pp2": dict(pp=2)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name -> folder; `dense` and `tied` are Qwen3, `moe` is Qwen3-MoE."""
    root = tmp_path_factory.mktemp("folders")
    return {
        "moe": make_folder(root / "moe", vocab=VOCAB, seed=1),
        "dense": make_folder(root / "dense", family="qwen3", vocab=VOCAB, seed=2),
        "tied": make_folder(root / "tied", family="qwen3", tied=True, vocab=VOCAB, seed=3),
    }


@pytest.fixture
def variant(folders, tmp_path):
    """variant(name, add={...}, drop=NAME, **config) -> a changed copy of a folder."""

    def make(name, add=None, drop=None, **config):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        original = json.loads((folders[name] / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(original | config))
        weights = read_weights(folders[name]) | (add or {})
        weights.pop(drop, None)
        write_weights(folder, weights)
        return folder

    return make


def loads(cases, layout):
    """For (role, folder[, outputs of the value head]): what was loaded, or the text of the refusal."""
    config = load_config(None, [f"parallel.{key}={value}" for key, value in layout.items()])
    world = start_world(config)
    results = []
    for role, folder, *num_outputs in cases:
        try:
            hf = HFFolder(folder)
            shape = read_shape(hf.config)
            chunks = build_model(role, hf.config, config.parallel, torch.float32, *num_outputs)
            kept = load_weights(chunks, hf, shape, world)
            exporter = Exporter(chunks, shape, world)
            if role == "policy":
                check_names(exporter.slices_by_rank, hf, shape)
        except CheckpointError as refusal:
            results.append(str(refusal))
        else:
            pieces = [(p, exporter.view(p).clone()) for p in exporter.slices_by_rank[world.rank]]
            results.append((kept, pieces, {k: t.detach().clone() for k, t in model_tensors(chunks).items()}))
    return results


def load(*cases):
    """`loads` in one process."""
    (results,) = run_ranks(1, loads, cases, {})
    return results


def names_equal_to_folder(results, folder):
    """HF names of the slices of all ranks, which must tile the folder's tensors once and have their bits."""
    weights = read_weights(folder)
    count = {}
    for _, pieces, _ in results:
        for piece, tensor in pieces:
            whole = weights[piece.hf_name]
            assert piece.full_shape == tuple(whole.shape)
            assert torch.equal(tensor, whole.narrow(piece.dim, piece.start, piece.length)), piece
            seen = count.setdefault(piece.hf_name, torch.zeros(whole.shape))
            seen.narrow(piece.dim, piece.start, piece.length).add_(1)
    assert all(bool((c == 1).all()) for c in count.values())
    return set(count)


# ---- the value head --------------------------------------------------------------------------------------------


def test_a_policy_folder_gives_a_value_model_with_a_zero_head_and_says_so(folders):  # VAL-01
    for name, result in zip(folders, load(*[("value", folder) for folder in folders.values()]), strict=True):
        kept, _, tensors = result
        assert kept == ["output_layer.weight"]
        assert tensors["0:output_layer.weight"].tolist() == [[0.0] * 32]
        names = names_equal_to_folder([result], folders[name])
        assert names == set(read_weights(folders[name])) - {"lm_head.weight"}


def test_a_value_head_in_the_folder_is_loaded_if_it_fits(variant):  # VAL-01
    head = torch.arange(32.0)[None]
    folder = variant("moe", add={"value_head.weight": head})
    fits, other_shape, policy = load(("value", folder), ("value", folder, 5), ("policy", folder))
    assert fits[0] == [] and torch.equal(fits[2]["0:output_layer.weight"], head)
    assert other_shape[0] == ["output_layer.weight"]
    assert torch.equal(other_shape[2]["0:output_layer.weight"], torch.zeros(5, 32))
    assert policy[0] == [] and "value_head.weight" not in names_equal_to_folder([policy], folder)


def test_a_value_model_does_not_need_the_output_layer_but_a_policy_does(variant):
    folder = variant("moe", drop="lm_head.weight")
    value, policy = load(("value", folder), ("policy", folder))
    assert value[0] == ["output_layer.weight"]
    assert "lacks the tensor lm_head.weight of shape [129, 32]" in policy


# ---- everything else must be there -----------------------------------------------------------------------------


def test_any_other_missing_tensor_is_fatal_and_named(variant):  # VAL-01
    names = [
        ROUTER,
        EMBEDDING,
        "model.norm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.0.mlp.experts.3.up_proj.weight",
    ]
    cases = [(role, variant("moe", drop=name)) for name in names for role in ("policy", "value")]
    for case, refusal in zip(cases, load(*cases), strict=True):
        name = names[cases.index(case) // 2]
        assert isinstance(refusal, str), f"{case[0]} loaded without {name}"
        assert f"lacks the tensor {name}" in refusal


def test_a_tensor_of_another_shape_is_fatal_and_named(variant):
    folder = variant("moe", add={ROUTER: torch.zeros(6, 32)})
    for refusal in load(("policy", folder), ("value", folder)):
        assert f"{ROUTER} has shape [6, 32], expected [4, 32]" in refusal


def test_tensors_that_the_model_does_not_have_are_refused(variant):
    stray = variant("moe", add={"model.layers.0.self_attn.sinks": torch.zeros(4)})
    fewer_experts = variant("moe", num_experts=3, num_local_experts=3)
    more_layers = variant("moe", num_hidden_layers=1)
    refusals = load(("policy", stray), ("policy", fewer_experts), ("policy", more_layers))
    assert "not exported ['model.layers.0.self_attn.sinks']" in refusals[0]
    assert f"{ROUTER} has shape [4, 32], expected [3, 32]" in refusals[1]
    assert "not exported ['model.layers.1." in refusals[2]


# ---- tied heads and padded vocabularies ------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_policy_exports_what_it_loaded(folders, layout):
    cases = [("policy", folder) for folder in folders.values()]
    by_rank = run_ranks(1 if layout == "1" else 2, loads, cases, LAYOUTS[layout])
    for name, results in zip(folders, zip(*by_rank, strict=True), strict=True):
        names = names_equal_to_folder(results, folders[name])
        assert names == set(read_weights(folders[name])), "each name, the embedding too, exactly once"
        assert ("lm_head.weight" in names) == (name != "tied")
        if name == "tied" and layout == "pp2":
            embedding = read_weights(folders["tied"])[EMBEDDING]
            assert torch.equal(results[0][2]["0:embedding.word_embeddings.weight"], embedding)
            assert torch.equal(results[1][2]["0:output_layer.weight"], embedding)


def test_heads_beside_an_embedding(variant):
    """An equal head beside a tied embedding is exported once; an untied one is a tensor of its own."""
    rows = torch.arange(VOCAB * 32.0).view(VOCAB, 32)
    tied = variant("tied", add={EMBEDDING: rows, "lm_head.weight": rows.clone()})
    untied = variant("dense", add={EMBEDDING: rows, "lm_head.weight": -rows})
    results = load(("policy", tied), ("policy", untied))
    assert EMBEDDING in names_equal_to_folder(results[:1], tied)
    assert "lm_head.weight" not in names_equal_to_folder(results[:1], tied)
    (refusal,) = load(("policy", variant("tied", add={EMBEDDING: rows, "lm_head.weight": -rows})))
    assert "holds another lm_head.weight than" in refusal and "tie_word_embeddings = true" in refusal
    assert {EMBEDDING, "lm_head.weight"} <= names_equal_to_folder(results[1:], untied)


def after_a_step(folder, layout):
    """(HF slices, the head where it is a tensor of its own) after a step that moves each weight by its gradient."""
    layout = [f"parallel.{key}={value}" for key, value in layout.items()]
    config = load_config(None, ["policy.lr=1.0", "policy.adam_eps=1.0", "policy.clip_grad=0.0", *layout])
    world = start_world(config)
    trainer = build_trainer(config, HFFolder(folder), world)
    assert sao_step(trainer.models, trainer.share_of_batch(TRAJECTORIES, 0), config).has_updated_policy
    pieces = {p.hf_name: trainer.exporter.view(p).clone() for p in trainer.exporter.slices_by_rank[world.rank]}
    head = model_tensors(trainer.models.policy.chunks).get("0:output_layer.weight")
    return pieces, None if head is None else head.detach().clone()


def test_training_keeps_the_copies_of_a_tied_head_equal(folders):
    """A stale copy on the last stage would score tokens with other weights than the engine."""
    ((expected, _),) = run_ranks(1, after_a_step, folders["tied"], {})
    (first, _), (last, head) = run_ranks(2, after_a_step, folders["tied"], dict(pp=2))
    embedding = (first | last)[EMBEDDING]
    before = read_weights(folders["tied"])[EMBEDDING]
    assert torch.equal(head, embedding)
    torch.testing.assert_close(embedding - before, expected[EMBEDDING] - before, atol=1e-6, rtol=1e-3)
    assert float((embedding - before).abs().max()) > 1e-3


# ---- families with router bias, latent attention, indexers, MTP layers ------------------------------------------

SHARED = {"indexer_types": ["full", "full", "full", "shared"]}  # a stage starts on layer 2: it must have its own
FAMILY_LAYOUTS = LAYOUTS | {"tp2-ep2": dict(tp=2, ep=2), "tp2-etp2": dict(tp=2, etp=2)}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Folders as they are released: MTP layers with copies, and an indexer in a layer that shares another one's."""
    root, made = tmp_path_factory.mktemp("released"), {}
    for family in FAMILIES_WITH_MTP:
        fields = SHARED if family == "glm_moe_dsa" else {}
        made[family] = make_family_folder(family, root / family, mtp=True, mtp_copies=True, seed=3, **fields)
    weights = read_weights(made["glm_moe_dsa"])
    prefix, shares = "model.layers.2.self_attn.indexer.", "model.layers.3.self_attn.indexer."
    unused = {name.replace(prefix, shares): 2 * t for name, t in weights.items() if name.startswith(prefix)}
    assert len(unused) == 5
    write_weights(made["glm_moe_dsa"], weights | unused)
    return made


@pytest.mark.parametrize("layout", FAMILY_LAYOUTS)
def test_a_policy_of_every_family_exports_the_trunk_it_loaded(released, layout):
    cases = [("policy", folder) for folder in released.values()]
    by_rank = run_ranks(1 if layout == "1" else 2, loads, cases, FAMILY_LAYOUTS[layout])
    for family, results in zip(released, zip(*by_rank, strict=True), strict=True):
        names = names_equal_to_folder(results, released[family])
        rest = set(read_weights(released[family])) - names
        mtp = {name for name in rest if name.startswith("model.layers.4.")}
        assert "model.layers.4.eh_proj.weight" in mtp and "model.layers.4.shared_head.head.weight" in mtp
        unused = {f"model.layers.3.self_attn.indexer.{part}" for part in ("k_norm.weight", "k_norm.bias")}
        unused |= {f"model.layers.3.self_attn.indexer.{part}.weight" for part in ("wq_b", "wk", "weights_proj")}
        assert rest - mtp == (unused if family == "glm_moe_dsa" else set())


def types_of_a_bfloat16_model(folders):
    config = load_config(None, ["model.dtype=bfloat16", "engine.dtype=bfloat16"])
    world = start_world(config)
    found = []
    for folder in folders:
        hf = HFFolder(folder)
        chunks = build_model("policy", hf.config, config.parallel, torch.bfloat16)
        load_weights(chunks, hf, read_shape(hf.config), world)
        exporter = Exporter(chunks, read_shape(hf.config), world)
        pieces = exporter.slices_by_rank[0]
        found.append(({p.hf_name: p.dtype for p in pieces}, {p.hf_name: exporter.view(p).clone() for p in pieces}))
    return found


def test_the_router_bias_keeps_float32_in_a_bfloat16_model(released):
    (found,) = run_ranks(1, types_of_a_bfloat16_model, list(released.values()))
    for folder, (types, tensors) in zip(released.values(), found, strict=True):
        source = read_weights(folder)
        biases = [name for name in types if name.endswith("e_score_correction_bias")]
        assert len(biases) == 3, "one for each layer with experts"
        for name in biases:
            assert types[name] == "float32" and torch.equal(tensors[name], source[name])
            assert not torch.equal(source[name].bfloat16().float(), source[name]), "or rounding could not show"
        name = "model.layers.1.mlp.shared_experts.up_proj.weight"
        assert types[name] == "bfloat16" and torch.equal(tensors[name], source[name].bfloat16())


def test_a_missing_router_bias_is_fatal_and_named(released, tmp_path):
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    for file in released["deepseek_v3"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = read_weights(tmp_path)
    del weights[name]
    write_weights(tmp_path, weights)
    for refusal in load(("policy", tmp_path), ("value", tmp_path)):
        assert f"lacks the tensor {name} of shape [16]" in refusal


# ---- the dense family against transformers ---------------------------------------------------------------------


def megatron_logp(folders, layout):
    config = load_config(None, [f"parallel.{key}={value}" for key, value in layout.items()])
    world = start_world(config)
    batch = pack(TRAJECTORIES, 0, lambda domain: (0.8, 3.0))
    share = share_of(batch, world.dp, world.dp_size, 1000, config.parallel.tp)
    results = []
    for folder in folders:
        hf = HFFolder(folder)
        shape = read_shape(hf.config)
        chunks = build_model("policy", hf.config, config.parallel, torch.float32)
        load_weights(chunks, hf, shape, world)

        def collect(logits, micro_batch):
            logp, _ = learner_logprob(logits, micro_batch, 1.0, shape.vocab)  # noqa: B023  called in this turn only
            return logits.new_zeros(()), {"logp": logp}

        found = scatter_to_share(run_schedule(chunks, share.micro_batches, collect, backward=False), "logp", share)
        result = torch.zeros(batch.num_tokens)
        result[batch.token_index(share.numbers)] = found
        results.append(result)
    return results


def transformers_logp(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parts = []
    for trajectory in TRAJECTORIES:
        ids = torch.tensor(trajectory.token_ids)
        with torch.no_grad():
            logp = F.log_softmax(model(ids[None]).logits[0], -1)
        parts += [torch.zeros(1), logp[:-1].gather(-1, ids[1:, None]).squeeze(-1)]
    return torch.cat(parts)


def test_every_family_scores_tokens_as_transformers_does(folders):
    """Vocabulary 129: under tp 2 a padded column exists and must get no probability."""
    expected = [transformers_logp(folder) for folder in folders.values()]
    for layout in LAYOUTS:
        for results in run_ranks(1 if layout == "1" else 2, megatron_logp, list(folders.values()), LAYOUTS[layout]):
            for name, found, wanted in zip(folders, results, expected, strict=True):
                torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0, msg=lambda m, n=name: f"{n} {layout}: {m}")
