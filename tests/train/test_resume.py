"""A run that was saved and restored goes on as if nothing had happened."""

from math import prod

import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from tests.support.families import make_family_folder
from tests.support.ranks import run_ranks
from tests.support.saved_runs import resumed, saved_and_continued

SAVED_AT, LAST = 3, 5  # the value warm-up takes steps 1 and 2


def ranks_of(axes):
    return prod(axes.get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))


def overrides_of(axes):
    return [f"parallel.{key}={value}" for key, value in axes.items()]


def assert_same_bits(results, expected):
    for (metrics, state, progress), (_, expected_metrics, expected_state, expected_progress) in zip(
        results, expected, strict=True
    ):
        assert metrics == expected_metrics
        assert progress == expected_progress
        for role in ("policy", "value"):
            (tensors, counters), (expected_tensors, expected_counters) = state[role], expected_state[role]
            assert counters == expected_counters
            assert tensors.keys() == expected_tensors.keys()
            num_updates, moments = counters[0], [t for name, t in tensors.items() if name.endswith("exp_avg_sq")]
            assert any(bool(moment.any()) for moment in moments) == (num_updates > 0), "the moments are real ones"
            differ = [name for name in tensors if not torch.equal(tensors[name], expected_tensors[name])]
            assert differ == []


def assert_close(metrics, expected):
    assert len(metrics) == len(expected) == LAST - SAVED_AT
    for found, wanted in zip(metrics, expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5, rel=1e-5)


SAME_LAYOUT = {
    "alone, in the warm-up": ({}, ["value.warmup_steps=4"]),
    "tp2-ep2": (dict(tp=2, ep=2), []),
    "dp2, bfloat16 with float32 masters": (dict(dp=2), ["model.dtype=bfloat16", "engine.dtype=bfloat16"]),
    "cp2-pp2, one model asleep": (dict(cp=2, pp=2, offload_sleeping_model="true"), []),
    "dp2, in the background": (dict(dp=2, offload_sleeping_model="true"), ["checkpoint.in_background=true"]),
}


@pytest.mark.parametrize("case", SAME_LAYOUT)
def test_resumed_is_uninterrupted_bit_by_bit(tiny_folder, tmp_path, case):  # VAL-06, WSY-10
    axes, more = SAME_LAYOUT[case]
    given = (tiny_folder, tmp_path / "checkpoints", overrides_of(axes) + more)
    expected = run_ranks(ranks_of(axes), saved_and_continued, *given, SAVED_AT, LAST, timeout_s=120)
    results = run_ranks(ranks_of(axes), resumed, *given, LAST, timeout_s=120)
    assert_same_bits(results, expected)
    said = expected[0][0]
    assert said["save/bytes"] > 1e6 and said["save/seconds"] >= said["save/waited_seconds"] > 0
    assert results[0][2]["policy_version"] == (1 if "warm-up" in case else 3)


def test_every_kind_of_tensor_goes_on_alike(tmp_path):
    """MLA, an indexer, a shared expert, a router's bias, a trained MTP layer, a padded vocabulary."""
    folder = make_family_folder("glm_moe_dsa", tmp_path / "hf", mtp=True, seed=1, vocab_size=129)
    given, more = (folder, tmp_path / "checkpoints"), ["policy.mtp_loss_weight=0.1"]
    first, second = ([*overrides_of(axes), *more] for axes in (dict(tp=2, ep=2), dict(pp=2)))
    expected = run_ranks(2, saved_and_continued, *given, first, SAVED_AT, LAST, timeout_s=120)
    for metrics, *_ in run_ranks(2, resumed, *given, second, LAST, timeout_s=120):
        assert_close(metrics, expected[0][1])


LAYOUTS = {
    "1": {},
    "tp2-ep2": dict(tp=2, ep=2),
    "pp2": dict(pp=2),
    "dp2": dict(dp=2),
    "pp2-vpp2-dp2-ep2": dict(pp=2, vpp=2, dp=2, ep=2),
}


@pytest.fixture(scope="module")
def saved(tiny_folder, tmp_path_factory):
    """layout -> (checkpoints of a run, metrics of the uninterrupted one after the save)."""
    made = {}
    for layout in ("1", "tp2-ep2"):
        run, axes = tmp_path_factory.mktemp(layout), LAYOUTS[layout]
        given = (tiny_folder, run, overrides_of(axes), SAVED_AT, LAST)
        results = run_ranks(ranks_of(axes), saved_and_continued, *given, timeout_s=120)
        made[layout] = run, results[0][1]
    return made


@pytest.mark.parametrize(
    "first, second",
    [("tp2-ep2", "pp2"), ("tp2-ep2", "dp2"), ("tp2-ep2", "1"), ("1", "tp2-ep2"), ("1", "pp2-vpp2-dp2-ep2")],
)
def test_another_layout_goes_on_alike(tiny_folder, saved, first, second):
    run, expected = saved[first]
    axes = LAYOUTS[second]
    for metrics, *_ in run_ranks(
        ranks_of(axes), resumed, tiny_folder, run, overrides_of(axes), LAST, timeout_s=120
    ):
        assert_close(metrics, expected)
