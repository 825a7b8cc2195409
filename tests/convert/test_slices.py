"""Rows of HF tensors in local Megatron tensors, by hand: query groups, experts, gates, a padded vocabulary."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megatron_sao.convert.family import MLAShape, ModelShape
from megatron_sao.convert.slices import LocalTensor, TensorRanks, local_slices, qkv_rows, slice_view
from megatron_sao.errors import CheckpointError

SHAPE = ModelShape(
    family="qwen3_moe",
    num_layers=4,
    hidden=1,
    num_heads=4,
    num_kv_groups=2,
    head_dim=2,
    num_experts=8,
    vocab=10,
    is_tied=False,
    ffn=1,
    num_dense_layers=0,
)
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
Q, K, V = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")


def ranks(tp=0, tp_size=1, ep=0, ep_size=1, etp=0, etp_size=1):
    return TensorRanks(tp=tp, tp_size=tp_size, ep=ep, ep_size=ep_size, etp=etp, etp_size=etp_size)


def local(name, *shape, split_dim=-1):
    return LocalTensor(key=f"0:{name}", name=name, shape=shape, dtype="float32", split_dim=split_dim)


def from_hf(tensor, hf, where, shape=SHAPE):
    """The local tensor as a rank fills it from the HF tensors; what no slice covers stays -1."""
    values = {tensor.key: torch.full(tensor.shape, -1.0)}
    for piece in local_slices([tensor], shape, where):
        assert piece.full_shape == tuple(hf[piece.hf_name].shape)
        rows = hf[piece.hf_name].narrow(piece.dim, piece.start, piece.length)
        assert piece.shape == tuple(rows.shape)
        slice_view(piece, values).copy_(rows)
    return values[tensor.key]


def to_hf(parts, hf):
    """The HF tensors put together from (local tensor, its values, its ranks); every element exactly once."""
    built = {name: torch.zeros_like(tensor) for name, tensor in hf.items()}
    count = {name: torch.zeros_like(tensor) for name, tensor in hf.items()}
    for tensor, values, where in parts:
        for piece in local_slices([tensor], SHAPE, where):
            built[piece.hf_name].narrow(piece.dim, piece.start, piece.length).copy_(
                slice_view(piece, {tensor.key: values})
            )
            count[piece.hf_name].narrow(piece.dim, piece.start, piece.length).add_(1)
    assert all(bool((c == 1).all()) for c in count.values())
    return built


# ---- query groups ----------------------------------------------------------------------------------------------

FUSED = [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
ROWS = {Q: torch.arange(8.0)[:, None], K: 100 + torch.arange(4.0)[:, None], V: 200 + torch.arange(4.0)[:, None]}


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8, 16])
def test_qkv_rows_interleave_per_group_on_every_tensor_rank(tp_size):
    """4 heads, 2 KV groups, head dim 2; from tp 4 on a group itself is cut."""
    height = 16 // tp_size
    tensor = local(QKV, height, 1, split_dim=0)
    parts = []
    for tp in range(tp_size):
        where = ranks(tp=tp, tp_size=tp_size)
        values = from_hf(tensor, ROWS, where)
        assert values.flatten().tolist() == FUSED[tp * height : (tp + 1) * height]
        parts.append((tensor, values, where))
    back = to_hf(parts, ROWS)
    assert all(torch.equal(back[name], ROWS[name]) for name in ROWS)


def test_qkv_biases_follow_the_same_rule():
    rows = {name.replace("weight", "bias"): tensor.flatten() for name, tensor in ROWS.items()}
    tensor = local(QKV.replace("weight", "bias"), 8, split_dim=0)
    assert from_hf(tensor, rows, ranks(tp=1, tp_size=2)).tolist() == FUSED[8:]


def test_one_kv_group_and_as_many_groups_as_heads():
    multi_query = replace(SHAPE, num_kv_groups=1)
    assert list(qkv_rows(multi_query, 0, 12)) == [(0, 0, 8, 0), (1, 0, 2, 8), (2, 0, 2, 10)]
    multi_head = replace(SHAPE, num_kv_groups=4)
    assert list(qkv_rows(multi_head, 6, 12)) == [(0, 2, 2, 0), (1, 2, 2, 2), (2, 2, 2, 4)]


@pytest.mark.parametrize("height", [15, 7, 24])
def test_rows_that_do_not_add_up_are_refused(height):
    with pytest.raises(CheckpointError, match=rf"linear_qkv.*{height} rows.*expected 16"):
        local_slices([local(QKV, height, 1, split_dim=0)], SHAPE, ranks())


# ---- experts ---------------------------------------------------------------------------------------------------


def test_experts_are_numbered_over_all_ranks():
    """4 layers, pp 2, 8 experts, ep 4: pp rank 1, ep rank 2, local layer 1, local expert 1."""
    tensor = local("decoder.layers.3.mlp.experts.linear_fc1.weight1", 4, 1, split_dim=0)
    names = [piece.hf_name for piece in local_slices([tensor], SHAPE, ranks(ep=2, ep_size=4))]
    assert names == [f"model.layers.3.mlp.experts.5.{part}_proj.weight" for part in ("gate", "up")]


@pytest.mark.parametrize("sequential", [True, False], ids=["sequential", "grouped"])
def test_expert_ranks_together_hold_each_expert_once(sequential):
    def name(layer, fc, expert):
        place = f"local_experts.{expert}.linear_{fc}.weight" if sequential else f"linear_{fc}.weight{expert}"
        return f"decoder.layers.{layer}.mlp.experts.{place}"

    tensors = [local(name(i, fc, e), 4, 1) for i in range(4) for fc in ("fc1", "fc2") for e in range(2)]
    found = [p.hf_name for ep in range(4) for p in local_slices(tensors, SHAPE, ranks(ep=ep, ep_size=4))]
    expected = {
        f"model.layers.{i}.mlp.experts.{e}.{part}_proj.weight"
        for i in range(4)
        for e in range(8)
        for part in ("gate", "up", "down")
    }
    assert len(found) == len(set(found)) == 96 and set(found) == expected


def test_experts_are_cut_over_the_expert_tensor_axis_not_the_tensor_axis():
    name = "decoder.layers.0.mlp.experts.local_experts.1."
    fc1 = local(name + "linear_fc1.weight", 4, 1, split_dim=0)
    fc2 = local(name + "linear_fc2.weight", 1, 2, split_dim=1)
    where = ranks(tp=3, tp_size=4, ep=1, ep_size=2, etp=1, etp_size=2)
    pieces = local_slices([fc1, fc2], SHAPE, where)
    place = "model.layers.0.mlp.experts.5."
    assert [(p.hf_name, p.full_shape, p.dim, p.start, p.length, p.source_start) for p in pieces] == [
        (place + "gate_proj.weight", (4, 1), 0, 2, 2, 0),
        (place + "up_proj.weight", (4, 1), 0, 2, 2, 2),
        (place + "down_proj.weight", (1, 4), 1, 2, 2, 0),
    ]


# ---- gates, rows and columns -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_gate_and_up_stand_one_after_the_other_on_each_tensor_rank(tp_size):
    hf = {
        "model.layers.2.mlp.gate_proj.weight": torch.arange(6.0)[:, None],
        "model.layers.2.mlp.up_proj.weight": 100 + torch.arange(6.0)[:, None],
    }
    half = 6 // tp_size
    tensor = local("decoder.layers.2.mlp.linear_fc1.weight", 2 * half, 1, split_dim=0)
    parts = []
    for tp in range(tp_size):
        where = ranks(tp=tp, tp_size=tp_size)
        values = from_hf(tensor, hf, where)
        mine = [tp * half + i for i in range(half)]
        assert values.flatten().tolist() == mine + [100 + i for i in mine]
        parts.append((tensor, values, where))
    back = to_hf(parts, hf)
    assert all(torch.equal(back[name], hf[name]) for name in hf)


def test_an_odd_number_of_gated_rows_is_refused():
    with pytest.raises(CheckpointError, match=r"mlp.linear_fc1.weight: 5 rows"):
        local_slices([local("decoder.layers.2.mlp.linear_fc1.weight", 5, 1, split_dim=0)], SHAPE, ranks())


def test_output_projections_are_cut_by_columns_and_norms_not_at_all():
    proj = local("decoder.layers.0.self_attention.linear_proj.weight", 3, 2, split_dim=1)
    norm = local("decoder.layers.0.input_layernorm.weight", 3)
    columns, whole = local_slices([proj, norm], SHAPE, ranks(tp=2, tp_size=4))
    assert (columns.full_shape, columns.dim, columns.start, columns.length) == ((3, 8), 1, 4, 2)
    assert not columns.is_whole
    assert (whole.full_shape, whole.start, whole.length, whole.is_whole) == ((3,), 0, 3, True)


def test_an_unknown_tensor_stops_the_whole_list():
    with pytest.raises(CheckpointError, match="qb_beta"):
        local_slices([local("decoder.layers.0.mlp.router.qb_beta", 8)], SHAPE, ranks())


# ---- latent attention, indexer, router bias, MTP ---------------------------------------------------------------

LATENT = replace(SHAPE, family="glm_moe_dsa", mla=MLAShape(q_rank=6, kv_rank=4, nope_dim=2, rope_dim=2, v_dim=2))


@pytest.mark.parametrize(
    "name, hf", [("linear_q_down_proj", "q_a_proj"), ("linear_kv_down_proj", "kv_a_proj_with_mqa")]
)
def test_down_projections_are_cut_or_whole_as_their_own_tag_says(name, hf):
    """Megatron's column-parallel layer cuts them, transformer-engine's and ours keep them whole."""
    name, hf = f"decoder.layers.0.self_attention.{name}.weight", f"model.layers.0.self_attn.{hf}.weight"
    cut, whole = (local_slices([local(name, 3, 1, split_dim=d)], LATENT, ranks(tp=1, tp_size=2)) for d in (0, -1))
    assert [(p.hf_name, p.full_shape, p.start, p.length) for p in cut] == [(hf, (6, 1), 3, 3)]
    assert [(p.hf_name, p.full_shape, p.start, p.length) for p in whole] == [(hf, (3, 1), 0, 3)]


def test_what_every_tensor_rank_holds_whole():
    names = ["self_attention.kv_layernorm.weight", "mlp.router.weight", "mlp.router.expert_bias"]
    names += [f"self_attention.core_attention.indexer.{part}" for part in ("linear_wk.weight", "k_norm.bias")]
    tensors = [local(f"decoder.layers.1.{name}", 8) for name in names]
    pieces = local_slices(tensors, LATENT, ranks(tp=1, tp_size=2, ep=1, ep_size=2))
    assert len(pieces) == len(names) and all(p.is_whole and p.full_shape == (8,) for p in pieces)
    assert pieces[2].hf_name == "model.layers.1.mlp.gate.e_score_correction_bias"


def test_tensors_of_an_mtp_layer_are_cut_as_those_of_the_decoder():
    inner = "mtp.layers.0.mtp_model_layer."
    tensors = [
        local("mtp.layers.0.eh_proj.weight", 2, 4, split_dim=0),
        local("mtp.layers.0.enorm.weight", 4),
        local(inner + "self_attention.linear_proj.weight", 4, 3, split_dim=1),
        local(inner + "mlp.shared_experts.linear_fc1.weight", 4, 1, split_dim=0),
        local(inner + "mlp.experts.local_experts.1.linear_fc2.weight", 4, 3, split_dim=1),
    ]
    where = ranks(tp=1, tp_size=2, ep=1, ep_size=2)
    found = [(p.hf_name, p.full_shape, p.dim, p.start, p.length) for p in local_slices(tensors, SHAPE, where)]
    prefix = "model.layers.4."
    assert found == [
        (prefix + "eh_proj.weight", (4, 4), 0, 2, 2),
        (prefix + "enorm.weight", (4,), 0, 0, 4),
        (prefix + "self_attn.o_proj.weight", (4, 6), 1, 3, 3),
        (prefix + "mlp.shared_experts.gate_proj.weight", (4, 1), 0, 2, 2),
        (prefix + "mlp.shared_experts.up_proj.weight", (4, 1), 0, 2, 2),
        (prefix + "mlp.experts.5.down_proj.weight", (4, 3), 1, 0, 3),
    ]


def test_sizes_of_glm45_attention():
    """96 heads and 8 KV groups of 128 on 8 tensor ranks: each has one group, 12 q heads, a k and a v head."""
    glm45 = replace(SHAPE, num_heads=96, num_kv_groups=8, head_dim=128)
    pieces = local_slices([local(QKV, 14 * 128, 5120, split_dim=0)], glm45, ranks(tp=5, tp_size=8))
    assert [(p.hf_name, p.full_shape, p.start, p.length, p.source_start) for p in pieces] == [
        (Q, (12288, 5120), 5 * 1536, 1536, 0),
        (K, (1024, 5120), 5 * 128, 128, 1536),
        (V, (1024, 5120), 5 * 128, 128, 1664),
    ]


# ---- vocabulary ------------------------------------------------------------------------------------------------

VOCABULARY = ["embedding.word_embeddings.weight", "output_layer.weight"]


@pytest.mark.parametrize("name", VOCABULARY)
@pytest.mark.parametrize("tp_size, height", [(1, 16), (2, 8), (4, 4), (2, 5), (8, 2), (1, 10)])
def test_padded_vocabulary_rows_stay_inside(name, tp_size, height):
    """Vocabulary 10; whatever Megatron pads it to, HF sees rows 0 to 9, and a rank may hold padding only."""
    hf_name = {"embedding.word_embeddings.weight": "model.embed_tokens.weight"}.get(name, "lm_head.weight")
    hf = {hf_name: torch.arange(10.0)[:, None]}
    tensor = local(name, height, 1, split_dim=0)
    parts = []
    for tp in range(tp_size):
        where = ranks(tp=tp, tp_size=tp_size)
        values = from_hf(tensor, hf, where)
        rows = range(tp * height, (tp + 1) * height)
        assert values.flatten().tolist() == [row if row < 10 else -1 for row in rows]
        parts.append((tensor, values, where))
    assert torch.equal(to_hf(parts, hf)[hf_name], hf[hf_name])


@pytest.mark.parametrize("vocab, padded, tp", [(151936, 152576, 8), (129280, 130048, 8), (151552, 151552, 8)])
def test_large_vocabularies_keep_their_true_size(vocab, padded, tp):
    shape = replace(SHAPE, vocab=vocab)
    tensor = local(VOCABULARY[0], padded // tp, 1, split_dim=0)
    pieces = [p for rank in range(tp) for p in local_slices([tensor], shape, ranks(tp=rank, tp_size=tp))]
    assert {p.full_shape for p in pieces} == {(vocab, 1)}
    assert sum(p.length for p in pieces) == vocab and pieces[-1].start + pieces[-1].length == vocab


def test_a_tied_head_is_no_source_of_its_own():
    tensors = [local(name, 10, 1, split_dim=0) for name in VOCABULARY]
    tied = local_slices(tensors, replace(SHAPE, is_tied=True), ranks())
    assert Counter(p.hf_name for p in tied) == {"model.embed_tokens.weight": 1}
    untied = local_slices(tensors, SHAPE, ranks())
    assert Counter(p.hf_name for p in untied) == {"model.embed_tokens.weight": 1, "lm_head.weight": 1}


def test_a_view_is_the_tensor_itself():
    tensor = local(QKV, 8, 1, split_dim=0)
    values = {tensor.key: torch.zeros(8, 1, requires_grad=True)}
    for piece in local_slices([tensor], SHAPE, ranks(tp=0, tp_size=2)):
        slice_view(piece, values).fill_(1.0)
    assert bool((values[tensor.key] == 1).all())
