"""Writes the policy as a HF model folder that transformers and vLLM load."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_sao.convert.family import MTP_COUNT
from megatron_sao.convert.slices import WeightSlice
from megatron_sao.errors import CheckpointError
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.hf_writer import HFWriter, copy_side_files
from megatron_sao.models.new_folder import new_folder
from megatron_sao.models.weights import VALUE_HEAD, is_copy, left_out_names, mtp_part, original_of, policy_shapes
from megatron_sao.parallel.exchange import ObjectGroup, broadcast_tensor
from megatron_sao.train.setup import Trainer

LONGEST_WRITE_S = 6 * 3600.0  # rank 0 writes while the others wait: far longer than a collective of the model may take


def export_policy(trainer: Trainer, destination: str | Path) -> None:
    """Put the policy's weights and the source folder's configuration and tokenizer at `destination`.

    The slices are those that a push sends. What the source folder holds besides (MTP layers that were not trained,
    indexers that no layer uses) is copied from it, so that the export is as complete as its source. Rank 0 puts one
    tensor together at a time and writes it; the folder gets its name only when it is complete, so that a killed export
    leaves nothing that looks finished.
    Collective: every rank of the world.
    """
    trainer.models.turns.take(trainer.models.policy)
    writing = ObjectGroup(LONGEST_WRITE_S)
    if trainer.world.is_first:
        with new_folder(destination, replace=True) as partial:
            _write(trainer, partial)
            (partial / "config.json").write_text(json.dumps(_config(trainer), indent=2) + "\n")
            copy_side_files(trainer.folder.path, partial)
            _check(partial, trainer)
    else:
        for _ in _tensors(trainer):
            pass
    writing.wait()


def _write(trainer: Trainer, destination: Path) -> None:
    """Rank 0's part: every tensor into the safetensors files of the folder."""
    folder = trainer.folder
    announced = {name: (dtype, shape) for name, (dtype, shape, _) in _by_name(trainer).items()}
    copies, carried = besides_policy(trainer)
    announced |= {name: announced[original] for name, original in copies.items()}
    announced |= {name: (folder.dtype(name), folder.shape(name)) for name in carried}
    with HFWriter(destination, announced) as writer:
        for name, tensor in _tensors(trainer):
            for also in (name, *(copy for copy, original in copies.items() if original == name)):
                writer.write(also, tensor)
        for name in carried:
            writer.write(name, folder.read_whole(name))


def _by_name(trainer: Trainer) -> dict[str, tuple[torch.dtype, tuple[int, ...], list[tuple[int, WeightSlice]]]]:
    """HF name -> (number format, shape, slices with their owners), in the source folder's order; equal on all ranks."""
    slices: dict[str, list[tuple[int, WeightSlice]]] = {}
    for owner, pieces in enumerate(trainer.exporter.slices_by_rank):
        for piece in pieces:
            slices.setdefault(piece.hf_name, []).append((owner, piece))
    found = {}
    for name in trainer.folder.names():
        if name in slices:
            first = slices[name][0][1]
            found[name] = (getattr(torch, first.dtype), first.full_shape, slices[name])
    return found


def _tensors(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Every HF tensor, whole on rank 0 (until the next one is asked for), None elsewhere.

    Collective: every rank of the world exhausts it; owners broadcast their slices.
    """
    rank = trainer.world.rank
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, (dtype, shape, owned) in _by_name(trainer).items():
        whole = torch.empty(shape, dtype=dtype) if rank == 0 else None
        for owner, piece in owned:
            if owner == rank:
                part = trainer.exporter.view(piece).contiguous()
            else:
                part = torch.empty(piece.shape, dtype=dtype, device=device)
            broadcast_tensor(part, owner)
            if whole is not None:
                whole.narrow(piece.dim, piece.start, piece.length).copy_(part)
        yield name, whole


def besides_policy(trainer: Trainer) -> tuple[dict[str, str], list[str]]:
    """What the source folder holds besides the policy: (copies -> what they are copies of, all others).

    An MTP layer computes with the decoder's embedding and output layer. Where it holds copies of them, these follow
    what was trained; where what it holds is something else, that is kept.
    """
    names = _copied_names(trainer)
    copies = {n: original_of(n, trainer.shape) for n in names if is_copy(trainer.folder, trainer.shape, n)}
    return copies, [name for name in names if name not in copies]


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
