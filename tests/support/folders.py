"""Small HF folders of each supported family, all weights random, norms included (a swapped norm must show)."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
_EXPERT_PARTS = ("gate", "up", "down")


def make_folder(
    folder: Path, *, family: str = "qwen3_moe", tied: bool = False, vocab: int = 128, seed: int = 0
) -> Path:
    """Two layers, hidden 32; dense (`qwen3`) or with 4 experts."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    common = dict(
        vocab_size=vocab,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        rope_theta=10000.0,
        dtype="float32",
    )
    if family == "qwen3_moe":
        config = Qwen3MoeConfig(
            **common, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
        )
    else:
        config = Qwen3Config(**common)
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    randomised = {
        name: 0.1 * torch.randn(tensor.shape, generator=generator) + ("norm" in name)
        for name, tensor in read_weights(folder).items()
    }
    write_weights(folder, randomised)
    return Path(folder)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / WEIGHTS)


def write_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, Path(folder) / WEIGHTS, metadata={"format": "pt"})


def with_fused_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights, the experts of each layer as `gate_up_proj` and `down_proj`."""
    fused = {name: tensor for name, tensor in weights.items() if ".mlp.experts." not in name}
    for place in sorted({name.split(".experts.")[0] + ".experts." for name in weights.keys() - fused.keys()}):
        count = sum(name.startswith(place) for name in weights) // 3
        parts = {part: [weights[f"{place}{e}.{part}_proj.weight"] for e in range(count)] for part in _EXPERT_PARTS}
        pairs = zip(parts["gate"], parts["up"], strict=True)
        fused[f"{place}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        fused[f"{place}down_proj"] = torch.stack(parts["down"])
    return fused


def write_shards(folder: Path, weights: dict[str, torch.Tensor], shards: list[list[str]]) -> list[str]:
    """Replace the one weight file by shards with an index; -> their file names."""
    folder = Path(folder)
    (folder / WEIGHTS).unlink(missing_ok=True)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    index = {}
    for file, held in zip(names, shards, strict=True):
        save_file({name: weights[name] for name in held}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(held, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return names
