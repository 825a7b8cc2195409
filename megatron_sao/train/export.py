"""Writes the policy as a HF model folder that transformers and vLLM load."""

import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.train.setup import Trainer

SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
              "special_tokens_map.json", "vocab.json", "merges.txt", "added_tokens.json")  # fmt: skip


def export_policy(trainer: Trainer, destination: str | Path) -> None:
    """Put the policy's weights and the source folder's configuration and tokenizer at `destination`.

    The slices are those that a push sends. Rank 0 collects them tensor by tensor and writes one file; the folder gets
    its name only when it is complete, so that a killed export leaves nothing that looks finished.
    Collective: every rank of the world.
    """
    tensors = _collect(trainer)
    if trainer.world.is_first:
        destination = Path(destination)
        partial = destination.with_name(destination.name + f".partial-{os.getpid()}")
        partial.mkdir(parents=True)
        save_file(tensors, str(partial / "model.safetensors"), metadata={"format": "pt"})
        for name in SIDE_FILES:
            if (trainer.folder.path / name).exists():
                shutil.copy(trainer.folder.path / name, partial / name)
        _check(partial, trainer.folder)
        shutil.rmtree(destination, ignore_errors=True)
        partial.rename(destination)
    dist.barrier()


def _collect(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All HF tensors on rank 0, {} elsewhere: each owner broadcasts its slices in the order of the plan."""
    rank = trainer.world.rank
    device = "cuda" if torch.cuda.is_available() else "cpu"
    whole: dict[str, torch.Tensor] = {}
    for owner, pieces in enumerate(trainer.exporter.slices_by_rank):
        for piece in pieces:
            dtype = getattr(torch, piece.dtype)
            if owner == rank:
                part = trainer.exporter.view(piece).contiguous()
            else:
                part = torch.empty(piece.shape, dtype=dtype, device=device)
            dist.broadcast(part, src=owner)
            if rank == 0:
                target = whole.setdefault(piece.hf_name, torch.empty(piece.full_shape, dtype=dtype))
                target.narrow(piece.dim, piece.start, piece.length).copy_(part)
    return whole


def _check(folder: Path, source: HFFolder) -> None:
    """The written folder opens and names the same tensors as the source. Raises: CheckpointError."""
    written = HFFolder(folder)
    assert json.loads((folder / "config.json").read_text()) == source.config
    missing = set(source.names()) - set(written.names())
    assert not missing or missing == {"lm_head.weight"}, missing
