"""The tiny demonstration model: a random Qwen3-MoE folder with a character-level tokenizer, made in a second.

Owns the tokenizer's vocabulary and chat template, and the model's initial weights. Invariants:
- one printable ASCII character or newline = one token; one special token per role marker and one for the end of a turn,
  so `tokens = characters + 2` for each message and no text ever merges with a neighbour;
- the vocabulary has exactly `VOCABULARY_SIZE` entries (reserved ones fill it up), so every id the model can sample
  can be decoded, and every tensor-parallel size up to 128 divides it;
- there is no BOS; `<|end|>` is both the end of a turn and the EOS at which the engine stops;
- the same shape and seed give the same bytes; the folder appears whole or not at all.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_sao.errors import ConfigError

VOCABULARY_SIZE = 128
MAX_POSITIONS = 512
PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class TinyShape:
    """The shape of the demonstration model; the names follow the section [warm_start] of a config."""

    layers: int = 4
    hidden: int = 64
    experts: int = 8
    top_k: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32  # vLLM's CPU attention takes multiples of 32 only
    expert_ffn: int = 32


def vocabulary() -> list[str]:
    """The tokens in id order: pad, end, unknown, the role markers, newline, printable ASCII, reserved ones."""
    tokens = [PAD, END, UNKNOWN, *(f"<|{role}|>" for role in ROLES), "\n", *map(chr, range(32, 127))]
    return tokens + [f"<|reserved_{i}|>" for i in range(VOCABULARY_SIZE - len(tokens))]


def make_tokenizer():
    """The character-level tokenizer with its chat template.

    Returns: transformers.PreTrainedTokenizerFast; a character outside printable ASCII becomes `<|unknown|>`.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = vocabulary()
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN))
    # "[\s\S]" and not ".": a newline is a character too.
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens if len(token) > 1])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _check_shape(shape: TinyShape) -> None:
    sizes = vars(shape).items()
    faults = [f"warm_start.{name} = {value}; use a whole number >= 1" for name, value in sizes if value < 1]
    if not faults:
        if shape.head_dim % 32:
            faults.append(f"warm_start.head_dim = {shape.head_dim}; the CPU engine takes multiples of 32")
        if shape.heads % shape.kv_heads:
            faults.append(f"warm_start.kv_heads = {shape.kv_heads} does not divide warm_start.heads = {shape.heads}")
        if shape.top_k > shape.experts:
            faults.append(f"warm_start.top_k = {shape.top_k} is more than warm_start.experts = {shape.experts}")
    if faults:
        raise ConfigError("\n".join(faults))


def make_tiny_model(folder: Path | str, shape: TinyShape, seed: int) -> Path:
    """Write a random float32 Qwen3-MoE and its tokenizer as a Hugging Face folder.

    Args:
        folder: where it shall stand; must not exist yet (an existing one is never overwritten).
        shape: sizes; every size >= 1, head_dim a multiple of 32, kv_heads divides heads, top_k <= experts.
        seed: of the weights; the global random state is left as it was.
    Returns: `folder` as a Path.
    Raises: ConfigError for an impossible shape or an existing folder, before anything is written.
    Effect: creates `folder` in one rename.
    """
    _check_shape(shape)
    folder = Path(folder)
    if folder.exists():
        raise ConfigError(f"the model folder {folder} exists already; remove it or name another one")
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        moe_intermediate_size=shape.expert_ffn,
        intermediate_size=shape.expert_ffn * shape.top_k,  # of dense layers; there are none
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        initializer_range=0.05,  # Qwen's 0.02 is for hidden sizes of thousands; a width of 64 learns slowly from it
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config).to(torch.float32)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.chmod(0o755)  # mkdtemp makes it private to this user
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
