"""HF folder -> Megatron distributed checkpoint and back, in one process on a CPU, parameter by parameter.

The model is built on the meta device as the only rank of a world, which costs no memory for weights; the checkpoint
does not depend on the layout of who wrote it. One Megatron parameter (a fused QKV, a gate and up projection, an
embedding) and the HF tensors it is made of are in memory at a time, never the model: at most three times the largest
such group, besides the process itself and the lists of names.

Every tensor of a HF folder is converted, or is one of those that `weights.left_out_names` lists and is carried along in
the checkpoint's own `hf` folder, or the conversion is refused. So the way back gives all of them again.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from megatron_sao.config.parallel import Parallel
from megatron_sao.convert.family import MTP_COUNT, ModelShape, read_shape
from megatron_sao.convert.slices import WeightSlice, local_slices, slice_view
from megatron_sao.errors import CheckpointError
from megatron_sao.models.build import Role, build_model
from megatron_sao.models.checkpoint import (
    CONTENT,
    HF_PART,
    MAX_FILE_BYTES,
    VOCAB_SIZE,
    OneByOneWriter,
    StoredWeights,
    built,
    weight_shards,
)
from megatron_sao.models.hf_folder import HFFolder, read_object
from megatron_sao.models.hf_writer import Announced, HFWriter, copy_side_files, num_bytes
from megatron_sao.models.new_folder import check_space, new_folder, refuse_existing
from megatron_sao.models.value_head import ValueHead
from megatron_sao.models.weights import (
    VALUE_HEAD,
    check_tied_head,
    describe,
    is_copy,
    left_out_names,
    mtp_part,
    original_of,
    policy_shapes,
    tensor_ranks,
)
from megatron_sao.parallel.fake_world import fake_world

ALONE = Parallel()
Report = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass
class _Parameter:
    """One Megatron tensor: what it is stored as, and the HF tensors it is made of, each wholly within it."""

    shard: ShardedTensor | ShardedTensorFactory  # its data is on the meta device
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[WeightSlice]  # empty for a value head that is created

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.dtype, self.shape)

    def stored(self, tensor: torch.Tensor) -> list[ShardedTensor]:
        """The stored tensors with `tensor`'s values (views)."""
        if isinstance(self.shard, ShardedTensorFactory):
            return built([replace(self.shard, data=tensor)])
        return [replace(self.shard, data=tensor, dtype=tensor.dtype)]


@contextmanager
def _model(
    role: Role,
    shape: ModelShape,
    hf_config: dict[str, Any],
    content: Mapping[str, Any],
    *,
    with_mtp: bool,
    outputs: int,
) -> Iterator[list[_Parameter]]:
    """The parameters of a whole model; while the block lasts, this process is the one rank of a world."""
    with fake_world(ALONE, rank=0) as world:
        with torch.device("meta"):
            (chunk,) = build_model(role, hf_config, ALONE, torch.bfloat16, outputs, with_mtp=with_mtp)
        shards = weight_shards(chunk, shape, content)
        parameters = []
        for local in describe([chunk]):
            name = local.key.removeprefix("0:")
            if isinstance(chunk.output_layer, ValueHead) and name == "output_layer.weight":
                parts = [WeightSlice(VALUE_HEAD, local.shape, 0, 0, local.shape[0], local.dtype, local.key, 0)]
            else:
                parts = local_slices([local], shape, tensor_ranks(world))
            parameters.append(_Parameter(shards[name], local.shape, getattr(torch, local.dtype), parts))
        del chunk
        yield parameters


# ---- HF -> Megatron --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Converted:
    """What became of a HF folder's tensors."""

    num_tensors: int  # HF tensors that are in the checkpoint now
    num_bytes: int
    carried: list[str]  # kept as they are in the checkpoint's hf folder
    dropped: list[str]  # of a policy's folder: what a value model has not
    has_fresh_head: bool


def hf_to_megatron(
    source: str | Path,
    destination: str | Path,
    role: Role = "policy",
    *,
    num_value_outputs: int = 1,
    report: Report = lambda done, total: None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Converted:
    """Convert a HF folder. Number formats stay as they are, tensor by tensor.

    Args:
        role: "value": the output layer's place is taken by the folder's value head, or by a fresh one (zero) where it
            has none that fits.
        num_value_outputs: of the value head.
    Raises: CheckpointError before anything is built for missing or truncated files; before anything is written for
        tensors that are missing, of another shape or unknown.
    """
    refuse_existing(destination)
    with _way_there(source, role, num_value_outputs) as way, new_folder(destination) as partial:
        check_space(destination, way.num_bytes)
        write_hf_part(way.folder, partial / HF_PART, way.own, max_file_bytes)
        common = {"role": role, "copies": way.copies, VOCAB_SIZE: way.shape.vocab}
        _write_checkpoint(way.folder, partial, way.parameters, common, report, max_file_bytes)
    weight_bytes = sum(p.num_bytes for p in way.parameters)
    return Converted(way.num_converted, weight_bytes, way.carried, way.dropped, way.has_fresh_head)


def check_conversion(source: str | Path, role: Role = "policy", *, num_value_outputs: int = 1) -> tuple[int, int]:
    """What `hf_to_megatron` would write, as (HF tensors, bytes). Raises: as it does, but for the disk."""
    with _way_there(source, role, num_value_outputs) as way:
        return way.num_converted + len(way.carried), way.num_bytes


@dataclass
class _WayThere:
    """Everything that is known before the first tensor is converted."""

    folder: HFFolder
    shape: ModelShape
    parameters: list[_Parameter]
    has_fresh_head: bool
    carried: list[str]  # HF names without a parameter
    copies: dict[str, str]  # those of them that repeat another tensor -> that one
    dropped: list[str]

    @property
    def own(self) -> list[str]:
        """What is carried and no copy."""
        return [name for name in self.carried if name not in self.copies]

    @property
    def num_converted(self) -> int:
        """HF tensors that the parameters are made of."""
        return len({part.hf_name for parameter in self.parameters for part in parameter.parts})

    @property
    def num_bytes(self) -> int:
        """Of everything that is written."""
        of_own = (num_bytes(self.folder.dtype(name), self.folder.shape(name)) for name in self.own)
        return sum(parameter.num_bytes for parameter in self.parameters) + sum(of_own)


@contextmanager
def _way_there(source: str | Path, role: Role, outputs: int) -> Iterator[_WayThere]:
    folder = HFFolder(source)
    shape = read_shape(folder.config)
    in_mtp = [name for name in folder.names() if mtp_part(name, shape)]
    with_mtp = role == "policy" and bool(in_mtp) and shape.num_mtp_layers == 1
    with _model(role, shape, folder.config, CONTENT, with_mtp=with_mtp, outputs=outputs) as parameters:
        has_fresh_head = _take_formats_of(folder, parameters)
        carried, dropped = _without_place(folder, shape, parameters, role, with_mtp=with_mtp)
        copies = _copies(folder, shape, carried)
        yield _WayThere(folder, shape, parameters, has_fresh_head, carried, copies, dropped)


def _take_formats_of(folder: HFFolder, parameters: list[_Parameter]) -> bool:
    """Give every parameter its HF tensors' number format; -> whether the value head is a fresh one.

    Raises: CheckpointError listing what the folder lacks, or holds in another shape, or in mixed formats.
    """
    faults, has_fresh_head = [], False
    for parameter in parameters:
        found = {}
        for part in parameter.parts:
            name = part.hf_name
            if name == VALUE_HEAD and (not folder.has(name) or folder.shape(name) != part.full_shape):
                has_fresh_head, parameter.parts = True, []
            elif not folder.has(name):
                faults.append(f"lacks the tensor {name} of shape {list(part.full_shape)}")
            elif folder.shape(name) != part.full_shape:
                faults.append(f"holds {name} with shape {list(folder.shape(name))}, expected {list(part.full_shape)}")
            else:
                found[name] = folder.dtype(name)
        if len(set(found.values())) > 1:
            faults.append(f"holds {found}, which are one tensor in Megatron and need one number format")
        parameter.dtype = next(iter(found.values()), parameter.dtype)
    if faults:
        raise CheckpointError(f"the model folder {folder.path} " + _some(faults))
    return has_fresh_head


def _without_place(
    folder: HFFolder, shape: ModelShape, parameters: list[_Parameter], role: Role, *, with_mtp: bool
) -> tuple[list[str], list[str]]:
    """HF names that no Megatron parameter takes: (carried along, dropped).

    Raises: CheckpointError listing those that have no business in such a folder.
    """
    taken = {part.hf_name for parameter in parameters for part in parameter.parts}
    known = set(left_out_names(folder, shape, with_mtp=with_mtp))
    dropped = {VALUE_HEAD}
    if role == "value":
        dropped |= {"lm_head.weight", *(name for name in known if mtp_part(name, shape))}
    rest = [name for name in folder.names() if name not in taken]
    unknown = [name for name in rest if name not in known and name not in dropped]
    if unknown:
        raise CheckpointError(f"{folder.path} holds tensors that no model of ours has: {_some(unknown)}")
    return [n for n in rest if n not in dropped], [n for n in rest if n in dropped]


def _copies(folder: HFFolder, shape: ModelShape, names: list[str]) -> dict[str, str]:
    """Those of `names` that repeat a tensor of the policy -> that tensor.

    Raises: CheckpointError for a tied output layer that is no copy.
    """
    if "lm_head.weight" in names:
        check_tied_head(folder, shape)
    return {name: original_of(name, shape) for name in names if is_copy(folder, shape, name)}


def write_hf_part(
    folder: HFFolder, destination: Path, carried: list[str], max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write what a HF folder needs besides a checkpoint's tensors: those of `carried`, configuration, tokenizer."""
    destination.mkdir()
    (destination / "config.json").write_text(json.dumps(folder.config, indent=2) + "\n")
    copy_side_files(folder.path, destination)
    if carried:
        announced = {name: (folder.dtype(name), folder.shape(name)) for name in carried}
        with HFWriter(destination, announced, max_file_bytes) as writer:
            for name in carried:
                writer.write(name, folder.read_whole(name))


class _FilledWhenWritten(MCoreSavePlanner):
    """Plans from tensors on the meta device; a tensor gets its values when it is its turn to be written."""

    def __init__(self, parameters: list[_Parameter], folder: HFFolder, report: Report):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder, self._report = folder, report
        self._owner = {s.key: p for p in parameters for s in p.stored(_meta(p))}
        self._filled: tuple[_Parameter, dict[str, torch.Tensor]] | None = None
        self._done, self._total = 0, sum(p.num_bytes for p in parameters)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        parameter = self._owner[write_item.index.fqn]
        if self._filled is None or self._filled[0] is not parameter:
            self._filled = None  # before the next one takes its memory
            self._filled = parameter, self._fill(parameter)
        tensor = self._filled[1][write_item.index.fqn]
        self._done += tensor.nbytes
        self._report(self._done, self._total)
        return tensor

    def _fill(self, parameter: _Parameter) -> dict[str, torch.Tensor]:
        tensor = torch.zeros(parameter.shape, dtype=parameter.dtype)
        for part in parameter.parts:
            read = self._folder.read(part.hf_name, part.full_shape, part.dim, part.start, part.length)
            slice_view(part, {part.key: tensor}).copy_(read)
        return {shard.key: shard.data for shard in parameter.stored(tensor)}


def _meta(parameter: _Parameter) -> torch.Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")


def _write_checkpoint(
    folder: HFFolder,
    destination: Path,
    parameters: list[_Parameter],
    common: Mapping[str, Any],
    report: Report,
    max_file_bytes: int,
) -> None:
    facts = ShardedObject("common_state", dict(common) | {"content_metadata": dict(CONTENT)}, (1,), (0,))
    shards = {shard.key: [shard] for parameter in parameters for shard in parameter.stored(_meta(parameter))}
    try:
        torch_checkpoint.save(
            mcore_to_pyt_state_dict({facts.unique_key: [facts], **shards}),
            storage_writer=OneByOneWriter(destination, max_file_bytes),
            planner=_FilledWhenWritten(parameters, folder, report),
            no_dist=True,
        )
    except CheckpointException as failed:
        ((error, _),) = failed.failures.values()
        if isinstance(error, CheckpointError):
            raise error from None
        raise CheckpointError(f"{destination} could not be written (is its disk full?): {error}") from error
    save_config(CheckpointingConfig("torch_dist"), str(destination))


# ---- Megatron -> HF --------------------------------------------------------------------------------------------


def megatron_to_hf(
    source: str | Path,
    destination: str | Path,
    *,
    hf_source: str | Path | None = None,
    report: Report = lambda done, total: None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> int:
    """Convert a distributed checkpoint of any layout, a policy's or a value model's; -> number of HF tensors.

    Args:
        hf_source: the HF folder to take configuration, tokenizer and what the checkpoint does not hold (MTP layers that
            were not trained, indexers that no layer uses) from, where the checkpoint has no `hf` folder.
    Raises: CheckpointError before anything is written for files or tensors that are missing or of another shape.
    """
    with _way_back(source, hf_source) as way, new_folder(destination) as partial:
        total = sum(num_bytes(*one) for one in way.announced.values())
        check_space(destination, total)
        done = 0
        with HFWriter(partial, way.announced, max_file_bytes) as writer:
            for parameter in way.parameters:
                tensor = _read(parameter, way.stored)
                for hf_name, whole in _hf_tensors(parameter, tensor):
                    for name in [hf_name, *(copy for copy, of in way.copies.items() if of == hf_name)]:
                        writer.write(name, whole)
                        done += whole.nbytes
                report(done, total)
            for name in way.carried:
                writer.write(name, way.rest.folder.read_whole(name))
        hf_config = way.rest.config
        if not any(mtp_part(name, read_shape(hf_config)) for name in way.announced):
            hf_config = hf_config | {field: 0 for field in MTP_COUNT if hf_config.get(field)}
        (partial / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
        copy_side_files(way.rest.path, partial)
        HFFolder(partial)  # opens
    return len(way.announced)


def announced_tensors(source: str | Path, hf_source: str | Path | None = None) -> Announced:
    """What `megatron_to_hf` would write. Raises: as it does."""
    with _way_back(source, hf_source) as way:
        return way.announced


@dataclass
class _WayBack:
    """Everything that is known before the first tensor is read."""

    stored: StoredWeights
    rest: "_Rest"
    parameters: list[_Parameter]
    copies: dict[str, str]  # HF name -> the one whose values it repeats
    carried: list[str]  # HF names that come from `rest`
    announced: Announced


@contextmanager
def _way_back(source: str | Path, hf_source: str | Path | None) -> Iterator[_WayBack]:
    CachedMetadataFileSystemReader.clear_metadata_cache()  # of a checkpoint that stood there before
    stored = StoredWeights(source)
    rest = _Rest(stored, Path(hf_source) if hf_source else stored.path / HF_PART)
    shape = read_shape(rest.config)
    role = stored.common.get("role", "policy")
    with_mtp = any(name.startswith("mtp.") for name in stored.shapes)
    if with_mtp and shape.num_mtp_layers != 1:
        raise CheckpointError(f"{stored.path} holds an MTP layer, {rest.path / 'config.json'} counts "
                              f"{shape.num_mtp_layers}: the model came from another folder (--source)")
    outputs = stored.shapes.get("output_layer.weight", (1,))[0]
    with _model(role, shape, rest.config, stored.content, with_mtp=with_mtp, outputs=outputs) as parameters:
        stored.check({str(number): parameter.shard for number, parameter in enumerate(parameters)}, shape.vocab)
        _check_all_taken(stored, parameters)
        for parameter in parameters:
            parameter.dtype = stored.dtypes[built([parameter.shard])[0].key]
        converted = {p.hf_name: (owner.dtype, p.full_shape) for owner in parameters for p in owner.parts}
        copies, carried = rest.besides(shape, converted, role)
        if twice := sorted(converted.keys() & {*copies, *carried}):
            raise CheckpointError(f"{rest.path} holds tensors that {stored.path} holds itself: {_some(twice)}")
        announced = (
            converted
            | {name: converted[original] for name, original in copies.items()}
            | {name: (rest.folder.dtype(name), rest.folder.shape(name)) for name in carried}
        )
        try:
            yield _WayBack(stored, rest, parameters, copies, carried, announced)
        finally:
            CachedMetadataFileSystemReader.clear_metadata_cache()


class _Rest:
    """What a HF folder needs besides the checkpoint's tensors, and where it is taken from."""

    def __init__(self, stored: StoredWeights, path: Path):
        if not (path / "config.json").exists():
            raise CheckpointError(
                f"{path} has no config.json; name the HF folder that the checkpoint's model came from (--source)"
            )
        self.path, self._copies = path, stored.common.get("copies")
        self._is_own = path.resolve() == (stored.path / HF_PART).resolve()  # any folder may be called so
        self.config = read_object(path / "config.json")
        has_tensors = any(path.glob("*.safetensors"))
        self.folder = HFFolder(path) if has_tensors else None

    def besides(
        self, shape: ModelShape, converted: Mapping[str, Any], role: Role
    ) -> tuple[dict[str, str], list[str]]:
        """(copies -> what they are copies of, names of tensors carried over as they are)."""
        if self._is_own and self._copies is not None:
            return self._copies, self.folder.names() if self.folder else []
        if self.folder is None:
            return {}, []
        with_mtp = any(mtp_part(name, shape) for name in converted)
        missing = policy_shapes(self.folder, shape, with_mtp=with_mtp).keys() - converted.keys()
        if missing - ({"lm_head.weight"} if role == "value" else set()):
            raise CheckpointError(f"{self.path} holds tensors that the checkpoint lacks: {_some(sorted(missing))}")
        left_out = left_out_names(self.folder, shape, with_mtp=with_mtp)
        names = [name for name in left_out if name != VALUE_HEAD]
        if role == "value":
            names = [name for name in names if name != "lm_head.weight" and not mtp_part(name, shape)]
        copies = _copies(self.folder, shape, names)
        return copies, [name for name in names if name not in copies]


def _check_all_taken(stored: StoredWeights, parameters: list[_Parameter]) -> None:
    taken = {shard.key for shard in built(parameter.shard for parameter in parameters)}
    unknown = sorted(stored.shapes.keys() - taken)
    unknown = [name for name in unknown if not name.startswith("optimizer.")]
    if unknown:
        raise CheckpointError(f"the checkpoint {stored.path} holds tensors without a HF name: {_some(unknown)}")


def _read(parameter: _Parameter, stored: StoredWeights) -> torch.Tensor:
    tensor = torch.empty(parameter.shape, dtype=parameter.dtype)
    shards = {str(number): _unstacked(shard) for number, shard in enumerate(parameter.stored(tensor))}
    TorchDistLoadShardedStrategy(cache_metadata=True).load(shards, stored.path)  # fills `tensor` through its views
    return tensor


def _unstacked(shard: ShardedTensor) -> ShardedTensor:
    """The same part of a stored tensor with its layer and expert axes, of length 1, as axes of its own.

    megatron-core 0.19 reads stacked tensors only where all parts of the rank are asked for at once.
    """
    shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return replace(shard, data=shard.data.view(shape), local_shape=shape, prepend_axis_num=0)


def _hf_tensors(parameter: _Parameter, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The HF tensors that one Megatron tensor holds: views where they stand in one piece there, else put together."""
    by_name: dict[str, list[WeightSlice]] = {}
    for part in parameter.parts:
        by_name.setdefault(part.hf_name, []).append(part)
    for name, parts in by_name.items():
        if parts[0].is_whole:
            yield name, slice_view(parts[0], {parts[0].key: tensor})
            continue
        whole = torch.empty(parts[0].full_shape, dtype=tensor.dtype)
        for part in parts:
            whole.narrow(part.dim, part.start, part.length).copy_(slice_view(part, {part.key: tensor}))
        yield name, whole


def _some(names: list[str]) -> str:
    more = f", and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
