"""Names and shapes of the tensors in a HF model folder, read from the safetensors headers alone.

Owns: `read_shapes`, `check_model_folder`. The engine process uses it before it starts a server (a truncated file is
named at once, not after half a minute), the vLLM plugin to know which names a push has to deliver. No torch.
"""

import json
import struct
from pathlib import Path
from typing import Any

from megatron_sao.convert.experts import one_by_one
from megatron_sao.errors import CheckpointError

INDEX = "model.safetensors.index.json"


def check_model_folder(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Check that a HF model folder is complete enough for an engine to start from.

    Returns: HF name -> shape of every tensor.
    Raises: CheckpointError naming what is missing, truncated or unreadable.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"the model folder {folder} does not exist; set model.path to a folder in HF format")
    config = _read_json(folder / "config.json")
    if not config.get("architectures"):
        raise CheckpointError(f"{folder / 'config.json'} names no architectures; is it a HF model folder?")
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise CheckpointError(f"the model folder {folder} has no tokenizer (tokenizer.json)")
    return read_shapes(folder)


def read_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor of a model folder, experts one by one: what a push delivers.

    Raises: CheckpointError when a file is missing, truncated or unreadable, or when index and files do not hold the
        same tensors.
    """
    folder = Path(folder)
    stored = _stored_shapes(folder)
    try:
        return {name: place.shape for name, place in one_by_one(stored).items()}
    except CheckpointError as error:
        raise CheckpointError(f"the model folder {folder}: {error}") from None


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor as it stands in the files."""
    index: dict[str, str] | None = None
    if (folder / INDEX).exists():
        index = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
            raise CheckpointError(f"{folder / INDEX} has no weight_map from tensor names to file names")
    files = sorted(set(index.values())) if index is not None else ["model.safetensors"]
    found = {file: _read_header(folder / file) for file in files}
    if index is None:
        return found["model.safetensors"]
    lost = [name for name, file in index.items() if name not in found[file]]
    if lost:
        raise CheckpointError(f"{folder / INDEX} names {lost[0]} (and {len(lost) - 1} more) but its file lacks it")
    stray = [(name, file) for file in files for name in found[file] if index.get(name) != file]
    if stray:  # vLLM would load it
        name, file = stray[0]
        raise CheckpointError(
            f"{folder / file} holds {name} (and {len(stray) - 1} more), which {INDEX} does not place there"
        )
    return {name: found[file][name] for name, file in index.items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; is {path.parent} a model folder in HF format?") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


def _read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes in one safetensors file: 8 bytes length of the header, a JSON header, then the data."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if 8 + length > size:
                raise CheckpointError(f"{path} is truncated: its header alone needs {8 + length} bytes, it has {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; the model folder is incomplete") from None
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}") from error
    if size < end:
        raise CheckpointError(f"{path} is truncated: {size} bytes, its header says {end}")
    return shapes
