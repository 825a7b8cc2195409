"""Small real tokenizers and chat templates of the three kinds met in practice."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_sao.records import Prompt
from megatron_sao.rollout.chat import Chat

SHORT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As Qwen: a line break follows the end-of-turn token, and a tool's output stands inside a user message.
QWEN_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As GLM: no end-of-turn token; what ends a turn is the marker of the next role.
GLM_TEMPLATE = (
    "[gMASK]{% for m in messages %}{% if m.role == 'tool' %}<|observation|>{% else %}<|{{ m.role }}|>{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def character_tokenizer(special: list[str], template: str, eos: str) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, plus special tokens."""
    characters = [chr(i) for i in range(32, 127)] + ["\n"]
    vocab = {token: id for id, token in enumerate(["<pad>", "<unk>", *special, *characters])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<pad>", "<unk>", *special])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token=eos, chat_template=template)


@pytest.fixture
def tokenizer():
    return character_tokenizer(["<user>", "<tool>", "<assistant>", "<end>"], SHORT_TEMPLATE, "<end>")


@pytest.fixture
def chat(tokenizer):
    return Chat(tokenizer)


@pytest.fixture
def qwen_chat():
    return Chat(character_tokenizer(["<|im_start|>", "<|im_end|>", "<|endoftext|>"], QWEN_TEMPLATE, "<|im_end|>"))


@pytest.fixture
def glm_chat():
    special = ["[gMASK]", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"]
    return Chat(character_tokenizer(special, GLM_TEMPLATE, "<|endoftext|>"))


@pytest.fixture
def merging_chat():
    """he=1, llo=2, hello=3: encoding the text of [1, 2] again gives [3]."""
    vocab = {"he": 1, "llo": 2, "hello": 3, "ok": 12, "h": 20, "e": 21, "l": 22, "o": 23, "k": 24, "ll": 25,
             "<user>": 10, "<tool>": 11, "<end>": 13, "<assistant>": 14}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("o", "k")]
    inner = Tokenizer(models.BPE(vocab, merges))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(t, special=True) for t in ("<user>", "<tool>", "<end>", "<assistant>")])
    return Chat(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", chat_template=SHORT_TEMPLATE))


@pytest.fixture
def bos_tokenizer():
    """Words a=7, b=8; puts BOS = 1 in front of plain text, and its template writes the BOS text too."""
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "a": 7, "b": 8}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", unk_token="<unk>",
                                   chat_template="<s>{% for m in messages %}{{ m.content }}{% endfor %}")


@pytest.fixture
def prompt():
    return Prompt(prompt_id="train/e0/17", environment="calculator", domain="agentic",
                  task={"prompt": "12+34=", "answer": "46"})
