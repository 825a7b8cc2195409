"""A push to vLLM of a model whose head is tied to its embedding and whose vocabulary needs padding (130 -> 192 rows).

The engine runs inside a forked process here (vLLM's offline interface): the server of the other tests is not tied.
"""

import base64
import os

import pytest
import torch
from safetensors.torch import load_file

from megatron_sao.transport.group import host_store, weight_group
from megatron_sao.transport.plan import WireItem, encode_plan, make_plan
from megatron_sao.transport.sender import WeightSender
from tests.support.ranks import run_ranks

TIMEOUT_S = 240.0
PROMPTS = [[5, 40 + i, 41, 30] for i in range(4)]
VOCABULARY = 130


def make_tied_model(folder, seed: int):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=256, norm_topk_prob=True, tie_word_embeddings=True, initializer_range=0.1,
        bos_token_id=2, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def push_from_rank_0_to_rank_1(port_file, folders):
    weights = load_file(folders[1] / "model.safetensors")
    plan = make_plan([[WireItem(k, "float32", tuple(v.shape)) for k, v in weights.items()]], bucket_bytes=50_000)
    if os.environ["RANK"] == "0":
        store = host_store("127.0.0.1", timeout_s=TIMEOUT_S)
        port_file.with_suffix(".new").write_text(str(store.port))
        port_file.with_suffix(".new").rename(port_file)
        group = weight_group("127.0.0.1", store.port, 0, 2, timeout_s=TIMEOUT_S, store=store)
        WeightSender(group, plan).send(lambda item: weights[item.name], 1)
        return None
    return engine(port_file, folders[0], plan)


def engine(port_file, folder, plan) -> tuple[list, list]:
    """Token ids and log-probs before and after the push."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCH_COMPILE_DISABLE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from vllm import LLM, SamplingParams

    import megatron_sao.transport.vllm_plugin  # noqa: F401  registers the backend

    llm = LLM(
        str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4,
        distributed_executor_backend="uni", kv_cache_memory_bytes=16 << 20, weight_transfer_config={"backend": "sao"},
    )  # fmt: skip

    def greedy():
        params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        samples = [output.outputs[0] for output in outputs]
        return [(list(s.token_ids), [d[t].logprob for d, t in zip(s.logprobs, s.token_ids)]) for s in samples]

    before = greedy()
    info = {
        "master_address": "127.0.0.1", "master_port": int(port_file.read_text()), "rank_offset": 1, "world_size": 2,
        "plan": base64.b64encode(encode_plan(plan)).decode(), "plan_hash": plan.hash, "timeout_s": TIMEOUT_S,
    }  # fmt: skip
    llm.init_weight_transfer_engine({"init_info": info})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"policy_version": 1, "plan_hash": plan.hash}})
    llm.finish_weight_update("1")
    return before, greedy()


def test_a_tied_head_computes_with_the_pushed_embedding(tmp_path):
    pytest.importorskip("vllm")
    from transformers import AutoModelForCausalLM

    folders = [make_tied_model(tmp_path / "old", 1), make_tied_model(tmp_path / "new", 2)]
    assert "lm_head.weight" not in load_file(folders[1] / "model.safetensors")
    _, (before, after) = run_ranks(2, push_from_rank_0_to_rank_1, tmp_path / "port", folders, timeout_s=TIMEOUT_S)
    assert [ids for ids, _ in before] != [ids for ids, _ in after]
    model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32).eval()
    for prompt, (ids, logp) in zip(PROMPTS, after, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logp), expected, atol=1e-4, rtol=0)
