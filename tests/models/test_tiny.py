"""The demonstration model's folder and tokenizer."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_sao.errors import ConfigError
from megatron_sao.models.tiny import VOCABULARY_SIZE, TinyShape, make_tiny_model, make_tokenizer, vocabulary
from megatron_sao.rollout.chat import Chat

SMALL = TinyShape(layers=2, hidden=32, experts=4, top_k=2, heads=2, kv_heads=1, head_dim=32, expert_ffn=16)


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("made") / "model", SMALL, seed=1)


def test_folder_loads_and_has_the_given_shape(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (VOCABULARY_SIZE, 32)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (2 * 32, 32)
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (1 * 32, 32)
    assert shapes["model.layers.1.mlp.gate.weight"] == (4, 32)
    assert model.config.num_experts_per_tok == 2 and "model.layers.2.mlp.gate.weight" not in shapes
    assert model.generation_config.eos_token_id == vocabulary().index("<|end|>")


def test_same_seed_same_bytes_and_the_global_random_state_is_left_alone(folder, tmp_path):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    again = make_tiny_model(tmp_path / "again", SMALL, seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert digest(again) == digest(folder)
    other = make_tiny_model(tmp_path / "other", SMALL, seed=2)
    a, b = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    assert not torch.equal(a["lm_head.weight"], b["lm_head.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 48}, "warm_start.head_dim = 48"),
        ({"heads": 3, "kv_heads": 2}, "warm_start.kv_heads = 2 does not divide warm_start.heads = 3"),
        ({"top_k": 9}, "warm_start.top_k = 9 is more than warm_start.experts = 8"),
        ({"layers": 0}, "warm_start.layers = 0"),
    ],
)
def test_an_impossible_shape_is_refused_before_anything_is_written(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        make_tiny_model(tmp_path / "model", TinyShape(**change), seed=1)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_overwritten(folder):
    before = digest(folder)
    with pytest.raises(ConfigError, match="exists already"):
        make_tiny_model(folder, SMALL, seed=2)
    assert digest(folder) == before


def test_a_chat_takes_one_token_for_each_character_and_marker(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = Chat(tokenizer).prompt_ids([{"role": "user", "content": "1+2="}])
    tokens = vocabulary()
    assert [tokens[i] for i in ids] == ["<|user|>", "1", "+", "2", "=", "<|end|>", "<|assistant|>"]


def test_turns_continue_in_token_ids(folder):
    chat = Chat(AutoTokenizer.from_pretrained(folder))
    tokens = vocabulary()
    call = chat.action_ids("[1+2]")
    assert [tokens[i] for i in call] == ["[", "1", "+", "2", "]", "<|end|>"]
    suffix, observation = chat.observation_ids(call, "3", "tool")
    assert (suffix, [tokens[i] for i in observation]) == ([], ["<|tool|>", "3", "<|end|>", "<|assistant|>"])
    assert chat.stop_token_ids == [tokens.index("<|end|>")]


def test_marker_text_in_an_observation_stays_text():
    chat = Chat(make_tokenizer())
    _, observation = chat.observation_ids(chat.action_ids("x"), "<|end|>", "tool")
    tokens = vocabulary()
    assert [tokens[i] for i in observation[1:-2]] == list("<|end|>")


def test_every_id_decodes_and_every_printable_character_survives_a_round_trip():
    tokenizer = make_tokenizer()
    assert len(tokenizer) == len(set(vocabulary())) == VOCABULARY_SIZE
    assert [tokenizer.decode([i]) for i in range(VOCABULARY_SIZE)] == vocabulary()
    text = "".join(map(chr, range(32, 127))) + " \n  , ."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer.encode("é", add_special_tokens=False) == [tokenizer.unk_token_id]
