"""The checkpoints of a run as folders: their names, their manifest, which one is the newest and which may go.

    checkpoints/step-000040/           whole
    checkpoints/step-000060.partial/   being written, or left by a run that was killed
    checkpoints/step-000060.old/       about to be replaced by the .partial of its name, or replaced
    checkpoints/step-000020.gone/      superseded and on its way out; these two may be left by a killed run as well
    checkpoints/step-000040/checkpoint.json

Invariants: a folder gets its name by one rename, after everything in it is on disk and the manifest, which names every
other file with its size and CRC-32, was written last. So whatever carries the name of a step was finished; whether it
still is what was written, `check_sizes` and `check_contents` say. Any program may use this module: it needs no torch.
"""

import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from megatron_sao.errors import CheckpointError

FORMAT = 1  # of the folder; another one is refused
MANIFEST_FILE = "checkpoint.json"
CONFIG_FILE = "config.toml"  # the resolved configuration of the run that wrote it
TRAINER_FILE = "trainer.json"  # what the loop remembers, and the layout
POLICY_FOLDER, VALUE_FOLDER = "policy", "value"  # weights and optimizer, one distributed checkpoint each
RNG_FOLDER = "rng"  # one file a rank
SCHEDULER_FOLDER = "scheduler"

_NAME = re.compile(r"step-(\d{6,})")
_PARTIAL, _OLD, _GONE = ".partial", ".old", ".gone"
_READ_BYTES = 16 * 2**20


@dataclass(frozen=True)
class StoredFile:
    """What a file must be."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int  # the last one that was trained
    policy_version: int
    pass_rate: float | None  # of exactly this policy, on held-out prompts; None = it was not evaluated
    config_hash: str
    seconds: float  # that it took to write
    files: Mapping[str, StoredFile]  # by path in the folder, all but the manifest
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.num_bytes for file in self.files.values())


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: those that any of these rules names."""

    last: int  # so many of the last steps
    every: int  # those whose step is a multiple of it; 0 = none
    best: int  # so many with the highest pass rate; of equal ones the later


class ChecksummedFile:
    """A new file that knows its size and CRC-32 as it is written; leaving the block waits until it is on disk.

    Raises: OSError that names the file, wherever the disk does not take it.
    """

    def __init__(self, path: Path):
        self._path, self._num_bytes, self._crc32 = path, 0, 0

    def __enter__(self) -> Self:
        self._file = self._path.open("wb")
        return self

    def write(self, data: Any) -> int:
        """Append bytes, or anything with a buffer."""
        with memoryview(data) as view:
            try:
                self._file.write(view)
            except OSError as error:
                raise self._named(error) from None
            self._crc32 = zlib.crc32(view, self._crc32)
            self._num_bytes += view.nbytes
            return view.nbytes

    def tell(self) -> int:
        """Bytes written so far."""
        return self._num_bytes

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        self._file.flush()

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            if kind is None:
                raise self._named(error) from None

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self._path))

    @property
    def stored(self) -> StoredFile:
        """What was written."""
        return StoredFile(self._num_bytes, self._crc32)


# ---- names -----------------------------------------------------------------------------------------------------


def folder_name(step: int) -> str:
    """step-000040."""
    return f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """The step that a folder's name says; None for any other name."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def finished(folder: Path) -> list[Path]:
    """The whole checkpoints in `folder`, oldest step first; [] also where there is no such folder."""
    found = [path for path in _entries(folder) if step_of(path) is not None and (path / MANIFEST_FILE).is_file()]
    return sorted(found, key=lambda path: step_of(path) or 0)


def newest(folder: Path) -> Path | None:
    """The whole checkpoint of the last step; None = there is none."""
    return next(reversed(finished(folder)), None)


def remove_leftovers(folder: Path) -> list[Path]:
    """Effect: removes what killed runs left half-written or half-removed, as far as it can be; -> what it was.

    What such a run was about to replace, and had not yet, gets its name back first.
    """
    put_back_replaced(folder)
    left = _leftovers(folder, _PARTIAL, _OLD, _GONE)
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return left


def put_back_replaced(folder: Path) -> list[Path]:
    """Effect: a checkpoint that a run was about to replace when it was killed has its name again; -> which.

    To be called before `newest` is asked where a run shall go on, and only while nobody writes into `folder`.
    """
    found = []
    for old in _leftovers(folder, _OLD):
        final = old.with_suffix("")
        if not final.exists() and _is_whole(old):  # the removal of it begins after the new one has the name
            found.append(old.rename(final))
    if found:
        _sync(folder)
    return found


def _leftovers(folder: Path, *ends: str) -> list[Path]:
    return [path for path in _entries(folder) if path.suffix in ends and step_of(path.with_suffix("")) is not None]


def _is_whole(folder: Path) -> bool:
    try:
        check_sizes(folder, read_manifest(folder))
    except CheckpointError:
        return False
    return True


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into. Effect: removes leftovers."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    partial = folder / (folder_name(step) + _PARTIAL)
    partial.mkdir()
    return partial


def give_name(partial: Path) -> Path:
    """Effect: a folder from `begin`, complete with its manifest, gets its name; an older one of that name goes."""
    _sync_folders(partial)
    final = partial.with_suffix("")
    old = final.rename(final.with_name(final.name + _OLD)) if final.exists() else None
    partial.rename(final)
    _sync(final.parent)
    if old:
        shutil.rmtree(old, ignore_errors=True)
    return final


def remove_superseded(folder: Path, keep: Keep, newest_step: int) -> list[Path]:
    """Effect: removes the checkpoints that no rule keeps; -> which.

    What cannot be removed now (on NFS, a folder with a file that somebody reads) is left to the next save.

    Args:
        newest_step: of the run. Later ones were written before it went back to an earlier checkpoint: they go.
    """
    steps = {step_of(path) or 0: path for path in finished(folder)}
    current = [step for step in steps if step <= newest_step]
    kept = set(current[-keep.last :]) | {step for step in current if keep.every and step % keep.every == 0}
    if keep.best:
        rates = {step: _pass_rate(steps[step]) for step in current}
        rated = [(rate, step) for step, rate in rates.items() if rate is not None]
        kept |= {step for _, step in sorted(rated)[-keep.best :]}
    gone = [path for step, path in steps.items() if step not in kept]
    for path in gone:
        # Under its own name, a half-removed folder would be taken for a whole one; as .old it could be put back.
        shutil.rmtree(path.rename(path.with_name(path.name + _GONE)), ignore_errors=True)
    return gone


def _pass_rate(checkpoint: Path) -> float | None:
    """None also where it cannot be read: a damaged checkpoint is no reason to end a run that can save."""
    try:
        return read_manifest(checkpoint).pass_rate
    except CheckpointError:
        return None


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _sync_folders(top: Path) -> None:
    for folder, _, _ in os.walk(top):
        _sync(Path(folder))


def _sync(path: Path) -> None:
    """Effect: a file's bytes are on disk; a folder's names are."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- the manifest ----------------------------------------------------------------------------------------------


def config_hash(toml: str) -> str:
    """Identifies a resolved configuration. The line of a step in a run's metrics has it too."""
    return hashlib.sha256(toml.encode()).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Effect: writes checkpoint.json; it is on disk when this returns."""
    fields = asdict(manifest) | {"num_bytes": manifest.num_bytes}
    with ChecksummedFile(folder / MANIFEST_FILE) as file:
        file.write((json.dumps(fields, indent=1) + "\n").encode())


def read_manifest(folder: Path) -> Manifest:
    """Raises: CheckpointError when there is none, when it cannot be read, or when its format is another one."""
    path = folder / MANIFEST_FILE
    try:
        fields = json.loads(path.read_bytes())
        fields.pop("num_bytes")
        files = {name: StoredFile(**file) for name, file in fields.pop("files").items()}
        manifest = Manifest(files=files, **fields)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST_FILE}") from None
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from None
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"{folder} has format {manifest.format}, this program reads format {FORMAT}: resume with the version that"
            " wrote it"
        )
    return manifest


def checksum(path: Path) -> StoredFile:
    """Size and CRC-32 of a file as it is now."""
    num_bytes = crc32 = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            num_bytes += len(block)
            crc32 = zlib.crc32(block, crc32)
    return StoredFile(num_bytes, crc32)


def checksums(folder: Path, known: Mapping[str, StoredFile]) -> dict[str, StoredFile]:
    """Every file below `folder` by its path there; those not `known` are read, and are on disk when this returns."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            if name not in known:
                _sync(path)
            found[name] = known.get(name) or checksum(path)
    return found


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Every file is there with its size; reads none of them. Raises: CheckpointError naming those that are not."""
    faults = []
    for name, file in manifest.files.items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{path} is missing (expected {file.num_bytes} bytes)")
        elif (size := path.stat().st_size) != file.num_bytes:
            faults.append(f"{path} has {size} bytes, expected {file.num_bytes}")
    _refuse(folder, faults)


def check_contents(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """The files (all of them, or those of `names`) hold the bytes that were written. Raises: CheckpointError."""
    faults = []
    for name in manifest.files if names is None else names:
        expected, found = manifest.files[name], checksum(folder / name)
        if found != expected:
            faults.append(f"{folder / name} has the CRC-32 {found.crc32:08x}, expected {expected.crc32:08x}: damaged")
    _refuse(folder, faults)


def _refuse(folder: Path, faults: list[str]) -> None:
    if faults:
        more = f", and {len(faults) - 3} more files" if len(faults) > 3 else ""
        raise CheckpointError(
            f"the checkpoint {folder} is not what was written: {'; '.join(faults[:3])}{more}; restore it, or remove the"
            " folder to resume from the one before"
        )
