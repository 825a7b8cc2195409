"""The Megatron policy against transformers' own model: same weights, same log-probs, at one rank and cut over two."""

import pytest
import torch
import torch.nn.functional as F

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.convert.family import read_shape
from megatron_sao.data.batch import pack
from megatron_sao.data.share import share_of
from megatron_sao.models.build import build_model
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.weights import Exporter, check_names, load_weights
from megatron_sao.parallel.init import start_world
from megatron_sao.parallel.schedule import run_schedule
from megatron_sao.train.logprobs import learner_logprob
from megatron_sao.train.shares import scatter_to_share
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories

TRAJECTORIES = random_trajectories(7, seed=1)


def config_of(**layout):
    return load_config(None, [f"parallel.{key}={value}" for key, value in layout.items()])


def megatron_logp(folder, layout):
    config = config_of(**layout)
    world = start_world(config)
    hf = HFFolder(folder)
    shape = read_shape(hf.config)
    chunks = build_model("policy", hf.config, config.parallel, torch.float32)
    load_weights(chunks, hf, shape, world)
    batch = pack(TRAJECTORIES, 0, lambda domain: (0.8, 3.0))
    share = share_of(batch, world.dp, world.dp_size, 64, config.parallel.tp, world.cp, world.cp_size)

    def collect(logits, micro_batch):
        logp, entropy = learner_logprob(logits, micro_batch, 0.7, shape.vocab)
        return logits.new_zeros(()), {"logp": logp, "entropy": entropy}

    reports = run_schedule(chunks, share.micro_batches, collect, backward=False)
    exporter = Exporter(chunks, shape, world)
    check_names(exporter.slices_by_rank, hf, shape)
    pieces = [(p, exporter.view(p).clone()) for p in exporter.slices_by_rank[world.rank]]
    logp, entropy = (scatter_to_share(reports, name, share) for name in ("logp", "entropy"))
    return share.batch.token_ids, logp, entropy, pieces


def reference(folder):
    """(token ids, log-prob, entropy) per trajectory from transformers, at temperature 0.7."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = {}
    for trajectory in TRAJECTORIES:
        ids = torch.tensor(trajectory.token_ids)
        with torch.no_grad():
            logp = F.log_softmax(model(ids[None]).logits[0] / 0.7, -1)
        chosen = logp[:-1].gather(-1, ids[1:, None]).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1)[:-1]
        zero = torch.zeros(1)
        found[tuple(ids.tolist())] = torch.cat([zero, chosen]), torch.cat([zero, entropy])
    return found


@pytest.mark.parametrize(
    "world_size, layout",
    [(1, {}), (2, dict(tp=2, ep=2)), (2, dict(tp=2)), (2, dict(dp=2, ep=2)), (2, dict(pp=2)), (2, dict(cp=2))],
    ids=["1", "tp2-ep2", "tp2", "ep2", "pp2", "cp2"],
)
def test_log_probs_equal_transformers(tiny_folder, world_size, layout):
    expected = reference(tiny_folder)
    results = run_ranks(world_size, megatron_logp, tiny_folder, layout, timeout_s=90)
    seen = set()
    for token_ids, logp, entropy, _ in results:
        ids = token_ids.tolist()
        at = 0
        while at < len(ids):
            key = next(k for k in expected if list(k) == ids[at : at + len(k)])
            torch.testing.assert_close(logp[at : at + len(key)], expected[key][0], atol=2e-5, rtol=0)
            torch.testing.assert_close(entropy[at : at + len(key)], expected[key][1], atol=2e-5, rtol=0)
            seen.add(key)
            at += len(key)
    assert seen == set(expected)


@pytest.mark.parametrize(
    "layout", [dict(tp=2, ep=2), dict(pp=2), dict(dp=2, ep=2), dict(cp=2)], ids=["tp2-ep2", "pp2", "ep2", "cp2"]
)
def test_exported_slices_tile_the_folder_bit_for_bit(tiny_folder, layout):
    results = run_ranks(2, megatron_logp, tiny_folder, layout, timeout_s=90)
    folder = HFFolder(tiny_folder)
    count = {name: torch.zeros(folder.shape(name), dtype=torch.int32) for name in folder.names()}
    for _, _, _, pieces in results:
        for piece, tensor in pieces:
            count[piece.hf_name].narrow(piece.dim, piece.start, piece.length).add_(1)
            original = folder.read(piece.hf_name, piece.full_shape, piece.dim, piece.start, piece.length)
            assert torch.equal(tensor, original), piece
    assert all(bool((c == 1).all()) for c in count.values())
