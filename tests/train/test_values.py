"""Values against transformers: head x last hidden state of the prefix before each token, on every layout."""

import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.algo.value_loss import hl_gauss_value
from megatron_sao.config import load_config
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.parallel.init import start_world
from megatron_sao.train.setup import build_trainer
from megatron_sao.train.value_step import value_update
from megatron_sao.train.values import ValueReadout, infer_values
from tests.support.folders import make_folder, read_weights, write_weights
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories

TRAJECTORIES = random_trajectories(5, seed=4, longest=24)
LAYOUTS = {"1": {}, "tp2-ep2": dict(tp=2, ep=2), "pp2": dict(pp=2), "dp2": dict(dp=2), "cp2": dict(cp=2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a value head, so that values are not zero."""
    folder = make_folder(tmp_path_factory.mktemp("moe") / "model")
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(8))
    write_weights(folder, read_weights(folder) | {"value_head.weight": head})
    return folder


def values_and_loss(folder, layout):
    """(token ids, values of this rank's tokens, value loss of the step for targets of 0.25)."""
    overrides = [f"parallel.{key}={value}" for key, value in layout.items()]
    config = load_config(None, ["parallel.micro_batch_tokens=128", *overrides])
    trainer = build_trainer(config, HFFolder(folder), start_world(config))
    models, share = trainer.models, trainer.share_of_batch(TRAJECTORIES, 0)
    value = infer_values(models.value.wrapped, share, models.readout)
    target = torch.full_like(value, 0.25)
    loss = value_update(models.value, share, target, value, models.readout)["value/loss"]
    return share.batch.token_ids, value, loss


@pytest.fixture(scope="module")
def expected(folder):
    """Token ids of a trajectory -> V of the prefix before each of its tokens."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    head = read_weights(folder)["value_head.weight"]
    found = {}
    for trajectory in TRAJECTORIES:
        ids = torch.tensor(trajectory.token_ids)
        with torch.no_grad():
            hidden = model(ids[None]).last_hidden_state[0]
        found[tuple(ids.tolist())] = torch.cat([torch.zeros(1), (hidden @ head.T)[:-1, 0]])
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_judge_the_prefix_before_each_token(folder, expected, layout):
    seen = set()
    for token_ids, value, _ in run_ranks(1 if layout == "1" else 2, values_and_loss, folder, LAYOUTS[layout]):
        ids, at = token_ids.tolist(), 0
        while at < len(ids):
            key = next(key for key in expected if list(key) == ids[at : at + len(key)])
            torch.testing.assert_close(value[at : at + len(key)], expected[key], atol=5e-5, rtol=1e-5)
            assert value[at] == 0, "nothing stands before a first token"
            seen.add(key)
            at += len(key)
    assert seen == set(expected)


@pytest.mark.parametrize("layout", ["1", "dp2", "cp2"])
def test_the_loss_is_of_the_same_values(folder, expected, layout):
    errors = []
    for trajectory in TRAJECTORIES:
        value = expected[tuple(trajectory.token_ids.tolist())]
        errors.append(0.5 * (value[torch.tensor(trajectory.action_mask)] - 0.25).square())
    mean = float(torch.cat(errors).mean())
    for _, _, loss in run_ranks(1 if layout == "1" else 2, values_and_loss, folder, LAYOUTS[layout]):
        assert loss == pytest.approx(mean, rel=1e-5)


def readout(*overrides):
    return ValueReadout(load_config(None, [f"value.{override}" for override in overrides]).value)


def test_a_readout_of_one_output_is_that_output():
    plain = readout()
    assert plain.num_outputs == 1 and plain.values(torch.tensor([[0.8], [-0.4], [0.1]])).tolist() == [
        pytest.approx(0.8),
        pytest.approx(-0.4),
        pytest.approx(0.1),
    ]


def test_value_clipping_is_off_unless_asked_for():
    outputs, target = torch.tensor([[1.0]]), torch.tensor([0.0])
    given = (outputs, target, torch.tensor([3.0]), torch.tensor([True]), 1)
    assert float(readout().loss(*given)) == 0.5
    # V clamped to old - 0.5 = 2.5 is further from the target than V itself: 0.5 * 2.5^2
    assert float(readout("value_clip=0.5").loss(*given)) == 3.125


def test_a_readout_of_bins_is_their_mean():
    bins = readout("loss=hl_gauss", "hl_gauss_bins=4", "hl_gauss_min=0.0", "hl_gauss_max=4.0")
    assert bins.num_outputs == 4
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0]])
    assert bins.values(logits).tolist() == [pytest.approx(2.0), pytest.approx(0.5)]
    assert torch.equal(bins.values(logits), hl_gauss_value(logits, bins.support))
