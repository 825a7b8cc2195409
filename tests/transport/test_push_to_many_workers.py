"""Pushes between forked processes: two trainer ranks, two engines of two workers each, no engine software."""

import os
import time

import pytest
import torch

from megatron_sao.errors import ConfigError
from megatron_sao.transport.engine_layout import EngineLayout, parts_of
from megatron_sao.transport.plan import WireItem, make_plan
from megatron_sao.transport.receiver import WeightReceiver
from megatron_sao.transport.sender import WeightSender
from tests.support.ranks import run_ranks
from tests.transport.test_push_over_gloo import (
    NUM_TRAINERS, TIMEOUT_S, free_port, in_a_child_if, join, refusal, view_of,
)  # fmt: skip

LAYOUT = EngineLayout(2, num_kv_heads=1)
WORLD = NUM_TRAINERS + 2 * LAYOUT.num_workers
SHAPES = {
    "model.embed_tokens.weight": (130, 4),
    "model.layers.0.self_attn.q_proj.weight": (8, 6),
    "model.layers.0.self_attn.k_proj.weight": (2, 6),
    "model.layers.0.self_attn.o_proj.weight": (6, 8),
    "model.layers.0.input_layernorm.weight": (6,),
    "model.layers.1.mlp.experts.0.gate_proj.weight": (4, 6),
    "model.layers.1.mlp.experts.1.gate_proj.weight": (4, 6),
    "model.norm.weight": (6,),
}


def the_plan(engine: EngineLayout = LAYOUT):
    """Rank 0 owns the left or upper 3/8 of what is cut and every other tensor of the rest."""
    by_rank = [[], []]
    for number, (name, shape) in enumerate(SHAPES.items()):
        if name.endswith(("q_proj.weight", "o_proj.weight")):
            dim = 1 if "o_proj" in name else 0
            by_rank[0].append(WireItem(name, "float32", shape, dim, 0, 3))
            by_rank[1].append(WireItem(name, "float32", shape, dim, 3, 5))
        else:
            by_rank[number % 2].append(WireItem(name, "float32", shape))
    return make_plan(by_rank, bucket_bytes=256, engine=engine)


def the_weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def expected_by(kind: int, version: int, layout: EngineLayout = LAYOUT) -> dict[str, torch.Tensor]:
    """What a worker must be handed: its rows, and NaN in the others."""
    expected = {}
    for name, tensor in the_weights(version).items():
        parts = parts_of(name, SHAPES[name], layout)
        if parts is not None:
            start, end = parts.rows[kind]
            if start == end:
                continue
        if parts is not None and parts.dim >= 0:
            mine = torch.full_like(tensor, float("nan"))
            mine.narrow(parts.dim, start, end - start).copy_(tensor.narrow(parts.dim, start, end - start))
            tensor = mine
        expected[name] = tensor
    return expected


def push_three_times(port):
    rank, group = join(port, WORLD)
    if rank < NUM_TRAINERS:
        sender, statistics = WeightSender(group, the_plan()), []
        for version in (1, 2, 3):
            if version == 2:  # prepared for another version: must not be sent
                sender.prepare(view_of(the_weights(9)), 9)
            if version == 3:
                sender.prepare(view_of(the_weights(3)), 3)
            statistics.append(sender.send(view_of(the_weights(version)), version))
        return [s.sent_bytes for s in statistics]
    receiver, got = WeightReceiver(group, the_plan()), []
    for version in (1, 2, 3):
        arrived: list[tuple[str, torch.Tensor]] = []
        receiver.receive(version, load=arrived.extend)
        got.append(arrived)
    return receiver.kind, got, receiver.statistics.num_bytes


def test_each_worker_of_each_engine_gets_its_rows_and_poison_elsewhere():
    results, plan = run_ranks(WORLD, push_three_times, free_port()), the_plan()
    assert results[:2] == [[plan.sent_bytes(0)] * 3, [plan.sent_bytes(1)] * 3]
    assert [kind for kind, *_ in results[2:]] == [0, 1, 0, 1]
    for kind, got, num_bytes in results[2:]:
        assert num_bytes == plan.received_bytes(kind) < plan.num_bytes
        for version, arrived in zip((1, 2, 3), got, strict=True):
            expected = expected_by(kind, version)
            assert sorted(name for name, _ in arrived) == sorted(expected)
            for name, tensor in arrived:
                assert torch.equal(tensor.nan_to_num(7.0), expected[name].nan_to_num(7.0)), name
                assert tensor.isnan().any() == expected[name].isnan().any()
    assert any(t.isnan().any() for t in expected_by(0, 1).values())


def push_once(port, layout):
    rank, group = join(port, NUM_TRAINERS + layout.num_workers)
    if rank < NUM_TRAINERS:
        WeightSender(group, the_plan(layout)).send(view_of(the_weights(1)), 1)
        return {}
    arrived: list[tuple[str, torch.Tensor]] = []
    WeightReceiver(group, the_plan(layout)).receive(1, load=arrived.extend)
    return dict(arrived)


@pytest.mark.parametrize(
    ("layout", "num_received"),
    [
        (EngineLayout(2, pipeline_parallel=2, num_layers=2, num_kv_heads=1), [5, 5, 3, 3]),
        (EngineLayout(1, 2, 2, expert_parallel=True, num_layers=2, num_kv_heads=1, num_experts=2), [5, 2, 5, 2]),
    ],
    ids=["tp2-pp2", "pp2-dp2-ep2"],
)
def test_stages_and_replicas_of_an_engine_get_theirs(layout, num_received):
    results = run_ranks(NUM_TRAINERS + layout.num_workers, push_once, free_port(), layout)[NUM_TRAINERS:]
    for kind, arrived in enumerate(results):
        expected = expected_by(kind, 1, layout)
        assert arrived.keys() == expected.keys() and len(arrived) == num_received[kind]
        for name, tensor in arrived.items():
            assert torch.equal(tensor.nan_to_num(7.0), expected[name].nan_to_num(7.0)), name


def flip_a_bit(port):
    rank, group = join(port, WORLD)
    plan = the_plan()
    if rank < NUM_TRAINERS:
        sender = WeightSender(group, plan)
        send = group.send

        def send_changed(tensor, dst_rank, tag):
            if tag == 3:
                tensor[5] ^= 1
            return send(tensor, dst_rank, tag)

        group.send = send_changed
        message = refusal(sender.send, view_of(the_weights(1)), 1)
        group.send = send
        sender.send(view_of(the_weights(2)), 2)
        return message
    receiver = WeightReceiver(group, plan)
    message = refusal(receiver.receive, 1, load=lambda tensors: None)
    receiver.receive(2, load=lambda tensors: None)
    return message


def test_bytes_that_changed_on_the_way_are_heard_of_by_all_and_the_next_push_works():
    messages = run_ranks(WORLD, flip_a_bit, free_port())
    bucket = the_plan().buckets[3]
    for rank, message in enumerate(messages):
        assert "refused" in message
        loads_it = rank >= NUM_TRAINERS and bucket.is_for((rank - NUM_TRAINERS) % 2)
        assert ("bucket 3 from trainer rank" in message) == loads_it


def weights_that_hold_nan(port):
    rank, group = join(port, WORLD)
    if rank < NUM_TRAINERS:
        weights = the_weights(1)
        weights["model.layers.0.self_attn.q_proj.weight"][0, 0] = float("nan")
        return refusal(WeightSender(group, the_plan()).send, view_of(weights), 1)
    return refusal(WeightReceiver(group, the_plan()).receive, 1, load=lambda tensors: None)


def test_weights_that_hold_nan_are_not_sent():
    messages = run_ranks(WORLD, weights_that_hold_nan, free_port())
    assert "rank 0: model.layers.0.self_attn.q_proj.weight holds a number that is not finite" in messages[0]
    assert all("trainer rank 0 refused" in message for message in messages[1:])


def a_worker_dies(port, dying_rank):
    rank, group = join(port, WORLD)
    started = time.monotonic()
    if rank < NUM_TRAINERS:
        message = refusal(WeightSender(group, the_plan()).send, view_of(the_weights(1)), 1)
    else:
        loads = []

        def load(tensors):
            loads.append(tensors)
            if rank == dying_rank and len(loads) == 2:
                os._exit(0)

        message = refusal(WeightReceiver(group, the_plan()).receive, 1, load=load)
    return message, time.monotonic() - started


@pytest.mark.parametrize("dying_rank", [2, 5])
def test_an_engine_worker_that_dies_in_the_middle_ends_the_push_everywhere(dying_rank):
    def run(port):
        return in_a_child_if(int(os.environ["RANK"]) == dying_rank, a_worker_dies, port, dying_rank)

    results = run_ranks(WORLD, run, free_port())
    assert results.pop(dying_rank) is None
    for message, seconds in results:
        assert "died or does not take part" in message
        assert seconds < TIMEOUT_S + 5


def a_worker_is_slow(port):
    rank, group = join(port, WORLD)
    if rank < NUM_TRAINERS:
        WeightSender(group, the_plan()).send(view_of(the_weights(1)), 1)
        return 0
    receiver = WeightReceiver(group, the_plan())
    receiver.receive(1, load=lambda tensors: time.sleep(0.2 if rank == 3 else 0))
    return receiver.statistics.load_s


def test_a_slow_worker_is_waited_for():
    load_s = run_ranks(WORLD, a_worker_is_slow, free_port())
    assert load_s[3] > load_s[4]


def a_wrong_number_of_workers(port):
    rank, group = join(port, 3)
    make = WeightSender if rank < NUM_TRAINERS else WeightReceiver
    try:
        make(group, the_plan())
    except ConfigError as error:
        return str(error)
    return ""


def test_a_group_without_whole_engines_is_refused():
    assert all("whole engines of 2 workers" in m for m in run_ranks(3, a_wrong_number_of_workers, free_port()))


def one_leaves(port):
    rank, group = join(port, 3)
    tensor = torch.zeros(4)
    if rank == 2:
        waiting = group.receive(tensor, 0, 1)  # under way when this rank leaves
        time.sleep(0.5)
        group.close()
        message = refusal(waiting.wait)
        time.sleep(3)  # it lives on
        return message, 0.0
    started = time.monotonic()
    message = refusal(group.receive(tensor, 2, 2).wait) if rank == 0 else refusal(group.gather, [1])
    return message, time.monotonic() - started


def test_who_leaves_is_heard_of_at_once_by_those_who_wait_for_it():
    (first, first_s), (second, second_s), (left, _) = run_ranks(3, one_leaves, free_port())
    assert "died or does not take part" in first and "died or does not take part" in second
    assert max(first_s, second_s) < 2.5  # not the limit of 10 s; the rank that left lives for 3 s
    assert "was closed" in left
