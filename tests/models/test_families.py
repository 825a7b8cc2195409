"""Each family's policy against transformers' own model: logits and gradients, at one process and cut over ranks."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.convert.family import read_shape
from megatron_sao.data.batch import pack
from megatron_sao.data.share import share_of
from megatron_sao.models.build import build_model
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.weights import load_weights, model_tensors
from megatron_sao.parallel.init import start_world
from megatron_sao.parallel.schedule import run_schedule
from megatron_sao.train.logprobs import learner_logprob
from tests.support.families import (
    YARN,
    make_family_folder,
    reference,
    reference_gradients,
    reference_logits,
)
from tests.support.pieces import hf_pieces, put_together
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories

TRAJECTORIES = random_trajectories(6, seed=2, longest=48)
TOLERANCE = 1e-5  # absolute for logits of about 3; of the largest gradient of the same tensor
LAYOUTS = {"1": {}, "tp2": dict(tp=2), "pp2": dict(pp=2), "ep2": dict(dp=2, ep=2), "tp2-ep2": dict(tp=2, ep=2)}
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
    gradients: dict[str, torch.Tensor]  # by HF name


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    made = {}
    for number, (name, overrides) in enumerate(VARIANTS.items()):
        family = name.split("-")[0]
        made[name] = make_family_folder(family, root / name, mtp=False, seed=number, **overrides)
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
    num_action = sum(int(t.action_mask.sum()) for t in TRAJECTORIES)
    loss, logits = torch.zeros(()), []
    for trajectory in TRAJECTORIES:
        ids, mask = torch.tensor(trajectory.token_ids), torch.tensor(trajectory.action_mask)
        main, _ = reference_logits(model, ids)
        loss = loss + F.cross_entropy(main[:-1][mask[1:]], ids[1:][mask[1:]], reduction="sum") / num_action
        logits.append(main.detach())
    loss.backward()
    return Expected(logits, reference_gradients(model))


def megatron_says(folder, layout):
    """-> (numbers of this rank's trajectories, their logits [S, V/tp] or None, pieces of the gradients)."""
    config = load_config(None, [f"parallel.{key}={value}" for key, value in layout.items()])
    world = start_world(config)
    hf = HFFolder(folder)
    shape = read_shape(hf.config)
    chunks = build_model("policy", hf.config, config.parallel, torch.float32)
    load_weights(chunks, hf, shape, world)
    # Without a distributed optimizer every rank keeps whole gradients.
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    wrapped = [DistributedDataParallel(chunk.config, options, chunk) for chunk in chunks]
    share = share_of(pack(TRAJECTORIES, 0, lambda domain: (0.8, 3.0)), world.dp, world.dp_size, 64, config.parallel.tp)
    assert len(share.micro_batches) > 1

    def loss_function(logits, micro_batch):
        kept = logits[: micro_batch.batch.num_tokens].detach().clone()  # fillers stand at the end
        logp, _ = learner_logprob(logits, micro_batch, 1.0, shape.vocab)
        mask = micro_batch.at_positions(micro_batch.batch.action_mask)
        return -logp[mask].sum() / share.num_step_action_tokens, {"logits": kept}

    for chunk in wrapped:
        chunk.zero_grad_buffer()
    reports = run_schedule(wrapped, share.micro_batches, loss_function, backward=True)
    gradients = {k: p.main_grad for k, p in model_tensors(chunks).items() if hasattr(p, "main_grad")}
    logits = torch.cat([report["logits"] for report in reports]) if reports else None
    return share.numbers, logits, hf_pieces(chunks, shape, world, gradients)


def check_logits(results, layout, expected):
    """The logits of all ranks, the vocabulary cut over tp, against those of transformers."""
    tp = layout.get("tp", 1)
    with_logits = [result for result in results if result[1] is not None]
    seen = []
    for first in range(0, len(with_logits), tp):
        whole = torch.cat([logits for _, logits, *_ in with_logits[first : first + tp]], -1)
        numbers = with_logits[first][0]
        parts = whole.split([TRAJECTORIES[n].num_tokens for n in numbers])
        for number, found in zip(numbers, parts, strict=True):
            torch.testing.assert_close(found, expected.logits[number], atol=TOLERANCE, rtol=0)
        seen += numbers
    assert sorted(seen) == list(range(len(TRAJECTORIES)))


def check_gradients(results, expected):
    found = put_together([result[2] for result in results])
    assert found.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(
            found[name], gradient, atol=TOLERANCE * largest, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


CASES = [
    (name, layout)
    for name in VARIANTS
    for layout in LAYOUTS
    if not ("ep" in layout and name == "qwen3") and not (layout != "1" and "-" in name)
]


@pytest.mark.parametrize("name, layout", CASES, ids=lambda value: value)
def test_logits_and_gradients_equal_transformers(folders, expected, name, layout):
    axes = LAYOUTS[layout]
    world_size = axes.get("tp", 1) * axes.get("pp", 1) * axes.get("dp", 1)
    results = run_ranks(world_size, megatron_says, folders[name], axes, timeout_s=120)
    check_logits(results, axes, expected(name))
    check_gradients(results, expected(name))
