"""The forecast of a push, on a plan small enough to follow by hand."""

import pytest

from megatron_sao.transport.engine_layout import EngineLayout
from megatron_sao.transport.forecast import Link, forecast
from megatron_sao.transport.plan import EVERY_KIND, WireItem, make_plan

Q, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"


def two_ranks_to_two_kinds():
    """64 bytes from rank 0 to kind 0, 64 from rank 1 to kind 1, then 16 from rank 1 to all."""
    half = [WireItem(Q, "float32", (4, 8), 0, start, 2) for start in (0, 2)]
    plan = make_plan(
        [[half[0]], [half[1], WireItem(NORM, "float32", (4,))]], bucket_bytes=64, engine=EngineLayout(2)
    )
    sent = [(b.src_rank, b.kinds, b.num_bytes) for b in plan.buckets]
    assert sent == [(0, (0,), 64), (1, (1,), 64), (1, EVERY_KIND, 16)]
    return plan


def test_two_engines_by_hand():
    """At 16 bytes a second. Engine 0 takes all three from the ranks: its worker 0 the first and the last.

    0-4 both halves arrive in engine 0; 4-8 they are passed on to engine 1; 4-5 the last one arrives in the first one's
    worker, which passes it on when all others are free: 8-9.
    """
    found = forecast(two_ranks_to_two_kinds(), num_engines=2, link=Link(16))
    assert (found.sent_bytes, found.num_sent) == ([64, 80], [1, 2])
    assert (found.received_bytes, found.num_received) == ([80, 80], [2, 2])
    assert found.balance == pytest.approx(80 / 72)
    assert (found.sending_s, found.receiving_s) == (5, 5)
    assert (found.filling_s, found.transfer_s, found.total_s) == (4, 9, 13)


def test_one_engine_passes_on_only_what_both_workers_load():
    """0-4 both halves; 4-5 the last one to worker 0, 5-6 on to worker 1."""
    found = forecast(two_ranks_to_two_kinds(), num_engines=1, link=Link(16))
    assert (found.transfer_s, found.received_bytes) == (6, [80, 80])


def test_a_message_costs_something_besides_its_bytes():
    """A second each: 0-5 and 5-10 for the halves; 5-7 and 10-12 for the last one."""
    found = forecast(two_ranks_to_two_kinds(), num_engines=2, link=Link(16, message_s=1))
    assert (found.sending_s, found.transfer_s, found.total_s) == (5 + 2, 12, 5 + 12)


def three_buckets():
    """Rank 0's 64 bytes, rank 1's 32, rank 0's other 32, all for the one kind of worker."""
    items = [WireItem(f"model.layers.0.{name}.weight", "float32", (size,)) for name, size in (("a", 16), ("b", 8))]
    plan = make_plan([items, [WireItem("model.layers.0.c.weight", "float32", (8,))]], bucket_bytes=64)
    assert [(bucket.src_rank, bucket.num_bytes) for bucket in plan.buckets] == [(0, 64), (1, 32), (0, 32)]
    return plan


def test_a_rank_sends_one_after_the_other_and_a_worker_takes_one_after_the_other():
    """16 bytes a second: to one engine of one worker in 4 + 2 + 2.

    With two engines the first is passed on 4-8, and meanwhile the second arrives in the other engine, 0-2. That is
    passed on 8-10, while the third arrives in the first engine, which is passed on 10-12.
    """
    found = forecast(three_buckets(), num_engines=1, link=Link(16))
    assert (found.sending_s, found.receiving_s, found.transfer_s) == (6, 8, 8)
    assert forecast(three_buckets(), num_engines=2, link=Link(16)).transfer_s == 12


def test_loading_overlaps_and_holds_the_next_but_one_back():
    """Ten seconds a piece, two buffers: 0-4 and 4-6 arrive, 4-14 and 14-24 are loaded; the third waits for the first
    one's buffer, arrives 14-16 and is loaded 24-34."""
    found = forecast(three_buckets(), num_engines=1, link=Link(16), piece_s=10)
    assert (found.num_loaded, found.loading_s) == ([3], 30)
    assert (found.filling_s, found.transfer_s, found.total_s) == (4, 16, 4 + 34)
    quick = forecast(three_buckets(), num_engines=1, link=Link(16), piece_s=1)
    assert (quick.transfer_s, quick.total_s) == (8, 4 + 8 + 1)  # only the last one is loaded after the last byte
