"""Which rows a worker of a tensor-parallel engine loads, by name."""

import pytest

from megatron_sao.transport.engine_layout import WHOLE, EngineLayout, parts_of

L = "model.layers.3."


@pytest.mark.parametrize(
    ("name", "shape", "dim", "rows"),
    [
        ("self_attn.q_proj.weight", (8, 4), 0, [(0, 4), (4, 8)]),
        ("self_attn.q_proj.bias", (8,), 0, [(0, 4), (4, 8)]),
        ("self_attn.q_b_proj.weight", (8, 4), 0, [(0, 4), (4, 8)]),
        ("self_attn.kv_b_proj.weight", (8, 4), 0, [(0, 4), (4, 8)]),
        ("self_attn.k_proj.weight", (4, 4), 0, [(0, 2), (2, 4)]),
        ("self_attn.o_proj.weight", (4, 8), 1, [(0, 4), (4, 8)]),
        ("mlp.gate_proj.weight", (6, 4), 0, [(0, 3), (3, 6)]),
        ("mlp.down_proj.weight", (4, 6), 1, [(0, 3), (3, 6)]),
        ("mlp.experts.17.up_proj.weight", (6, 4), 0, [(0, 3), (3, 6)]),
        ("mlp.experts.17.down_proj.weight", (4, 6), 1, [(0, 3), (3, 6)]),
        ("mlp.shared_experts.gate_proj.weight", (6, 4), 0, [(0, 3), (3, 6)]),
    ],
)
def test_tensors_that_workers_share_out(name, shape, dim, rows):
    parts = parts_of(L + name, shape, EngineLayout(2, num_kv_heads=2))
    assert (parts.dim, list(parts.rows)) == (dim, rows)


@pytest.mark.parametrize(
    "name",
    ["input_layernorm.weight", "self_attn.q_norm.weight", "self_attn.q_a_proj.weight", "mlp.gate.weight",
     "self_attn.kv_a_proj_with_mqa.weight", "self_attn.indexer.wq_b.weight", "mlp.gate.e_score_correction_bias",
     "eh_proj.weight", "self_attn.something_new.weight"],
)  # fmt: skip
def test_what_every_worker_loads_or_the_table_does_not_know(name):
    assert parts_of(L + name, (8, 8), EngineLayout(2, num_kv_heads=2)) is None


def test_a_vocabulary_is_cut_after_padding():
    parts = parts_of("lm_head.weight", (130, 8), EngineLayout(2))  # padded to 192
    assert (parts.dim, list(parts.rows)) == (0, [(0, 96), (96, 130)])
    assert list(parts_of("model.embed_tokens.weight", (100, 8), EngineLayout(4)).rows)[-1] == (96, 100)
    assert list(parts_of("model.embed_tokens.weight", (20, 8), EngineLayout(2)).rows) == [(0, 20), (20, 20)]


def test_few_kv_heads_are_held_by_several_workers():
    layout = EngineLayout(4, num_kv_heads=2)
    assert list(parts_of(L + "self_attn.v_proj.weight", (8, 4), layout).rows) == [(0, 4), (0, 4), (4, 8), (4, 8)]


@pytest.mark.parametrize("heads", [0, 3])  # unknown; not divisible by the workers
def test_kv_heads_of_which_nothing_sure_is_known_go_to_all(heads):
    assert parts_of(L + "self_attn.k_proj.weight", (12, 4), EngineLayout(2, num_kv_heads=heads)) is None


def test_owned_experts_go_to_their_worker_and_the_first_ones_own_one_more():
    layout = EngineLayout(2, num_experts=5, expert_parallel=True)
    owners = []
    for expert in range(5):
        parts = parts_of(f"{L}mlp.experts.{expert}.down_proj.weight", (4, 6), layout)
        assert parts.dim == WHOLE
        owners.append([rows for rows in parts.rows].index((0, 1)))
    assert owners == [0, 0, 0, 1, 1]
    assert parts_of(L + "mlp.shared_experts.up_proj.weight", (6, 4), layout).dim == 0
    assert parts_of(L + "self_attn.q_proj.weight", (8, 4), layout).dim == 0


def test_stages_hold_consecutive_layers_and_the_middle_ones_take_what_does_not_divide():
    assert EngineLayout(pipeline_parallel=4, num_layers=78).stage_starts == [0, 19, 39, 59, 78]
    assert EngineLayout(pipeline_parallel=3, num_layers=7).stage_starts == [0, 2, 5, 7]
    assert EngineLayout(pipeline_parallel=2, num_layers=5).stage_starts == [0, 3, 5]


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("model.layers.0.input_layernorm.weight", [0]),
        ("model.layers.4.input_layernorm.weight", [1]),
        ("model.layers.5.input_layernorm.weight", [2]),
        ("model.layers.7.eh_proj.weight", [0, 1, 2]),  # behind the decoder
        ("model.embed_tokens.weight", [0]),
        ("model.norm.weight", [2]),
        ("lm_head.weight", [2]),
        ("something.new", [0, 1, 2]),
    ],
)
def test_who_loads_what_of_three_stages(name, stages):
    layout = EngineLayout(pipeline_parallel=3, num_layers=7)
    assert layout.stages_of(name) == stages
    parts = parts_of(name, (4,), layout)
    assert (parts is None) == (len(stages) == 3)
    if parts:
        assert (parts.dim, parts.rows) == (WHOLE, tuple((0, int(stage in stages)) for stage in range(3)))


def test_stages_of_models_that_have_embedding_or_ends_in_several():
    tied = EngineLayout(pipeline_parallel=3, num_layers=7, is_tied=True)
    assert tied.stages_of("model.embed_tokens.weight") == [0, 2] and tied.stages_of("model.norm.weight") == [2]
    everywhere = EngineLayout(pipeline_parallel=3, num_layers=7, has_ends_everywhere=True)
    assert all(everywhere.stages_of(name) == [0, 1, 2] for name in ("model.embed_tokens.weight", "lm_head.weight"))


def test_kinds_count_replicas_then_stages_then_tensor_ranks():
    layout = EngineLayout(2, pipeline_parallel=2, data_parallel=2, expert_parallel=True, num_experts=8, num_layers=4)
    q = parts_of("model.layers.1.self_attn.q_proj.weight", (8, 4), layout)
    assert (q.dim, q.rows) == (0, ((0, 4), (4, 8), (0, 0), (0, 0)) * 2)
    owners = [
        parts_of(f"model.layers.2.mlp.experts.{expert}.up_proj.weight", (8, 4), layout).rows.index((0, 1))
        for expert in range(8)
    ]
    assert owners == [2, 2, 3, 3, 6, 6, 7, 7]
    assert parts_of("model.layers.2.mlp.shared_experts.up_proj.weight", (8, 4), layout).dim == WHOLE


def test_one_worker_loads_everything():
    assert parts_of(L + "self_attn.q_proj.weight", (8, 4), EngineLayout()) is None
