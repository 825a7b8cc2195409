"""Writes the policy as a HF model folder that transformers and vLLM load."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_sao.convert.family import MTP_COUNT
from megatron_sao.errors import CheckpointError
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.weights import TIED_COPIES, VALUE_HEAD, left_out_names, mtp_part, policy_shapes
from megatron_sao.parallel.exchange import ObjectGroup, broadcast_tensor
from megatron_sao.train.setup import Trainer

SIDE_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
              "special_tokens_map.json", "vocab.json", "merges.txt", "added_tokens.json")  # fmt: skip

LONGEST_WRITE_S = 6 * 3600.0  # rank 0 writes while the others wait: far longer than a collective of the model may take


def export_policy(trainer: Trainer, destination: str | Path) -> None:
    """Put the policy's weights and the source folder's configuration and tokenizer at `destination`.

    The slices are those that a push sends. What the source folder holds besides (MTP layers that were not trained,
    indexers that no layer uses) is copied from it, so that the export is as complete as its source. Rank 0 collects
    tensor by tensor and writes one file; the folder gets its name only when it is complete, so that a killed export
    leaves nothing that looks finished.
    Collective: every rank of the world.
    """
    trainer.models.turns.take(trainer.models.policy)
    writing = ObjectGroup(LONGEST_WRITE_S)
    tensors = _collect(trainer)
    if trainer.world.is_first:
        destination = Path(destination)
        partial = destination.with_name(destination.name + f".partial-{os.getpid()}")
        partial.mkdir(parents=True)
        save_file(tensors | _copied(trainer, tensors), str(partial / "model.safetensors"), metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(_config(trainer), indent=2) + "\n")
        for name in SIDE_FILES:
            if (trainer.folder.path / name).exists():
                shutil.copy(trainer.folder.path / name, partial / name)
        _check(partial, trainer)
        shutil.rmtree(destination, ignore_errors=True)
        partial.rename(destination)
    writing.wait()


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


def _copied(trainer: Trainer, trained: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the source folder holds besides the policy.

    An MTP layer computes with the decoder's embedding and output layer. Where it holds copies of them, these follow
    what was trained; where what it holds is something else, that is kept.
    """
    folder, shape = trainer.folder, trainer.shape
    copied = {}
    for name in _copied_names(trainer):
        copied[name] = folder.read_whole(name)
        original = TIED_COPIES.get(mtp_part(name, shape), "")
        if original == "lm_head.weight" and shape.is_tied:
            original = "model.embed_tokens.weight"
        if original and torch.equal(copied[name], folder.read_whole(original)):
            copied[name] = trained[original].clone()
    return copied


def _copied_names(trainer: Trainer) -> list[str]:
    left_out = left_out_names(trainer.folder, trainer.shape, with_mtp=trainer.exporter.has_mtp)
    return [name for name in left_out if name not in (VALUE_HEAD, "lm_head.weight")]


def _config(trainer: Trainer) -> dict[str, Any]:
    """The source's config.json; it counts no MTP layers where the folder holds none."""
    config = dict(trainer.folder.config)
    if not any(mtp_part(name, trainer.shape) for name in trainer.folder.names()):
        config |= {field: 0 for field in MTP_COUNT if config.get(field)}
    return config


def _check(written: Path, trainer: Trainer) -> None:
    """Raises: CheckpointError unless the written folder opens and holds the tensors of an export, no more, no fewer."""
    expected = policy_shapes(trainer.folder, trainer.shape, with_mtp=trainer.exporter.has_mtp)
    expected |= {name: trainer.folder.shape(name) for name in _copied_names(trainer)}
    folder = HFFolder(written)
    found = {name: folder.shape(name) for name in folder.names()}
    if found != expected:
        differ = sorted(name for name in expected.keys() | found.keys() if found.get(name) != expected.get(name))[:5]
        raise CheckpointError(f"the export {written} differs from {trainer.folder.path} in the tensors {differ}")
