"""The one exporter and the one loader: a model's weights as HF slices, in both directions.

Saving, pushing and loading go through the same `WeightSlice`s, so they cannot drift apart. No tensor collective is
needed to find out who owns what: shapes are exchanged once, then every rank computes the same plan.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from megatron_sao.convert.family import ModelShape
from megatron_sao.convert.slices import LocalTensor, TensorRanks, WeightSlice, local_slices, slice_view
from megatron_sao.errors import CheckpointError
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.value_head import ValueHead
from megatron_sao.parallel.exchange import gather_objects
from megatron_sao.parallel.init import World

SHARED_PIECE_BYTES = 16 * 2**20  # small enough that what several ranks hold can be shared out evenly
_LAYER = re.compile(r"^((?:decoder|mtp)\.layers\.)(\d+)(\..*)$")


def tensor_ranks(world: World) -> TensorRanks:
    """The part of a rank's place that cuts weights."""
    return TensorRanks(
        tp=world.tp,
        tp_size=world.tp_size,
        ep=world.ep,
        ep_size=world.ep_size,
        etp=world.etp,
        etp_size=world.etp_size,
    )


def model_tensors(chunks: list[MegatronModule]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of the unwrapped chunks, by "chunk:name"."""
    found = {}
    for number, chunk in enumerate(chunks):
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            if torch.is_tensor(tensor) and not name.endswith("_extra_state"):
                found[f"{number}:{name}"] = tensor
    return found


def _awake(tensor: torch.Tensor, key: str) -> torch.Tensor:
    """The tensor, unless its model sleeps (models/offload.py): on a CPU, reading it then would end the process."""
    if tensor.numel() and not tensor.untyped_storage().nbytes() and tensor.device.type != "meta":
        raise RuntimeError(f"{key} was read while its model sleeps: turns.take(model) comes first")
    return tensor


def describe(chunks: list[MegatronModule]) -> list[LocalTensor]:
    """What this rank holds: shapes, and which dim Megatron cuts over the tensor axis. No collective."""
    layers = [{name: module for name, module in chunk.named_modules()} for chunk in chunks]
    found = []
    for key, tensor in model_tensors(chunks).items():
        number, name = key.split(":", 1)
        if layer := _LAYER.match(name):  # local layer number -> global
            module = layers[int(number)][layer[1] + layer[2]]
            name = f"{layer[1]}{module.layer_number - 1}{layer[3]}"
        is_cut = getattr(tensor, "tensor_model_parallel", False)
        split_dim = getattr(tensor, "partition_dim", -1) if is_cut else -1
        found.append(LocalTensor(key, name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), split_dim))
    return found


class Exporter:
    """Which rank gives which slice of a model, and the views to give them from.

    `slices_by_rank` is equal on every rank: each element of each HF tensor appears exactly once over all ranks. A slice
    that several ranks hold (data parallel copies, norms) goes to the holder with the fewest bytes.
    """

    def __init__(self, chunks: list[MegatronModule], shape: ModelShape, world: World):
        """Collective: every rank of the world (exchanges names and shapes, no tensor)."""
        self.shape = shape
        self._tensors = model_tensors(chunks)
        self._rank = world.rank
        described = [t for t in describe(chunks) if not _is_value_head(t, chunks)]
        holders = gather_objects(local_slices(described, shape, tensor_ranks(world)))
        self.slices_by_rank = assign_owners(holders)
        self.has_mtp = any(mtp_part(piece.hf_name, shape) for pieces in self.slices_by_rank for piece in pieces)

    def view(self, piece: WeightSlice) -> torch.Tensor:
        """A view of a slice that this rank owns."""
        return slice_view(piece, {piece.key: _awake(self._tensors[piece.key], piece.key)})


def _is_value_head(tensor: LocalTensor, chunks: list[MegatronModule]) -> bool:
    has_head = isinstance(getattr(chunks[-1], "output_layer", None), ValueHead)
    return has_head and tensor.name == "output_layer.weight"


def assign_owners(holders: list[list[WeightSlice]]) -> list[list[WeightSlice]]:
    """One owner for every slice: pure, from what each rank holds to what each rank gives.

    Slices with one holder first; then shared ones, cut to pieces of at most SHARED_PIECE_BYTES and largest first, to
    the holder with the fewest bytes so far.
    """
    by_range: dict[tuple, list[tuple[int, WeightSlice]]] = {}
    for rank, pieces in enumerate(holders):
        for piece in pieces:
            key = (piece.hf_name, piece.dim, piece.start, piece.length)
            by_range.setdefault(key, []).append((rank, piece))
    for key, candidates in list(by_range.items()):
        cuts = [_small_pieces(piece) for _, piece in candidates]
        if len(candidates) > 1 and len(cuts[0]) > 1:
            del by_range[key]
            for pieces in zip(*cuts, strict=True):
                key = (pieces[0].hf_name, pieces[0].dim, pieces[0].start, pieces[0].length)
                by_range[key] = [(rank, piece) for (rank, _), piece in zip(candidates, pieces)]
    owned: list[list[WeightSlice]] = [[] for _ in holders]
    loads = [0] * len(holders)

    def weight(candidates: list[tuple[int, WeightSlice]]) -> int:
        return _num_bytes(candidates[0][1])

    for key, candidates in sorted(by_range.items(), key=lambda item: (len(item[1]) > 1, -weight(item[1]), item[0])):
        rank, piece = min(candidates, key=lambda candidate: (loads[candidate[0]], candidate[0]))
        owned[rank].append(piece)
        loads[rank] += weight(candidates)
    return owned


def _num_bytes(piece: WeightSlice) -> int:
    return math.prod(piece.shape) * getattr(torch, piece.dtype).itemsize


def _small_pieces(piece: WeightSlice) -> list[WeightSlice]:
    """The slice cut along its own dim, the one along which Megatron and engines cut the tensor."""
    size = _num_bytes(piece)
    if size <= SHARED_PIECE_BYTES:
        return [piece]
    step = max(1, SHARED_PIECE_BYTES * piece.length // size)
    return [
        replace(
            piece,
            start=piece.start + low,
            length=min(step, piece.length - low),
            source_start=piece.source_start + low,
        )
        for low in range(0, piece.length, step)
    ]


VALUE_HEAD = "value_head.weight"  # its name in a HF-style value checkpoint


def load_weights(
    chunks: list[MegatronModule], folder: HFFolder, shape: ModelShape, world: World
) -> list[str]:
    """Fill the chunks from a HF folder, each rank reading only its rows. No collective.

    The value head is the one tensor that may be missing or of another shape (a policy checkpoint has none): it then
    keeps its zero start. Every other missing tensor is an error.

    Returns: names of the tensors that kept their initial values ("output_layer.weight" or nothing).
    Raises: CheckpointError naming tensor, expected and found shape.
    """
    tensors = model_tensors(chunks)
    described = describe(chunks)
    kept = [t.name for t in described if _is_value_head(t, chunks)]
    if not kept:
        check_tied_head(folder, shape)
    body = [t for t in described if not _is_value_head(t, chunks)]
    with torch.no_grad():
        for piece in local_slices(body, shape, tensor_ranks(world)):
            read = folder.read(piece.hf_name, piece.full_shape, piece.dim, piece.start, piece.length)
            slice_view(piece, tensors).copy_(read)
        if shape.is_tied:
            _copy_tied_head(described, tensors, folder, shape, world)
        if kept and folder.has(VALUE_HEAD):
            head = next(tensors[t.key] for t in described if t.name == "output_layer.weight")
            if folder.shape(VALUE_HEAD) == tuple(head.shape):
                head.copy_(folder.read(VALUE_HEAD, tuple(head.shape), 0, 0, head.shape[0]))
                kept = []
    return kept


def _copy_tied_head(
    described: list[LocalTensor], tensors: Mapping[str, Any], folder: HFFolder, shape: ModelShape, world: World
) -> None:
    """A tied model's last stage has an embedding of its own to fill when it is not also the first stage."""
    for tensor in described:
        if tensor.name == "output_layer.weight" and tensor.shape[1:] == (shape.hidden,) and tensor.split_dim == 0:
            start = world.tp * tensor.shape[0]
            length = min(tensor.shape[0], shape.vocab - start)
            if length > 0:
                name = "model.embed_tokens.weight"
                rows = folder.read(name, (shape.vocab, shape.hidden), 0, start, length)
                tensors[tensor.key].detach()[:length].copy_(rows)


def policy_shapes(folder: HFFolder, shape: ModelShape, *, with_mtp: bool = False) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor that a policy of this folder trains, exports and pushes.

    Args:
        with_mtp: whether the policy has the MTP layers (`Exporter.has_mtp`).
    """
    left_out = set(left_out_names(folder, shape, with_mtp=with_mtp))
    return {name: folder.shape(name) for name in folder.names() if name not in left_out}


TIED_COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


def left_out_names(folder: HFFolder, shape: ModelShape, *, with_mtp: bool = False) -> list[str]:
    """HF names of what a folder holds that is no part of the policy.

    That is: a value head; the second copy of a tied output layer; what stands in MTP layers that are not built; the
    copies of embedding and output layer in an MTP layer, which computes with the decoder's own; an indexer in a layer
    that shares another one's choice (released folders hold them for every layer).
    """

    def is_left_out(name: str) -> bool:
        if name == VALUE_HEAD or (shape.is_tied and name == "lm_head.weight"):
            return True
        if rest := mtp_part(name, shape):
            return not with_mtp or rest in TIED_COPIES
        layer, rest = _in_layer(name)
        return rest.startswith("self_attn.indexer.") and shape.indexer is not None and not shape.has_indexer(layer)

    return [name for name in folder.names() if is_left_out(name)]


def mtp_part(name: str, shape: ModelShape) -> str:
    """The name within its layer of a HF tensor of an MTP layer; "" for every other tensor."""
    layer, rest = _in_layer(name)
    return rest if shape.num_layers <= layer < shape.num_layers + shape.num_mtp_layers else ""


def original_of(name: str, shape: ModelShape) -> str:
    """What a tensor of an MTP layer, or a tied output layer, is a copy of where it is one; "" for every other one."""
    if name == "lm_head.weight":
        return "model.embed_tokens.weight" if shape.is_tied else ""
    original = TIED_COPIES.get(mtp_part(name, shape), "")
    return "model.embed_tokens.weight" if original == "lm_head.weight" and shape.is_tied else original


def is_copy(folder: HFFolder, shape: ModelShape, name: str) -> bool:
    """Whether a tensor of the folder has number format, shape and bits of its `original_of` there."""
    original = original_of(name, shape)
    if not original or (folder.dtype(name), folder.shape(name)) != (folder.dtype(original), folder.shape(original)):
        return False
    # Numbers will not do: 0 equals -0, and NaN not itself.
    return torch.equal(*(folder.read_whole(one).flatten().view(torch.uint8) for one in (name, original)))


def check_tied_head(folder: HFFolder, shape: ModelShape) -> None:
    """A tied model's folder has no output layer, or the embedding once more. Raises: CheckpointError."""
    if shape.is_tied and folder.has("lm_head.weight") and not is_copy(folder, shape, "lm_head.weight"):
        raise CheckpointError(
            f"{folder.path} holds another lm_head.weight than model.embed_tokens.weight, but its config.json says"
            " tie_word_embeddings = true: transformers computes with both then, Megatron and vLLM with the embedding"
            " alone. Set it to false, or remove lm_head.weight"
        )


def _in_layer(name: str) -> tuple[int, str]:
    """Layer number and the rest of a HF name; (-1, "") outside layers."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    return (int(found[1]), found[2]) if found else (-1, "")


def check_names(
    slices_by_rank: list[list[WeightSlice]], folder: HFFolder, shape: ModelShape, *, with_mtp: bool = False
) -> None:
    """Exported names = names in the HF folder, or a refusal that lists the difference.

    Raises: CheckpointError.
    """
    exported = {piece.hf_name for pieces in slices_by_rank for piece in pieces}
    expected = set(policy_shapes(folder, shape, with_mtp=with_mtp))
    if exported != expected:
        missing, extra = sorted(expected - exported)[:5], sorted(exported - expected)[:5]
        raise CheckpointError(
            f"the model's tensors do not match {folder.path}: not exported {missing}, not in the folder {extra}"
        )


def weight_hashes(chunks: list[MegatronModule], keys: set[str]) -> dict[str, str]:
    """SHA-256 of the bytes of some local tensors, by "chunk:name": proof that frozen weights stayed bit-identical."""
    hashes = {}
    for key, tensor in model_tensors(chunks).items():
        if key in keys:
            # A copy: numpy would forbid the tensor itself to leave its memory.
            copy = _awake(tensor, key).detach().to("cpu", copy=True)
            raw = copy.contiguous().view(torch.uint8).numpy().tobytes()
            hashes[key] = hashlib.sha256(raw).hexdigest()
    return hashes
