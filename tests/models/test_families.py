"""Each family's policy against transformers' own model: logits and gradients, at one process and cut over ranks.

With its MTP layer where the family has one: logits of both, and the gradients of main loss + weight * MTP loss, where
the MTP layer's loss reaches nothing but that layer.
"""

from dataclasses import dataclass
from math import prod

import pytest
import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.convert.family import read_shape
from megatron_sao.data.batch import pack
from megatron_sao.data.share import share_of
from megatron_sao.models import specs
from megatron_sao.models.build import build_model
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.weights import load_weights, model_tensors
from megatron_sao.parallel.init import start_world
from megatron_sao.parallel.schedule import run_schedule
from megatron_sao.train.logprobs import learner_logprob
from megatron_sao.train.mtp import mtp_loss
from tests.support.families import (
    FAMILIES_WITH_MTP,
    YARN,
    make_family_folder,
    reference,
    reference_gradients,
    reference_logits,
    reference_mtp,
)
from tests.support.pieces import Piece, hf_pieces, put_together
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories

TRAJECTORIES = random_trajectories(6, seed=2, longest=48)
MTP_WEIGHT = 0.3
TOLERANCE = 1e-5  # absolute for logits of about 3; of the largest gradient of the same tensor
LAYOUTS = {"1": {}, "tp2": dict(tp=2), "pp2": dict(pp=2), "ep2": dict(dp=2, ep=2), "tp2-ep2": dict(tp=2, ep=2)}
# What an MTP layer and latent attention can get wrong besides: the last chunk of the last stage, cut trajectories,
# layers computed twice, another way to the experts.
MORE_LAYOUTS = {
    "pp2-vpp2": dict(pp=2, vpp=2),
    "cp2": dict(cp=2),
    "full": dict(recompute="full"),
    "tp2-ep2-allgather": dict(tp=2, ep=2, expert_dispatcher="allgather"),
}
VARIANTS = {
    "qwen3": {},
    "qwen3_moe": {},
    "glm4_moe": {},
    "deepseek_v3": {},
    "deepseek_v3-yarn": dict(rope_parameters=YARN),
}


@dataclass
class Expected:
    """What transformers says about TRAJECTORIES."""

    logits: list[torch.Tensor]  # [T, V] per trajectory
    mtp_logits: list[torch.Tensor | None]  # [T - 1, V] per trajectory
    mtp_loss: float
    gradients: dict[str, torch.Tensor]  # by HF name


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    made = {}
    for number, (name, overrides) in enumerate(VARIANTS.items()):
        family = name.split("-")[0]
        made[name] = make_family_folder(family, root / name, mtp=family in FAMILIES_WITH_MTP, seed=number, **overrides)
    return made


_expected: dict[str, Expected] = {}


@pytest.fixture
def expected(folders):
    """name -> Expected, worked out once for each."""

    def of(name):
        if name not in _expected:
            _expected[name] = transformers_says(folders[name])
        return _expected[name]

    return of


def transformers_says(folder) -> Expected:
    model = reference(folder)
    mtp = reference_mtp(folder, model) if model.config.model_type in FAMILIES_WITH_MTP else None
    num_action = sum(int(t.action_mask.sum()) for t in TRAJECTORIES)
    loss, drafting_loss, all_logits, all_mtp_logits = torch.zeros(()), torch.zeros(()), [], []
    for trajectory in TRAJECTORIES:
        ids, mask = torch.tensor(trajectory.token_ids), torch.tensor(trajectory.action_mask)
        logits, mtp_logits = reference_logits(model, ids, mtp)
        loss = loss + F.cross_entropy(logits[:-1][mask[1:]], ids[1:][mask[1:]], reduction="sum") / num_action
        all_logits.append(logits.detach())
        all_mtp_logits.append(None if mtp is None else mtp_logits.detach())
        if mtp is not None:  # row j is about token j + 2, drafted after token j + 1
            drafted = mask[2:] & mask[1:-1]
            part = F.cross_entropy(mtp_logits[:-1][drafted], ids[2:][drafted], reduction="sum")
            drafting_loss = drafting_loss + part / num_action
    if mtp is not None:
        (MTP_WEIGHT * drafting_loss).backward(retain_graph=True)
        model.zero_grad()  # what the MTP loss would have taught the rest of the model
    loss.backward()
    return Expected(all_logits, all_mtp_logits, float(drafting_loss.detach()), reference_gradients(model, mtp))


@dataclass
class Found:
    """What one rank of Megatron says: of its own trajectories, its part of the vocabulary and of the parameters."""

    numbers: list[int]
    logits: torch.Tensor | None  # [S, V/tp]; only the last stage has any
    mtp_logits: torch.Tensor | None
    mtp_loss: float
    gradients: list[Piece]


def megatron_says(folder, layout) -> Found:
    config = load_config(None, [f"parallel.{key}={value}" for key, value in layout.items()])
    world = start_world(config)
    hf = HFFolder(folder)
    shape = read_shape(hf.config)
    has_mtp = shape.num_mtp_layers > 0
    chunks = build_model("policy", hf.config, config.parallel, torch.float32, with_mtp=has_mtp)
    load_weights(chunks, hf, shape, world)
    # Without a distributed optimizer every rank keeps whole gradients.
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    wrapped = [DistributedDataParallel(chunk.config, options, chunk) for chunk in chunks]
    share = share_of(
        pack(TRAJECTORIES, 0, lambda domain: (0.8, 3.0)),
        world.dp,
        world.dp_size,
        budget_tokens=64,
        multiple=config.parallel.tp,
        context_rank=world.cp,
        num_context_ranks=world.cp_size,
        micro_batch_multiple=config.parallel.pp,
    )
    assert len(share.micro_batches) > 1

    def loss_function(logits, micro_batch):
        kept = logits[: micro_batch.batch.num_tokens].detach().clone()  # fillers stand at the end
        logp, _ = learner_logprob(logits, micro_batch, 1.0, shape.vocab)
        mask = micro_batch.at_positions(micro_batch.batch.action_mask)
        return -logp[mask].sum() / share.num_step_action_tokens, {"logits": kept}

    def mtp_loss_function(logits, micro_batch):
        kept = logits[: micro_batch.batch.num_tokens].detach().clone()
        loss = mtp_loss(logits, micro_batch, share, 1.0, shape.vocab)
        return MTP_WEIGHT * loss, {"mtp_logits": kept, "mtp_loss": float(loss.detach())}

    for chunk in wrapped:
        chunk.zero_grad_buffer()
    mtp_function = mtp_loss_function if has_mtp else None
    reports = run_schedule(
        wrapped, share.micro_batches, loss_function, backward=True, mtp_loss_function=mtp_function
    )
    gradients = {k: p.main_grad for k, p in model_tensors(chunks).items() if hasattr(p, "main_grad")}
    return Found(
        share.numbers,
        torch.cat([report["logits"] for report in reports]) if reports else None,
        torch.cat([report["mtp_logits"] for report in reports]) if reports and has_mtp else None,
        sum(report.get("mtp_loss", 0.0) for report in reports),
        hf_pieces(chunks, shape, world, gradients),
    )


def check_logits(results: list[Found], layout, expected: Expected):
    """The logits of all ranks, the vocabulary cut over tp, against those of transformers."""
    tp = layout.get("tp", 1)
    with_logits = [found for found in results if found.logits is not None]
    seen, drafting_loss = [], 0.0
    for first in range(0, len(with_logits), tp):
        ranks = with_logits[first : first + tp]
        numbers = ranks[0].numbers
        lengths = [TRAJECTORIES[n].num_tokens for n in numbers]
        parts = torch.cat([found.logits for found in ranks], -1).split(lengths)
        for number, found in zip(numbers, parts, strict=True):
            torch.testing.assert_close(found, expected.logits[number], atol=TOLERANCE, rtol=0)
        if expected.mtp_logits[0] is not None:
            parts = torch.cat([found.mtp_logits for found in ranks], -1).split(lengths)
            for number, found in zip(numbers, parts, strict=True):
                torch.testing.assert_close(found[:-1], expected.mtp_logits[number], atol=TOLERANCE, rtol=0)
        drafting_loss += ranks[0].mtp_loss
        seen += numbers
    assert sorted(seen) == list(range(len(TRAJECTORIES)))
    assert drafting_loss == pytest.approx(expected.mtp_loss, rel=TOLERANCE)


def check_gradients(results: list[Found], expected: Expected):
    found = put_together([result.gradients for result in results])
    assert found.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        largest = float(gradient.abs().max())
        assert largest > 0 or ".experts." in name, f"{name} got no gradient"  # an expert may have had no token
        torch.testing.assert_close(
            found[name], gradient, atol=TOLERANCE * largest, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


CASES = [
    (name, layout)
    for name in VARIANTS
    for layout in LAYOUTS
    if not ("ep" in layout and name == "qwen3") and not (layout != "1" and "-" in name)
]


def all_ranks_say(folder, axes) -> list[Found]:
    return run_ranks(prod(axes.get(axis, 1) for axis in ("tp", "pp", "cp", "dp")), megatron_says, folder, axes)


@pytest.mark.parametrize("name, layout", CASES, ids=lambda value: value)
def test_logits_and_gradients_equal_transformers(folders, expected, name, layout):
    results = all_ranks_say(folders[name], LAYOUTS[layout])
    check_logits(results, LAYOUTS[layout], expected(name))
    check_gradients(results, expected(name))


@pytest.mark.parametrize("layout", MORE_LAYOUTS)
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_losses_and_gradients_equal_transformers_on_more_layouts(folders, expected, name, layout):
    results = all_ranks_say(folders[name], MORE_LAYOUTS[layout])
    losses = sum(found.mtp_loss for found in results) / MORE_LAYOUTS[layout].get("tp", 1)  # equal on the tensor axis
    assert losses == pytest.approx(expected(name).mtp_loss, rel=TOLERANCE)
    check_gradients(results, expected(name))


# ---- would it be seen? -----------------------------------------------------------------------------------------

WRONG_READINGS = {
    "rotary share": (
        "glm4_moe",
        dict(partial_rotary_factor=1.0, rope_parameters=dict(rope_theta=10000.0, partial_rotary_factor=1.0)),
    ),
    "scale of expert weights": ("glm4_moe", dict(routed_scaling_factor=1.0)),
    "router groups": ("deepseek_v3", dict(n_group=1, topk_group=1)),
    "yarn's softmax scale": ("deepseek_v3-yarn", dict(rope_parameters={**YARN, "mscale_all_dim": 0.0})),
    "yarn": ("deepseek_v3-yarn", dict(rope_parameters=dict(rope_theta=10000.0))),
    "normalised weights": ("qwen3_moe", dict(norm_topk_prob=False)),
}


def logits_of_readings(folders):
    """name -> largest difference of the logits of trajectory 0 to those of the right reading."""
    found = {}
    for name, (variant, wrong) in WRONG_READINGS.items():
        both = []
        for changes in ({}, wrong):
            config = load_config(None, [])
            world = start_world(config)
            hf = HFFolder(folders[variant])
            hf.config = hf.config | changes
            shape = read_shape(hf.config)
            chunks = build_model("policy", hf.config, config.parallel, torch.float32)
            load_weights(chunks, hf, shape, world)
            share = share_of(pack(TRAJECTORIES[:1], 0, lambda domain: (0.8, 3.0)), 0, 1, 64, 1)

            def keep(logits, micro_batch):
                return logits.new_zeros(()), {"logits": logits.clone()}

            (report,) = run_schedule(chunks, share.micro_batches, keep, backward=False)
            both.append(report["logits"])
        found[name] = float((both[0] - both[1]).abs().max())
    return found


def test_every_wrong_reading_of_a_config_would_show(folders):
    (found,) = run_ranks(1, logits_of_readings, folders, timeout_s=90)
    assert found.keys() == WRONG_READINGS.keys()
    assert min(found.values()) > 1000 * TOLERANCE, found


def megatron_says_with_cut_down_projections(folder, layout):
    specs.LatentAttention = MLASelfAttention  # in this rank alone
    return megatron_says(folder, layout)


def test_megatrons_own_cut_of_the_down_projections_loses_gradients(folders, expected):
    """Why ours are whole: with them cut over tp the logits are right and the gradient of the rotary key is not."""
    results = run_ranks(2, megatron_says_with_cut_down_projections, folders["deepseek_v3"], dict(tp=2))
    check_logits(results, dict(tp=2), expected("deepseek_v3"))
    name = "model.layers.3.self_attn.kv_a_proj_with_mqa.weight"  # below the last layer everything is wrong
    found, right = put_together([found.gradients for found in results])[name], expected("deepseek_v3").gradients[name]
    latent = 32
    torch.testing.assert_close(found[:latent], right[:latent], atol=TOLERANCE * float(right.abs().max()), rtol=0)
    assert float((found[latent:] - right[latent:]).abs().max()) > 0.1 * float(right[latent:].abs().max())
