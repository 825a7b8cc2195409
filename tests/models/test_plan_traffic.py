"""Bytes between ranks, micro-batches and idle time, worked by hand."""

from types import SimpleNamespace

import pytest

from megatron_sao.models.plan_state import StateBytes
from megatron_sao.models.plan_traffic import (
    COLLECTIVES,
    Passes,
    bubble_fraction,
    imbalance_fraction,
    stage_traffic,
    step_shape,
)


def test_micro_batches_of_a_step():
    step = step_shape(batch_trajectories=128, dp=4, mean_tokens=3000, micro_batch_tokens=8192)
    assert (step.trajectories, step.num_micro_batches, step.tokens) == (32, 16, 96_000)
    assert step_shape(130, 4, 3000, 8192).num_micro_batches == 17, "33 trajectories on the fullest rank, 2 each"
    assert step_shape(130, 4, 3000, 8192, multiple=4).num_micro_batches == 20, "interleaved: 3 are fillers"
    assert step_shape(128, 4, 9000, 8192).num_micro_batches == 32, "a longer one stands alone"


def test_bubble_and_imbalance():
    assert bubble_fraction(1, 1, 8) == 0
    assert bubble_fraction(4, 1, 9) == pytest.approx(3 / 12)
    assert bubble_fraction(4, 3, 9) == pytest.approx(3 / 30)
    assert imbalance_fraction([8, 8, 8]) == 0
    assert imbalance_fraction([14, 8, 8, 8, 8, 8, 8, 16]) == pytest.approx(1 - 78 / 128)


SIZES = dict(
    tensor_model_parallel_size=2,
    context_parallel_size=2,
    expert_model_parallel_size=4,
    expert_tensor_parallel_size=1,
    hidden_size=10,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    multi_latent_attention=False,
    experimental_attention_variant=None,
    num_moe_experts=8,
    moe_layer_freq=[0, 1],
    moe_router_topk=2,
    moe_shared_expert_intermediate_size=None,
    moe_token_dispatcher_type="alltoall",
)
STATE = StateBytes(0, 0, 0, 0, 0, dense_buffer=800, expert_buffer=1600)


def traffic(passes, *, stage=0, num_stages=1, trains_attention=True, **changes):
    return stage_traffic(
        SimpleNamespace(**SIZES | changes),
        [range(2)],
        STATE,
        stage=stage,
        num_stages=num_stages,
        step=step_shape(batch_trajectories=1, dp=1, mean_tokens=80, micro_batch_tokens=80),
        passes=passes,
        itemsize=2,
        copies=(4, 1),
        trains_attention=trains_attention,
    )


def test_one_update_by_hand():
    """T = 80 / cp 2 = 40 tokens, b = 2; a dense layer and one of experts.

    Tensor axis: gathers 10 (attention) + 10 (MLP) + 10 (attention of the expert layer) = 30, scatters the same,
    embedding and head 10 each: 80 a token forward, 80 backward, and 30 to gather inputs again for weight gradients.
    Experts: 3/4 of 20 rows * top 2 go elsewhere, there and back, forward and backward: 4 * 2 * 30 * 10.
    Context: keys and values 2 * 1 group * 8 = 16 a token and layer from the one other rank; three times.
    """
    found = traffic(Passes(0, 1, recomputes=False))
    assert found["tensor gather / reduce-scatter"] == pytest.approx(1 / 2 * 2 * 40 * (80 + 80 + 30))
    assert found["expert all-to-all"] == pytest.approx(4 * 2 * 30 * 10)
    assert found["context keys and values"] == pytest.approx(2 * 40 * 2 * 16 * 3)
    assert found["pipeline send / receive"] == 0
    assert found["data gradients"] == pytest.approx(3 / 4 * 4 * 800), "experts have one copy: nothing to reduce"
    assert found["data weights"] == pytest.approx(3 / 4 * 2 * 800)


def test_passes_recompute_and_freezing():
    once = traffic(Passes(1, 0, recomputes=False))
    update = traffic(Passes(0, 1, recomputes=False))
    again = traffic(Passes(0, 1, recomputes=True))
    for name in ("tensor gather / reduce-scatter", "expert all-to-all", "context keys and values"):
        assert again[name] == pytest.approx(update[name] + once[name]), name
    assert again["data gradients"] == update["data gradients"] and once["data gradients"] == 0
    frozen = traffic(Passes(0, 1, recomputes=False), trains_attention=False)
    saved = update["tensor gather / reduce-scatter"] - frozen["tensor gather / reduce-scatter"]
    assert saved == pytest.approx(1 / 2 * 2 * 40 * 20), "attention's inputs are not gathered for weight gradients"


def test_a_middle_stage_receives_both_ways():
    """b s H = 2 * 20 * 10 a micro-batch and boundary; forward from one side, backward from the other."""
    middle = traffic(Passes(0, 1, recomputes=False), stage=1, num_stages=3)
    assert middle["pipeline send / receive"] == pytest.approx(2 * 400)
    first = traffic(Passes(0, 1, recomputes=False), stage=0, num_stages=3)
    assert first["pipeline send / receive"] == pytest.approx(400)


def test_every_collective_is_explained():
    assert set(traffic(Passes(0, 1, recomputes=False))) | {"weight push"} == set(COLLECTIVES)
