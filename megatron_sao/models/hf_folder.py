"""A HF model folder on disk: opened whole or not at all, read slice by slice."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_sao.errors import CheckpointError

INDEX = "model.safetensors.index.json"


class HFFolder:
    """Config and safetensors of a model folder.

    Opening checks that every shard named in the index is present and holds the tensors that the index says, before
    anything is built. Without an index, the one file `model.safetensors` counts; other files are ignored.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"model folder {self.path} does not exist; set model.path to a HF model folder")
        self.config: dict[str, Any] = self._json("config.json")
        self._file_of = self._open()

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

    def _open(self) -> dict[str, Any]:
        index = self._index()
        shards = sorted(set(index.values())) if index else ["model.safetensors"]
        absent = [s for s in shards if not (self.path / s).exists()]
        if absent:
            raise CheckpointError(f"model folder {self.path} lacks {', '.join(absent)}: incomplete download or copy?")
        opened, held = {}, {}
        for shard in shards:
            try:
                opened[shard] = safe_open(str(self.path / shard), framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.path / shard} cannot be read (truncated?): {error}") from None
            held[shard] = set(opened[shard].keys())
        if index is None:
            return {name: opened[shard] for shard in shards for name in sorted(held[shard])}
        for name, shard in index.items():
            if name not in held[shard]:
                raise CheckpointError(f"{INDEX} says {name} is in {shard}, but that file does not hold it")
        return {name: opened[shard] for name, shard in index.items()}

    def names(self) -> list[str]:
        """HF names of all tensors."""
        return list(self._file_of)

    def has(self, name: str) -> bool:
        """Whether the folder holds this tensor."""
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that the folder holds."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str, full_shape: tuple[int, ...], dim: int, start: int, length: int) -> torch.Tensor:
        """[start, start + length) along `dim` of a tensor of the expected full shape; only those bytes are read.

        Raises: CheckpointError when the tensor is missing or has another shape.
        """
        if name not in self._file_of:
            raise CheckpointError(f"{self.path} lacks the tensor {name} of shape {list(full_shape)}")
        found = self.shape(name)
        if found != tuple(full_shape):
            raise CheckpointError(f"{self.path}: {name} has shape {list(found)}, expected {list(full_shape)}")
        index = (slice(None),) * dim + (slice(start, start + length),)
        return self._file_of[name].get_slice(name)[index]

    def read_whole(self, name: str) -> torch.Tensor:
        """A tensor that the folder holds, as it stands there."""
        return self._file_of[name].get_tensor(name)
