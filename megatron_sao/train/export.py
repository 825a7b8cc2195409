"""Writes the policy as a HF model folder that transformers and vLLM load."""

import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_sao.errors import CheckpointError
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.weights import policy_shapes
from megatron_sao.parallel.exchange import broadcast_tensor, wait_for_all
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
        _check(partial, trainer)
        shutil.rmtree(destination, ignore_errors=True)
        partial.rename(destination)
    wait_for_all()


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
            broadcast_tensor(part, owner)
            if rank == 0:
                if piece.hf_name not in whole:
                    whole[piece.hf_name] = torch.empty(piece.full_shape, dtype=dtype)
                whole[piece.hf_name].narrow(piece.dim, piece.start, piece.length).copy_(part)
    return whole


def _check(written: Path, trainer: Trainer) -> None:
    """Raises: CheckpointError unless the written folder opens and holds the policy's tensors, no more and no fewer."""
    expected = policy_shapes(trainer.folder, trainer.shape)
    folder = HFFolder(written)
    found = {name: folder.shape(name) for name in folder.names()}
    if found != expected:
        differ = sorted(name for name in expected.keys() | found.keys() if found.get(name) != expected.get(name))[:5]
        raise CheckpointError(f"the export {written} differs from {trainer.folder.path} in the tensors {differ}")
