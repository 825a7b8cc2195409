"""The push plan: every element once, by one rank, layer by layer, in buckets of limited size. No torch."""

import subprocess
import sys

import pytest

from megatron_sao.errors import ProtocolError
from megatron_sao.transport.plan import Bucket, WireItem, decode_plan, encode_plan, layer_key, make_plan, name_faults


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


def test_buckets_keep_the_limit_unless_one_item_exceeds_it():
    items = [whole(f"{layer(0)}.{name}", size) for name, size in (("a", 8), ("b", 8), ("c", 8), ("d", 100))]
    plan = make_plan([items], bucket_bytes=64)
    assert [[item.name[-1] for item in bucket.items] for bucket in plan.buckets] == [["a", "b"], ["c"], ["d"]]
    assert [bucket.num_bytes for bucket in plan.buckets] == [64, 32, 400]
    assert plan.max_bucket_bytes == 400 and plan.num_bytes == 496


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
