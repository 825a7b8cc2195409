"""The push plan: every element once, by one rank, layer by layer, in buckets of limited size. No torch."""

import subprocess
import sys

import pytest

from megatron_sao.errors import ProtocolError
from megatron_sao.transport.engine_layout import EngineLayout
from megatron_sao.transport.plan import (
    EVERY_KIND, Bucket, WireItem, decode_plan, encode_plan, layer_key, make_plan, name_faults,
)  # fmt: skip


def whole(name: str, *shape: int, dtype: str = "float32") -> WireItem:
    return WireItem(name, dtype, shape)


def rows(name: str, shape: tuple[int, ...], dim: int, start: int, length: int) -> WireItem:
    return WireItem(name, "float32", shape, dim, start, length)


def layer(i: int) -> str:
    return f"model.layers.{i}"


def test_order_is_embeddings_layers_head_and_experts_stay_with_their_layer():
    items = [
        whole("lm_head.weight", 4), whole(f"{layer(10)}.mlp.experts.0.up_proj.weight", 4),
        whole("model.norm.weight", 4), whole(f"{layer(2)}.mlp.experts.11.up_proj.weight", 4),
        whole("model.embed_tokens.weight", 4),
    ]  # fmt: skip
    plan = make_plan([items], bucket_bytes=1 << 20)
    assert [item.name for bucket in plan.buckets for item in bucket.items] == [
        "model.embed_tokens.weight", f"{layer(2)}.mlp.experts.11.up_proj.weight",
        f"{layer(10)}.mlp.experts.0.up_proj.weight", "lm_head.weight", "model.norm.weight",
    ]  # fmt: skip
    assert layer_key("model.layers.3.mlp.experts.7.w1") == (1, 3)


def test_no_layer_waits_for_another_when_several_ranks_send():
    # Two ranks own half of each of 3 layers (64 bytes per layer and rank); 128 bytes hold one layer.
    by_rank = [[whole(f"{layer(i)}.{rank}.weight", 16) for i in range(3)] for rank in range(2)]
    plan = make_plan(by_rank, bucket_bytes=128)
    sent = [(bucket.src_rank, item.name) for bucket in plan.buckets for item in bucket.items]
    assert sent == [(rank, f"{layer(i)}.{rank}.weight") for i in range(3) for rank in range(2)]


def test_buckets_keep_the_limit_unless_one_row_exceeds_it():
    items = [whole(f"{layer(0)}.{name}", *shape) for name, *shape in (("a", 8), ("b", 8), ("c", 8), ("d", 3, 100))]
    plan = make_plan([items], bucket_bytes=64)
    sent = [[item.name[-1] for item in bucket.items] for bucket in plan.buckets]
    assert sent == [["a", "b"], ["c"], ["d"], ["d"], ["d"]]
    assert [bucket.num_bytes for bucket in plan.buckets] == [64, 32, 400, 400, 400]
    assert plan.max_bucket_bytes == 400 and plan.num_bytes == 1296


def test_large_tensors_travel_in_pieces_that_cover_them_once():
    shape = (5000, 1024)  # 20 MB in pieces of at most 16 MiB
    plan = make_plan([[whole("t", *shape)]], bucket_bytes=64 << 20)
    assert [(item.dim, item.start, item.length) for bucket in plan.buckets for item in bucket.items] == [
        (0, 0, 4096), (0, 4096, 904),
    ]  # fmt: skip
    plan = make_plan([[rows("t", (1024, 5000), 1, 0, 5000)]], bucket_bytes=8 << 20)
    assert [(item.dim, item.start, item.length) for bucket in plan.buckets for item in bucket.items] == [
        (1, 0, 2048), (1, 2048, 2048), (1, 4096, 904),
    ]  # fmt: skip


def test_items_start_at_aligned_offsets_so_that_any_dtype_can_be_viewed():
    bucket = Bucket(0, (whole("a", 3, dtype="bfloat16"), whole("b", 5), whole("c", 1, dtype="int64")))
    assert bucket.offsets == (0, 16, 48)
    assert bucket.num_bytes == 64


def test_slice_shapes_and_sizes():
    item = rows("q", (6, 4), 1, 2, 2)
    assert item.shape == (6, 2) and item.num_bytes == 48
    assert whole("scalar").shape == () and whole("scalar").num_bytes == 4


def test_encoding_round_trips_and_the_hash_sees_every_change():
    plan = make_plan([[rows("a", (4, 2), 0, 0, 2)], [rows("a", (4, 2), 0, 2, 2)]], bucket_bytes=64)
    assert decode_plan(encode_plan(plan)) == plan and decode_plan(encode_plan(plan)).hash == plan.hash
    assert int(plan.hash, 16) < 2**63
    swapped = make_plan([[rows("a", (4, 2), 0, 2, 2)], [rows("a", (4, 2), 0, 0, 2)]], bucket_bytes=64)
    other_dtype = make_plan([[WireItem("a", "bfloat16", (4, 2))], []], bucket_bytes=64)
    excluding = make_plan([[whole("a", 4, 2)], []], bucket_bytes=64, excluded=["b"])
    assert len({plan.hash, swapped.hash, other_dtype.hash, excluding.hash}) == 4


def test_bytes_that_are_no_plan_are_refused():
    with pytest.raises(ProtocolError, match="no push plan"):
        decode_plan(b"\x93\x01\x02\x03")


# ---- who gets what ----------------------------------------------------------------------------------------------


def received(plan, kind: int) -> dict[str, list[tuple[int, int, int]]]:
    """name -> (dim, start, end) of what a worker gets, in rows."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for bucket in plan.buckets:
        if bucket.is_for(kind):
            for item in bucket.items:
                found.setdefault(item.name, []).append((item.dim, *item.interval))
    return {name: sorted(pieces) for name, pieces in found.items()}


def test_each_kind_gets_its_rows_and_what_all_load_travels_once():
    q, o, k = (f"{layer(0)}.self_attn.{part}_proj.weight" for part in "qok")
    norm = f"{layer(0)}.input_layernorm.weight"
    by_rank = [
        [rows(q, (8, 4), 0, 0, 6), whole(o, 4, 8), whole(norm, 4)],
        [rows(q, (8, 4), 0, 6, 2), whole(k, 2, 4)],
    ]
    plan = make_plan(by_rank, bucket_bytes=1024, engine=EngineLayout(2, num_kv_heads=1))
    assert received(plan, 0) == {q: [(0, 0, 4)], o: [(1, 0, 4)], norm: [(-1, 0, 1)], k: [(-1, 0, 1)]}
    assert received(plan, 1) == {q: [(0, 4, 6), (0, 6, 8)], o: [(1, 4, 8)], norm: [(-1, 0, 1)], k: [(-1, 0, 1)]}
    assert plan.needed_rows(1) == {q: 4, o: 4, norm: 1, k: 1}
    sent = sum(b.num_bytes for b in plan.buckets)
    assert sent == 4 * (32 + 32 + 4 + 8) == plan.num_bytes == plan.sent_bytes(0) + plan.sent_bytes(1)


def test_heads_that_some_workers_share_are_sent_once_for_all_of_them():
    k = f"{layer(0)}.self_attn.k_proj.weight"
    plan = make_plan([[whole(k, 4, 4)]], bucket_bytes=1024, engine=EngineLayout(4, num_kv_heads=2))
    assert [received(plan, kind)[k] for kind in range(4)] == [[(0, 0, 2)], [(0, 0, 2)], [(0, 2, 4)], [(0, 2, 4)]]
    assert [b.kinds for b in plan.buckets] == [(0, 1), (2, 3)] and plan.num_bytes == 4 * 16
    assert plan.workers_of((0, 1), 2) == [0, 1, 4, 5]


def test_a_stage_gets_its_layers_and_stages_take_turns():
    names = ["model.embed_tokens.weight", *(f"{layer(i)}.norm" for i in range(5)), "model.norm.weight"]
    engine = EngineLayout(1, pipeline_parallel=2, num_layers=5)  # layers 0 to 2, then 3 and 4
    plan = make_plan([[whole(name, 4) for name in names]], bucket_bytes=16, engine=engine)
    sent = [(bucket.items[0].name, bucket.kinds) for bucket in plan.buckets]
    in_turns = [(f"{layer(i)}.norm", (int(i > 2),)) for i in (0, 3, 1, 4, 2)]
    assert sent == [(names[0], (0,)), *in_turns, (names[-1], (1,))]


def test_replicas_share_all_but_the_experts_that_each_owns():
    q, up = f"{layer(0)}.self_attn.q_proj.weight", f"{layer(0)}.mlp.experts.{{}}.up_proj.weight"
    engine = EngineLayout(2, data_parallel=2, expert_parallel=True, num_experts=4)
    items = [whole(q, 8, 4), *(whole(up.format(expert), 4, 4) for expert in range(4))]
    plan = make_plan([items], bucket_bytes=1024, engine=engine)
    assert [received(plan, kind)[q] for kind in range(4)] == [[(0, 0, 4)], [(0, 4, 8)], [(0, 0, 4)], [(0, 4, 8)]]
    for kind in range(4):
        assert received(plan, kind).keys() == {q, up.format(kind)}
    assert plan.num_bytes == 4 * (8 * 4 + 4 * 4 * 4)  # nothing is sent twice


def test_rows_cut_one_way_and_loaded_the_other_go_to_all():
    o = f"{layer(0)}.self_attn.o_proj.weight"
    by_rank = [[rows(o, (4, 8), 0, 0, 2)], [rows(o, (4, 8), 0, 2, 2)]]
    plan = make_plan(by_rank, bucket_bytes=1024, engine=EngineLayout(2))
    assert received(plan, 0) == received(plan, 1) == {o: [(0, 0, 2), (0, 2, 4)]}


def test_neighbours_in_the_order_come_from_other_ranks_and_go_to_other_workers():
    by_rank = [[whole(f"{layer(0)}.mlp.experts.{rank}.up_proj.weight", 8, 4)] for rank in range(2)]
    plan = make_plan(by_rank, bucket_bytes=1024, engine=EngineLayout(2))
    assert [(b.src_rank, b.kinds) for b in plan.buckets] == [(0, (0,)), (1, (1,)), (0, (1,)), (1, (0,))]
    # Three engines of two workers; worker = engine * 2 + kind. Engines take turns within a kind.
    assert plan.first_workers(3) == [0, 1, 3, 2]
    for number, bucket in zip(plan.first_workers(1), plan.buckets):
        assert (number,) == bucket.kinds


def test_what_every_worker_loads_enters_the_engines_by_all_their_workers_in_turn():
    plan = make_plan([[whole(f"{layer(i)}.norm", 4) for i in range(6)]], bucket_bytes=16, engine=EngineLayout(2))
    assert [b.kinds for b in plan.buckets] == [EVERY_KIND] * 6
    assert plan.first_workers(2) == [0, 2, 1, 3, 0, 2]


def test_the_hash_sees_the_layout_of_the_engines():
    items = [[whole("model.norm.weight", 4)]]
    hashes = {make_plan(items, bucket_bytes=64, engine=EngineLayout(n)).hash for n in (1, 2, 4)}
    assert len(hashes) == 3


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by_rank", "message"),
    [
        ([[whole("a", 4)], [whole("a", 4)]], r"a: rows \[0, 1\) come from rank 0 and rank 1"),  # both claim it
        ([[rows("a", (4,), 0, 0, 3)], [rows("a", (4,), 0, 2, 2)]], r"a: rows \[2, 3\) come from rank 0 and rank 1"),
        ([[rows("a", (4,), 0, 0, 1)], [rows("a", (4,), 0, 2, 2)]], r"a: rows \[1, 2\) come from no rank"),
        ([[rows("a", (4,), 0, 0, 3)]], r"a: rows \[3, 4\) come from no rank"),
        ([[rows("a", (4,), 0, 1, 3)]], r"a: rows \[0, 1\) come from no rank"),
        ([[rows("a", (4, 4), 0, 0, 2)], [rows("a", (4, 4), 1, 2, 2)]], "a: its slices disagree"),
        ([[rows("a", (4,), 0, 0, 2)], [rows("a", (5,), 0, 2, 3)]], "a: its slices disagree"),
        ([[rows("a", (4,), 0, 2, 3)]], r"rows \[2, 5\) do not fit shape \(4,\)"),
        ([[rows("a", (4,), 1, 0, 4)]], "dim 1 does not exist"),
        ([[rows("a", (4,), 0, 0, 0), whole("b", 2)]], r"rows \[0, 0\) do not fit"),
        ([[whole("a", 0)]], "is empty"),
        ([[whole("a", 4, dtype="float31")]], "unknown dtype 'float31'"),
    ],
)
def test_a_plan_that_does_not_cover_each_element_once_is_refused(by_rank, message):
    with pytest.raises(ProtocolError, match=message):
        make_plan(by_rank, bucket_bytes=1024)


@pytest.mark.parametrize(
    ("held", "excluded", "message"),
    [
        ({"a": (4,), "b": (2,), "c": (1,)}, [], "c is in the model folder but no rank sends it"),
        ({"a": (4,)}, [], "b is sent but not in the model folder"),
        ({"a": (4,), "b": (3,)}, [], r"b has shape \(2,\) in the plan and \(3,\) in the model folder"),
        ({"a": (4,), "b": (2,)}, ["b"], "b is both sent and excluded"),
    ],
)
def test_names_must_be_those_of_the_model_folder(held, excluded, message):
    with pytest.raises(ProtocolError, match=message):
        make_plan([[whole("a", 4)], [whole("b", 2)]], bucket_bytes=64, expected_shapes=held, excluded=excluded)


def test_a_stated_exclusion_is_no_fault():
    held = {"a": (4,), "model.layers.9.mtp": (1,)}
    plan = make_plan([[whole("a", 4)]], bucket_bytes=64, expected_shapes=held, excluded=["model.layers.9.mtp"])
    assert plan.expected == {"a": (4,)} and plan.excluded == ("model.layers.9.mtp",)
    assert name_faults(plan.expected, held, plan.excluded) == []


def test_all_faults_are_reported_but_not_a_thousand_lines():
    by_rank = [[whole(f"t{i:03d}", 2) for i in range(100)]] * 2
    with pytest.raises(ProtocolError) as caught:
        make_plan(by_rank, bucket_bytes=64)
    assert "t000" in str(caught.value) and "and 92 more" in str(caught.value)


def test_the_plan_imports_without_torch():
    code = "import sys; import megatron_sao.transport.plan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
