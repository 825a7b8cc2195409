"""Writes the safetensors files of a HF model folder tensor by tensor: never more of the model in memory than one.

Names, shapes and number formats are known before the first tensor, so every file's header can be written first and
every tensor straight to its place. Files follow the order in which the tensors are announced.
"""

import json
import math
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch

from megatron_sao.errors import CheckpointError
from megatron_sao.models.hf_folder import DTYPES, INDEX

MAX_FILE_BYTES = 5 * 10**9  # what transformers writes
SIDE_FILES = ("generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
              "chat_template.jinja", "special_tokens_map.json", "vocab.json", "merges.txt",
              "added_tokens.json")  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Announced = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    return dtype.itemsize * math.prod(shape)


def copy_side_files(source: Path, destination: Path) -> None:
    """Copy the tokenizer and generation settings of a model folder, as far as it has them. Effect: writes files."""
    for name in SIDE_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, destination / name)


class HFWriter:
    """The files `model.safetensors`, or numbered ones and an index where they would be larger than `max_file_bytes`.

    Use as a context manager: leaving it without an error checks that every announced tensor was written.
    """

    def __init__(self, folder: Path, tensors: Announced, max_file_bytes: int = MAX_FILE_BYTES):
        """Effect: creates the files at their full sizes, without the tensors."""
        self._folder, self._tensors, self._written = folder, dict(tensors), set[str]()
        self._place: dict[str, tuple[str, int]] = {}  # file, offset of the first byte there
        self._open: tuple[str, IO[bytes]] | None = None  # the file written to last: mostly the next one, too
        files = _cut_into_files(tensors, max_file_bytes)
        names = [
            "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            for number in range(1, len(files) + 1)
        ]
        for file, held in zip(names, files, strict=True):
            self._start(file, held)
        if len(files) > 1:
            total = sum(num_bytes(*announced) for announced in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": {n: place[0] for n, place in self._place.items()}}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _start(self, file: str, names: list[str]) -> None:
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for name in names:
            dtype, shape = self._tensors[name]
            begin, end = end, end + num_bytes(dtype, shape)
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)  # tensors begin at a multiple of 8 bytes
        first = 8 + len(encoded)
        with (self._folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(encoded)) + encoded)
            stream.truncate(first + end)
        for name in names:
            self._place[name] = (file, first + header[name]["data_offsets"][0])

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put a whole tensor to its place, in any order.

        Raises: CheckpointError when it was not announced, or with another shape or number format.
        """
        announced = self._tensors.get(name)
        if announced != (tensor.dtype, tuple(tensor.shape)):
            raise CheckpointError(
                f"{self._folder}: {name} is {tensor.dtype} {list(tensor.shape)}, announced was {announced}"
            )
        file, offset = self._place[name]
        stream = self._stream(file)
        stream.seek(offset)
        flat = tensor.detach().cpu().contiguous().view(-1)
        stream.write(memoryview(flat.view(torch.uint8).numpy()))
        self._written.add(name)

    def _stream(self, file: str) -> IO[bytes]:
        if self._open is None or self._open[0] != file:
            self._close()
            self._open = (file, (self._folder / file).open("r+b"))  # buffered: a raw write stops at 2 GiB
        return self._open[1]

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def __enter__(self) -> "HFWriter":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._close()
        absent = [name for name in self._tensors if name not in self._written]
        if kind is None and absent:
            raise CheckpointError(f"{self._folder}: {len(absent)} tensors were not written, the first are {absent[:5]}")


def _cut_into_files(tensors: Announced, max_file_bytes: int) -> list[list[str]]:
    """Names by file, in order; a file ends before the tensor that would make it too large."""
    files: list[list[str]] = [[]]
    size = 0
    for name, announced in tensors.items():
        if files[-1] and size + num_bytes(*announced) > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += num_bytes(*announced)
    return files
