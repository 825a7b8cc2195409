"""What an engine's worker keeps on its GPU, worked by hand."""

from megatron_sao.config import load_config
from megatron_sao.rollout.engine_memory import worker_memory

QWEN = dict(
    model_type="qwen3_moe", vocab_size=1000, hidden_size=16, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, intermediate_size=48, moe_intermediate_size=8, num_experts=4,
    num_experts_per_tok=2, norm_topk_prob=True, rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act="silu",
    tie_word_embeddings=False,
)  # fmt: skip
# of one layer: q and o, k and v, experts (4 of three matrices), router, norms
Q_O, K_V, EXPERTS, ROUTER, NORMS = 2 * 32 * 16, 2 * 16 * 16, 4 * 3 * 8 * 16, 4 * 16, 2 * 16 + 2 * 8
VOCABULARY = 1000 * 16

GLM5 = dict(
    model_type="glm_moe_dsa", vocab_size=128, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=64, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=32,
    index_n_heads=2, index_head_dim=128, index_topk=4, index_topk_freq=2, index_skip_topk_offset=1,
    intermediate_size=48, first_k_dense_replace=1, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
    moe_intermediate_size=32, norm_topk_prob=True, routed_scaling_factor=1.0, scoring_func="sigmoid",
    topk_method="noaux_tc", n_group=1, topk_group=1, attention_bias=False, hidden_act="silu", rms_norm_eps=1e-5,
    rope_theta=10000.0, rope_interleave=True, num_nextn_predict_layers=0, tie_word_embeddings=False,
)  # fmt: skip


def memory(model, *overrides):
    dtype = ["model.dtype=bfloat16", "engine.dtype=bfloat16", "push.bucket_bytes=1000", "engine.kv_cache_bytes=19200"]
    return worker_memory(load_config(None, [*dtype, "warm_start.enabled=false", "model.path=m", *overrides]), model)


def test_one_worker_holds_the_model_its_cache_and_two_buckets():
    found = memory(QWEN)
    assert found.weights == 2 * (2 * VOCABULARY + 16 + 3 * (Q_O + K_V + EXPERTS + ROUTER + NORMS))
    assert found.token_bytes == 3 * 2 * 2 * 8 * 2  # layers, keys and values, heads, width, bytes
    assert found.cache_tokens == 19200 // 192 == 100
    assert found.module == 2 * 2 * VOCABULARY  # as it arrives, and as it is put together
    assert found.total == found.weights + 19200 + 2000 + found.module


def test_workers_share_matrices_and_heads_and_repeat_the_rest():
    found = memory(QWEN, "engine.tensor_parallel=2")
    # The vocabulary is padded to 1024 rows before it is cut: the first worker holds 512 of each.
    assert found.weights == 2 * (2 * 512 * 16 + 16 + 3 * ((Q_O + K_V + EXPERTS) // 2 + ROUTER + NORMS))
    assert found.token_bytes == 96
    assert memory(QWEN, "engine.tensor_parallel=4").token_bytes == 96  # two workers hold the same head


def test_a_worker_gets_whole_tensors_of_which_it_keeps_its_share_until_the_experts_of_a_layer_are_complete():
    model = QWEN | dict(vocab_size=8)
    assert memory(model).module == 2 * 2 * EXPERTS
    assert memory(model, "engine.tensor_parallel=2").module == 2 * (EXPERTS + EXPERTS // 2)
    # With whole experts on each worker only those arrive.
    assert memory(model, "engine.tensor_parallel=2", "engine.expert_parallel=true").module == 2 * 2 * EXPERTS // 2


def test_fp8_halves_the_matrices_of_the_layers_alone():
    found = memory(QWEN, "engine.quantization=fp8_per_block")
    assert found.weights == 2 * (2 * VOCABULARY + 16 + 3 * (ROUTER + NORMS)) + 3 * (Q_O + K_V + EXPERTS)
    assert found.token_bytes == memory(QWEN).token_bytes


def test_latent_attention_keeps_one_vector_on_every_worker_and_keys_of_the_layers_with_an_indexer():
    for workers in (1, 2):
        found = memory(GLM5, f"engine.tensor_parallel={workers}")
        indexers = 2  # of layers 0 and 2
        assert found.token_bytes == 4 * (64 + 8) * 2 + indexers * (128 + 4)
