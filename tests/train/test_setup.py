"""What each rank gets of a batch, and batches that are refused on every rank alike."""

import numpy as np
import pytest
from msgspec.structs import replace

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.errors import SaoError
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.parallel.init import start_world
from megatron_sao.train.setup import build_trainer
from tests.support.folders import make_folder
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("moe") / "model")


def shares(folder, overrides, cases):
    """For (trajectories, policy_version): the share's batch, or the refusal."""
    config = load_config(None, overrides)
    trainer = build_trainer(config, HFFolder(folder), start_world(config))
    found = []
    for trajectories, policy_version in cases:
        try:
            found.append(trainer.share_of_batch(trajectories, policy_version).batch)
        except SaoError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def of_domain(domain):
    return [replace(t, prompt=replace(t.prompt, domain=domain)) for t in random_trajectories(1)]


def test_bounds_come_from_the_domain_of_each_trajectory(folder):
    overrides = ["algo.bounds.coding.eps_low=0.5", "algo.bounds.coding.eps_high=2.0"]
    cases = [(of_domain(domain), 0) for domain in ("reasoning", "coding", "agentic", "poetry")]
    (found,) = run_ranks(1, shares, folder, overrides, cases)
    for batch, low, high in zip(found, (0.3, 0.5, 0.8), (5.0, 2.0, 3.0), strict=False):
        assert batch.eps_low_t.unique().tolist() == pytest.approx([low])
        assert batch.eps_high_t.unique().tolist() == pytest.approx([high])
    assert found[3].startswith("DataError: domain 'poetry' has no bounds")


def test_a_batch_that_is_too_stale_or_from_the_future_is_refused_on_every_rank(folder):
    old = random_trajectories(3, newest_version=5)
    mixed = [*random_trajectories(2, newest_version=7), old[0]]
    cases = [(old, 5), (old, 7), (old, 8), (mixed, 8), (old, 4)]
    for found in run_ranks(2, shares, folder, ["parallel.dp=2", "schedule.max_staleness=2"], cases):
        fresh, at_limit, *refused = found
        assert fresh.lag_t.max() == 0 and at_limit.lag_t.max() == 2
        for text in refused[:2]:
            assert text == (
                "ProtocolError: the batch of version 8 holds a token 3 versions old; schedule.max_staleness = 2"
            )
        assert refused[2].startswith("DataError") and "newer than 4" in refused[2]


def of_length(length):
    trajectory = random_trajectories(1)[0]
    per_token = ("token_ids", "action_mask", "logp_sampler", "reward_t", "version_t", "turn_t")
    return replace(trajectory, **{name: np.resize(getattr(trajectory, name), length) for name in per_token})


def test_ranks_are_balanced_by_what_trajectories_cost_this_model(folder):
    """In tokens one of 200 is two of 100; with attention over 200 tokens it costs this small model almost three."""
    case = [of_length(length) for length in (200, 100, 100, 100, 100, 100)], 0
    lengths = [batch.lengths().tolist() for (batch,) in run_ranks(2, shares, folder, ["parallel.dp=2"], [case])]
    assert lengths == [[200, 100], [100, 100, 100, 100]]  # by tokens it would be 400 and 300
