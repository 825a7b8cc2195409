"""A HF model folder on disk: opened whole or not at all, read slice by slice.

Where a folder holds the experts of a layer as one tensor, they are shown one by one (convert/experts.py).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_sao.convert.experts import Place, one_by_one
from megatron_sao.errors import CheckpointError

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder. Raises: CheckpointError."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"model folder {path.parent} has no {path.name}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


class HFFolder:
    """Config and safetensors of a model folder.

    Opening checks that every shard named in the index is present and holds the tensors that the index says and no
    others, before anything is built. Without an index, the one file `model.safetensors` counts; other files are
    ignored. A file is open, and its bytes count as this process's memory, only while a tensor is read.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            what = "is no folder" if self.path.exists() else "does not exist"
            raise CheckpointError(f"model folder {self.path} {what}; name (model.path) a folder in HF format")
        self.config: dict[str, Any] = read_object(self.path / "config.json")
        self._stored = self._open()  # by its name in the file
        try:
            self._places: dict[str, Place] = one_by_one({name: one.shape for name, one in self._stored.items()})
        except CheckpointError as error:
            raise CheckpointError(f"the model folder {self.path}: {error}") from None

    def _index(self) -> dict[str, str] | None:
        """Tensor name -> file name; None where the folder has no index."""
        if not (self.path / INDEX).exists():
            return None
        index = read_object(self.path / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
            raise CheckpointError(f"{self.path / INDEX} has no weight_map from tensor names to file names")
        return index

    def _open(self) -> dict[str, _Stored]:
        index = self._index()
        shards = sorted(set(index.values())) if index else ["model.safetensors"]
        absent = [s for s in shards if not (self.path / s).exists()]
        if absent:
            raise CheckpointError(f"model folder {self.path} lacks {', '.join(absent)}: incomplete download or copy?")
        held = {shard: self._held(shard) for shard in shards}
        if index is None:
            return {name: held[shard][name] for shard in shards for name in sorted(held[shard])}
        for name, shard in index.items():
            if name not in held[shard]:
                raise CheckpointError(f"{INDEX} says {name} is in {shard}, but that file does not hold it")
        for name, shard in ((name, shard) for shard in shards for name in held[shard]):
            if index.get(name) != shard:  # other programs would load it
                said = f"puts it into {index[name]}" if name in index else "does not name it"
                raise CheckpointError(f"{self.path / shard} holds {name}, but {INDEX} {said}; do they belong to one"
                                      " model? Write the index anew, or the file without that tensor")
        return {name: held[shard][name] for name, shard in index.items()}

    def _held(self, shard: str) -> dict[str, _Stored]:
        """What a shard holds by its header; a file shorter than its header says is refused."""
        found = {}
        try:
            with safe_open(str(self.path / shard), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  it is no dict
                    part = file.get_slice(name)
                    found[name] = _Stored(shard, tuple(part.get_shape()), DTYPES[part.get_dtype()])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / shard} cannot be read (truncated?): {error}") from None
        except KeyError as error:
            where = f"{name} in {self.path / shard}"
            raise CheckpointError(f"{where} has the number format {error}, which is not known here") from None
        return found

    def names(self) -> list[str]:
        """HF names of all tensors."""
        return list(self._places)

    def has(self, name: str) -> bool:
        """Whether the folder holds this tensor."""
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that the folder holds."""
        return self._places[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Number format of a tensor that the folder holds."""
        return self._stored[self._places[name].name].dtype

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(one.dtype.itemsize * math.prod(one.shape) for one in self._stored.values())

    def read(self, name: str, full_shape: tuple[int, ...], dim: int, start: int, length: int) -> torch.Tensor:
        """[start, start + length) along `dim` of a tensor of the expected full shape; only those bytes are read.

        Raises: CheckpointError when the tensor is missing or has another shape.
        """
        if name not in self._places:
            raise CheckpointError(f"{self.path} lacks the tensor {name} of shape {list(full_shape)}")
        place = self._places[name]
        if place.shape != tuple(full_shape):
            raise CheckpointError(
                f"{self.path}: {name} has shape {list(place.shape)}, expected {list(full_shape)}"
            )
        index = [slice(None)] * len(full_shape)
        index[dim] = slice(start, start + length)
        if place.expert >= 0:
            low, high, _ = index[0].indices(full_shape[0])
            rows = slice(place.first_row + low, place.first_row + high)
            index = [slice(place.expert, place.expert + 1), rows, *index[1:]]
        with safe_open(str(self.path / self._stored[place.name].file), framework="pt") as file:
            read = file.get_slice(place.name)[tuple(index)]
        return read[0] if place.expert >= 0 else read

    def read_whole(self, name: str) -> torch.Tensor:
        """A tensor that the folder holds, as it stands there."""
        shape = self.shape(name)
        if shape:
            return self.read(name, shape, 0, 0, shape[0])
        with safe_open(str(self.path / self._stored[name].file), framework="pt") as file:
            return file.get_tensor(name)
