"""A HF model folder on disk: opened whole or not at all, read slice by slice.

Some folders hold the experts of a layer as one tensor: `mlp.experts.gate_up_proj` [E, 2I, H], in which every expert's
gate rows stand above its up rows, and `mlp.experts.down_proj` [E, H, I]. They are shown as the separate tensors of the
experts that the names of all other folders give, so that nothing else needs to know.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_sao.errors import CheckpointError

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_FUSED_EXPERTS = re.compile(r"(.+\.mlp\.experts\.)(gate_up_proj|down_proj)(?:\.weight)?")


@dataclass(frozen=True)
class _Stored:
    """Where a tensor stands. `expert` is -1 for a tensor of its own, else its matrix in a tensor of all experts."""

    file: str
    name: str  # there
    shape: tuple[int, ...]
    dtype: torch.dtype
    expert: int = -1
    first_row: int = 0  # within the expert's matrix


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
        self.config: dict[str, Any] = self._json("config.json")
        self._stored = self._open()

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads((self.path / name).read_text())
        except FileNotFoundError:
            raise CheckpointError(f"model folder {self.path} has no {name}") from None
        except ValueError as error:
            raise CheckpointError(f"{self.path / name} is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise CheckpointError(f"{self.path / name} holds a JSON {type(content).__name__}, expected an object")
        return content

    def _index(self) -> dict[str, str] | None:
        """Tensor name -> file name; None where the folder has no index."""
        if not (self.path / INDEX).exists():
            return None
        index = self._json(INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
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
            found = {name: held[shard][name] for shard in shards for name in sorted(held[shard])}
        else:
            for name, shard in index.items():
                if name not in held[shard]:
                    raise CheckpointError(f"{INDEX} says {name} is in {shard}, but that file does not hold it")
            for name, shard in ((name, shard) for shard in shards for name in held[shard]):
                if index.get(name) != shard:  # other programs would load it
                    said = f"puts it into {index[name]}" if name in index else "does not name it"
                    raise CheckpointError(f"{self.path / shard} holds {name}, but {INDEX} {said}; do they belong to one"
                                          " model? Write the index anew, or the file without that tensor")
            found = {name: held[shard][name] for name, shard in index.items()}
        return {name: one for stored in found.values() for name, one in _one_by_one(stored)}

    def _held(self, shard: str) -> dict[str, _Stored]:
        """What a shard holds by its header; a file shorter than its header says is refused."""
        found = {}
        try:
            with safe_open(str(self.path / shard), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  it is no dict
                    part = file.get_slice(name)
                    found[name] = _Stored(shard, name, tuple(part.get_shape()), DTYPES[part.get_dtype()])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / shard} cannot be read (truncated?): {error}") from None
        except KeyError as error:
            where = f"{name} in {self.path / shard}"
            raise CheckpointError(f"{where} has the number format {error}, which is not known here") from None
        return found

    def names(self) -> list[str]:
        """HF names of all tensors."""
        return list(self._stored)

    def has(self, name: str) -> bool:
        """Whether the folder holds this tensor."""
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that the folder holds."""
        return self._stored[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Number format of a tensor that the folder holds."""
        return self._stored[name].dtype

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(one.dtype.itemsize * math.prod(one.shape) for one in self._stored.values())

    def read(self, name: str, full_shape: tuple[int, ...], dim: int, start: int, length: int) -> torch.Tensor:
        """[start, start + length) along `dim` of a tensor of the expected full shape; only those bytes are read.

        Raises: CheckpointError when the tensor is missing or has another shape.
        """
        if name not in self._stored:
            raise CheckpointError(f"{self.path} lacks the tensor {name} of shape {list(full_shape)}")
        stored = self._stored[name]
        if stored.shape != tuple(full_shape):
            raise CheckpointError(
                f"{self.path}: {name} has shape {list(stored.shape)}, expected {list(full_shape)}"
            )
        index = [slice(None)] * len(full_shape)
        index[dim] = slice(start, start + length)
        if stored.expert >= 0:
            low, high, _ = index[0].indices(full_shape[0])
            rows = slice(stored.first_row + low, stored.first_row + high)
            index = [slice(stored.expert, stored.expert + 1), rows, *index[1:]]
        with safe_open(str(self.path / stored.file), framework="pt") as file:
            read = file.get_slice(stored.name)[tuple(index)]
        return read[0] if stored.expert >= 0 else read

    def read_whole(self, name: str) -> torch.Tensor:
        """A tensor that the folder holds, as it stands there."""
        shape = self._stored[name].shape
        if shape:
            return self.read(name, shape, 0, 0, shape[0])
        with safe_open(str(self.path / self._stored[name].file), framework="pt") as file:
            return file.get_tensor(name)


def _one_by_one(stored: _Stored) -> list[tuple[str, _Stored]]:
    """A tensor under its name; one of all experts as the tensors of each."""
    fused = _FUSED_EXPERTS.fullmatch(stored.name)
    if not fused or len(stored.shape) != 3:
        return [(stored.name, stored)]
    num_experts, rows, columns = stored.shape
    parts = ["gate_proj", "up_proj"] if fused[2] == "gate_up_proj" else ["down_proj"]
    rows //= len(parts)
    return [
        (
            f"{fused[1]}{expert}.{part}.weight",
            _Stored(stored.file, stored.name, (rows, columns), stored.dtype, expert, number * rows),
        )
        for expert in range(num_experts)
        for number, part in enumerate(parts)
    ]
