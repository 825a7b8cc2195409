"""Weights as a Megatron distributed checkpoint (torch_dist): saved from one layout of ranks, loaded into any other.

What it holds is what Megatron's `sharded_state_dict` says, one stored tensor for each tensor of a layer, an expert, a
gate or an up projection, so that any part can be found by name. Two things differ from Megatron's own checkpoints:
- extra state of transformer-engine's modules (scales of FP8 training) is left out: it is no weight;
- fused norms have one name, whatever modules the model is made of (convert/names.py).
A folder `hf` inside holds what a HF folder needs besides (configuration, tokenizer); see models/conversion.py.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    maybe_load_config,
    save_config,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, TensorStorageMetadata
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_sao.checkpoints import ChecksummedFile, StoredFile
from megatron_sao.convert.family import ModelShape
from megatron_sao.convert.names import stored_name
from megatron_sao.errors import CheckpointError
from megatron_sao.models.value_head import ValueHead
from megatron_sao.parallel.exchange import ObjectGroup, world_rank

CONTENT = {"singleton_local_shards": True}  # Megatron's word for one stored tensor per layer and expert
HF_PART = "hf"
VOCAB_SIZE = "vocab_size"  # among a checkpoint's common facts: without padding
MAX_FILE_BYTES = 5 * 10**9  # of a checkpoint's files

Shards = dict[str, ShardedTensor | ShardedTensorFactory]


def weight_shards(chunk: MegatronModule, shape: ModelShape, content: Mapping[str, Any] = CONTENT) -> Shards:
    """Which part of which stored tensor each tensor of an unwrapped chunk is, by its name in the chunk's state dict.

    An optimizer's sharded state is made from these too, so that both agree.

    Args:
        content: of the checkpoint: `CONTENT`, or what another program stored in its own.
    """
    # A copy: Megatron adds a process group to it.
    shards = chunk.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group(dict(content)))
    found = {name: s for name, s in shards.items() if isinstance(s, ShardedTensor | ShardedTensorFactory)}
    for shard in found.values():
        shard.key = stored_name(shard.key, shape)
    if isinstance(getattr(chunk, "output_layer", None), ValueHead):
        # megatron-core 0.19 takes the rows of every output layer for a vocabulary, which may be padded.
        found["output_layer.weight"].allow_shape_mismatch = False
    return found


@dataclass(frozen=True)
class Written:
    """What one rank put into a checkpoint."""

    results: list[WriteResult]  # where each of its parts stands
    files: dict[str, StoredFile]  # by name in the folder


class OneByOneWriter(FileSystemWriter):
    """Writes item after item into files of bounded size: one tensor in memory (a copy, if it is on a GPU).

    torch 2.13's own keeps every tensor of a file until the file is complete.
    """

    def __init__(self, path: str | Path, max_file_bytes: int = MAX_FILE_BYTES):
        super().__init__(path)
        self._max_file_bytes = max_file_bytes
        self.files: dict[str, StoredFile] = {}  # those that `write_data` wrote

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        items = deque(plan.items)
        number = 0
        while items:
            file = f"{plan.storage_data.prefix}{number}.distcp"
            with ChecksummedFile(self.path / file) as stream:
                while items and stream.tell() < self._max_file_bytes:
                    item = items.popleft()
                    begin = stream.tell()
                    data = planner.resolve_data(item)
                    if item.type == WriteItemType.BYTE_IO:
                        stream.write(data.getbuffer())
                    else:
                        tensor = data.detach().cpu()
                        # A view of half a parameter would be saved with the whole of it.
                        is_alone = tensor.untyped_storage().nbytes() == tensor.nbytes
                        _save(tensor if is_alone else tensor.clone(), stream)
                    length = stream.tell() - begin
                    results.append(WriteResult(item.index, length, _StorageInfo(file, begin, length)))
            self.files[file] = stream.stored
            number += 1
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _save(tensor: torch.Tensor, stream: ChecksummedFile) -> None:
    try:
        torch.save(tensor, stream)
    except RuntimeError as error:  # torch 2.13 turns a full disk into a complaint about positions
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


class CheckpointWriter:
    """A distributed checkpoint on its way into a folder: planned by all ranks, written by each alone, ended by rank 0.

    megatron-core 0.19's own strategy writes in a process that it spawns for each rank, which outlives a rank that is
    killed, and copies the model there; its collectives have the bound of a training step.
    """

    def __init__(
        self,
        shards: Mapping[str, Any],
        folder: str | Path,
        world: ObjectGroup,
        common: Mapping[str, Any] | None = None,
        content: Mapping[str, Any] = CONTENT,
    ):
        """Collective: every rank of the world.

        Args:
            shards: this rank's parts, by names of any kind; of what several ranks hold, one copy is written. Their
                tensors are read by `write`.
            folder: exists, for every rank.
            common: small facts that `StoredWeights.common` gives back; rank 0's count.
            content: how the shards were named.
        """
        self._folder, is_first = Path(folder), world_rank() == 0
        facts = dict(common or {}) | {"content_metadata": dict(content)}
        flat = {str(number): shard for number, shard in enumerate(built(_leaves(shards)))}
        flat["common"] = ShardedObject("common_state", facts, (1,), (0,), replica_id=world_rank())
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(flat, keep_only_main_replica=True)
        self._writer = OneByOneWriter(self._folder)
        self._planner = MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(mcore_to_pyt_state_dict(by_key), self._writer.storage_meta(), is_first)
        plan = replace(self._planner.create_local_plan(), storage_data=_StoragePrefix(f"__{world_rank()}_"))
        # As no part is planned twice, the plan of the whole world is what all plan together: nothing comes back.
        self._all_plans = world.collect(plan)
        self._plan = self._planner.finish_plan(plan)

    def write(self) -> Written:
        """Write this rank's files. No collective. Raises: OSError when the disk does not take them."""
        results = self._writer.write_data(self._plan, self._planner).value()
        self._planner.state_dict = {}  # whoever waits for the others needs the memory
        return Written(results, self._writer.files)

    def end(self, written: Sequence[Written]) -> None:
        """Rank 0 alone, with what all wrote. Effect: the folder is a checkpoint once its metadata.json is there."""
        _, metadata = self._planner.create_global_plan(self._all_plans)
        self._writer.finish(metadata, [one.results for one in written])
        save_config(CheckpointingConfig("torch_dist"), str(self._folder))


class StoredWeights:
    """What a distributed checkpoint holds, from its metadata alone; every rank may ask for itself.

    Raises: CheckpointError for a folder that is none, or lacks files that its metadata names.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder)
        try:
            if maybe_load_config(str(self.path)) is None:
                raise CheckpointError(f"{self.path} is no distributed checkpoint: it has no metadata.json")
            self.metadata = FileSystemReader(self.path).read_metadata()
            self._check_files()
            self.common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(self.path))
        except (OSError, ValueError, EOFError, RuntimeError, CheckpointingException) as error:
            raise CheckpointError(f"the checkpoint {self.path} cannot be read (incomplete copy?): {error}") from error
        self.content: dict[str, Any] = self.common.get("content_metadata") or {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for name, tensor in self.metadata.state_dict_metadata.items():
            if isinstance(tensor, TensorStorageMetadata):
                self.shapes[name] = tuple(tensor.size)
                self.dtypes[name] = tensor.properties.dtype

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for place in self.metadata.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for file, end in sorted(ends.items()):
            size = (self.path / file).stat().st_size if (self.path / file).exists() else None
            if size is None:
                raise CheckpointError(f"the checkpoint {self.path} lacks {file}: incomplete copy?")
            if size < end:
                raise CheckpointError(f"{self.path / file} is truncated: {size} bytes, its metadata says {end}")

    def check(self, shards: Mapping[str, ShardedTensor | ShardedTensorFactory], vocab: int) -> None:
        """Every tensor is there and has the shape that the model expects; the padding of a vocabulary may differ.

        Args:
            vocab: the model's true vocabulary. A checkpoint that does not say its own (an older one, or another
                program's) must have as many rows.
        Raises: CheckpointError naming tensors, expected and found shapes.
        """
        own = self.common.get(VOCAB_SIZE, vocab)
        if own != vocab:
            raise CheckpointError(
                f"the checkpoint {self.path} is of a model with vocab_size = {own}, config.json of the model folder"
                f" says {vocab}: take the folder that the checkpoint's model came from"
            )
        faults = []
        for shard in built(shards.values()):
            found, expected = self.shapes.get(shard.key), tuple(shard.global_shape)
            if found is None:
                faults.append(f"lacks the tensor {shard.key} of shape {list(expected)}")
            elif found[shard.allow_shape_mismatch :] != expected[shard.allow_shape_mismatch :]:
                faults.append(f"holds {shard.key} with shape {list(found)}, expected {list(expected)}")
            elif shard.allow_shape_mismatch and found[0] < vocab:  # Megatron would make the missing rows zero
                faults.append(f"holds {shard.key} with {found[0]} rows, config.json says vocab_size = {vocab}")
        if faults:
            more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
            raise CheckpointError(f"the checkpoint {self.path} {', '.join(faults[:3])}{more}")


def _leaves(shards: Mapping[str, Any]) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    for value in shards.values():
        yield from _leaves(value) if isinstance(value, Mapping) else [value]


def built(shards: Any) -> list[ShardedTensor]:
    """The stored tensors, those that Megatron cuts a parameter into (gate and up projection) one by one."""
    found: list[ShardedTensor] = []
    for shard in shards:
        found += shard.build() if isinstance(shard, ShardedTensorFactory) else [shard]
    return found


def load_saved_weights(chunks: Sequence[MegatronModule], shape: ModelShape, folder: str | Path) -> list[str]:
    """Fill the chunks from a distributed checkpoint of any layout, each rank reading only its part.

    The value head may be missing or of another shape, as in `models.weights.load_weights`.

    Returns: names of the tensors that kept their initial values ("output_layer.weight" or nothing).
    Raises: CheckpointError naming tensor, expected and found shape. Collective: every rank of the world.
    """
    stored = StoredWeights(folder)
    state, kept = {}, []
    for number, chunk in enumerate(chunks):
        shards = weight_shards(chunk, shape, stored.content)
        head = "output_layer.weight"
        if isinstance(getattr(chunk, "output_layer", None), ValueHead):
            if stored.shapes.get(head) != tuple(shards[head].global_shape):
                del shards[head]
                kept = [head]
        stored.check(shards, shape.vocab)
        state[f"chunk{number}"] = shards
    loaded = dist_checkpointing.load(state, str(folder))
    for number, chunk in enumerate(chunks):
        # What is left out was checked above: the head, and extra state, which is no weight.
        chunk.load_state_dict(loaded[f"chunk{number}"], strict=False)
    return kept
