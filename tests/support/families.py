"""Tiny random HF folders of each supported family, and what transformers itself computes with them.

Every weight is random and large enough to matter: norms, biases, the router's selection bias. Experts stand one by one
on disk, the MTP layer as layer `num_hidden_layers`, as in the released checkpoints.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 128
_WEIGHTS = "model.safetensors"

_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=96,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    dtype="float32",
)
_SIGMOID_MOE = dict(
    moe_intermediate_size=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
)
# transformers knows one router for these families, vLLM several: released folders say which.
_ROUTER = dict(scoring_func="sigmoid", topk_method="noaux_tc")
_MLA = dict(
    num_key_value_heads=4,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=24,
)
_ROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0))
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=64,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=1.0,
)
_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {**_COMMON, **_ROPE, "num_key_value_heads": 2, "head_dim": 32},
    "qwen3_moe": {
        **_COMMON,
        **_ROPE,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    "glm4_moe": {
        **_COMMON,
        **_SIGMOID_MOE,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "rope_parameters": dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
    },
    # 4 experts per token out of 2 groups: the router of transformers judges a group by its best two.
    "deepseek_v3": {
        **_COMMON, **_SIGMOID_MOE, **_ROUTER, **_MLA, **_ROPE,
        "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    },  # fmt: skip
    # 8 indexer heads: with fewer, scores of exactly 0 tie and the choice among them is nobody's.
    "glm_moe_dsa": {
        **_COMMON, **_SIGMOID_MOE, **_ROUTER, **_MLA, **_ROPE,
        "index_n_heads": 8, "index_head_dim": 16, "index_topk": 8,
    },  # fmt: skip
}
FAMILIES = tuple(_SHAPES)
FAMILIES_WITH_MTP = ("glm4_moe", "deepseek_v3", "glm_moe_dsa")
_PER_LAYER = ("mlp_layer_types", "indexer_types", "layer_types")


def make_family_folder(
    family: str, folder: Path, *, mtp: bool, seed: int, mtp_copies: bool = False, **overrides: Any
) -> Path:
    """Write a random model of `family` with 4 layers (the first dense where the family has such) and hidden size 64.

    Args:
        mtp: add one multi-token-prediction layer, named model.layers.4.*.
        seed: of the weights; the other weights are the same with and without `mtp`.
        mtp_copies: also write the copies of embedding and output layer that released MTP layers carry.
        overrides: fields of the HF config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**_SHAPES[family], **overrides}
    if family in FAMILIES_WITH_MTP:
        fields["num_nextn_predict_layers"] = int(mtp)
    config = AutoConfig.for_model(family, **fields)
    folder = Path(folder)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(_one_more_layer(config) if mtp else config).to(torch.float32)
    model.save_pretrained(folder)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    weights = load_file(folder / _WEIGHTS)
    hidden, number = config.hidden_size, config.num_hidden_layers
    if mtp:
        prefix = f"model.layers.{number}."
        weights[prefix + "eh_proj.weight"] = torch.empty(hidden, 2 * hidden)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            weights[f"{prefix}{norm}.weight"] = torch.empty(hidden)
    generator = torch.Generator().manual_seed(seed)
    main_first = sorted(weights, key=lambda name: (name.startswith(f"model.layers.{number}."), name))
    weights = {name: _random(name, weights[name].shape, generator) for name in main_first}
    if mtp and mtp_copies:
        weights[prefix + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[prefix + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
    return folder


def _one_more_layer(config):
    """The config with the MTP layer as one more layer of the decoder, of the last one's kind."""
    longer = copy.deepcopy(config)
    longer.num_hidden_layers += 1
    for name in _PER_LAYER:
        if (kinds := getattr(longer, name, None)) is not None:
            setattr(longer, name, [*kinds, "full" if name == "indexer_types" else kinds[-1]])
    return longer


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return 0.3 * noise
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.2 * noise
    if name.endswith("bias"):
        return 0.2 * noise
    if "embed_tokens" in name:
        return noise
    if "indexer" in name or name.endswith("gate.weight"):
        return 0.2 * noise
    return 0.08 * noise


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json` of a folder."""
    return json.loads((Path(folder) / "config.json").read_text())


def reference(folder: Path):
    """transformers' own model of a folder, float32, in evaluation mode (there is no dropout)."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def reference_mtp(folder: Path, model) -> torch.nn.Module:
    """transformers' MTP layer of a folder, as its MtpModel builds it; embedding and output layer are `model`'s."""
    from transformers.modeling_layers import MtpLayer

    config = _one_more_layer(model.config)
    decoder_layer = type(model.model.layers[-1])
    layer = MtpLayer(config, decoder_layer, type(model.model.norm), model.config.num_hidden_layers).to(torch.float32)
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    found = {
        name.removeprefix(prefix): tensor
        for name, tensor in load_file(Path(folder) / _WEIGHTS).items()
        if name.startswith(prefix)
    }
    own = {"post_norm.weight": found["shared_head.norm.weight"]}
    own |= {name: found[name] for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight")}
    for name, tensor in layer.state_dict().items():
        if name.startswith("mtp_block."):
            own[name] = _fused(found, name.removeprefix("mtp_block."), tensor.shape[0])
    layer.load_state_dict(own)
    return layer.eval()


def _fused(found: dict[str, torch.Tensor], name: str, num_experts: int) -> torch.Tensor:
    place, _, part = name.rpartition("mlp.experts.")
    if part not in ("gate_up_proj", "down_proj"):
        return found[name]
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    experts = [[found[f"{place}mlp.experts.{e}.{p}.weight"] for p in parts] for e in range(num_experts)]
    return torch.stack([torch.cat(matrices) for matrices in experts])


def reference_logits(model, token_ids: torch.Tensor, mtp: torch.nn.Module | None = None):
    """(main logits [T, V], MTP logits [T - 1, V] or None) of one sequence, with gradient.

    Row j of the MTP logits comes from the final hidden state of token j and the embedding of token j + 1, and is about
    token j + 2. Token j + 1 has rotary position j there, as in Megatron; only differences of positions count.
    """
    hidden = model.model(token_ids[None], use_cache=False).last_hidden_state
    logits = model.lm_head(hidden)[0]
    if mtp is None:
        return logits, None
    embedded, before = model.get_input_embeddings()(token_ids[None, 1:]), hidden[:, :-1]
    positions = torch.arange(embedded.shape[1])[None]
    causal = torch.full((embedded.shape[1],) * 2, torch.finfo(torch.float32).min).triu(1)[None, None]
    inner = mtp.mtp_block(
        mtp.eh_proj(torch.cat([mtp.enorm(embedded), mtp.hnorm(before)], -1)),
        attention_mask=causal,
        position_embeddings=model.model.rotary_emb(embedded, position_ids=positions),
        position_ids=positions,
    )
    inner = inner[0] if isinstance(inner, tuple) else inner  # layers with an indexer hand on their choice too
    return logits, model.lm_head(mtp.post_norm(inner))[0]


def reference_gradients(model, mtp: torch.nn.Module | None = None) -> dict[str, torch.Tensor]:
    """Gradients by the names on disk (experts one by one); zeros where a parameter got none."""
    named = {name: p for name, p in model.named_parameters()}
    if mtp is not None:
        prefix = f"model.layers.{model.config.num_hidden_layers}."
        for name, parameter in mtp.named_parameters():
            name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
            named[prefix + name] = parameter
    found = {}
    for name, parameter in named.items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        place, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            for e, matrix in enumerate(gradient):
                found[f"{place}.{e}.gate_proj.weight"], found[f"{place}.{e}.up_proj.weight"] = matrix.chunk(2)
        elif part == "down_proj":
            found |= {f"{place}.{e}.down_proj.weight": matrix for e, matrix in enumerate(gradient)}
        else:
            found[name] = gradient
    return found
