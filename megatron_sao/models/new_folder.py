"""A folder that appears under its name whole or not at all: whoever is killed while writing leaves no impostor."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_sao.errors import CheckpointError


@contextmanager
def new_folder(destination: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """An empty folder to write into, which becomes `destination` by one rename when the block ends well.

    Until then it stands beside it as DESTINATION.partial-XXX; an error removes it, a killed process leaves it.

    Args:
        replace: an older `destination` goes aside just before the rename and is then removed; otherwise it is refused
            before anything is written.
    Raises: CheckpointError when `destination` exists and may not be replaced, or cannot be written.
    """
    destination = Path(destination)
    if not replace:
        refuse_existing(destination)
    partial = _folder_in(destination.parent, destination.name + ".partial-")
    partial.chmod(0o755)  # as mkdir would have made it
    try:
        yield partial
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{destination} was not completed, nothing is left of it: {error}") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    old = partial.with_name(partial.name.replace(".partial-", ".old-"))
    if replace and destination.exists():
        destination.rename(old)
    partial.rename(destination)  # refuses to take the place of a folder that came into being meanwhile
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """An empty folder in `parent`, which is made if need be; removed when the block ends, however it does."""
    folder = _folder_in(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def refuse_existing(destination: str | Path) -> None:
    """Raises: CheckpointError when there is something at `destination` already."""
    if Path(destination).exists():
        raise CheckpointError(f"{destination} exists already; remove it or name another folder")


def free_bytes(destination: str | Path) -> int:
    """Bytes free on the file system that `destination` lies on, or will lie on."""
    path = Path(destination).absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def check_space(destination: str | Path, num_bytes: int) -> None:
    """Whether so many bytes more can be written there. Raises: CheckpointError with both numbers."""
    free = free_bytes(destination)
    if free < num_bytes:
        raise CheckpointError(
            f"{destination} needs {size_text(num_bytes)}, {size_text(free)} are free there; make room, or name a folder"
            " on another disk"
        )


def size_text(num_bytes: int) -> str:
    """Bytes as a person reads them: 1.82 MB, 5.30 GB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"


def announcement(destination: str | Path, num_tensors: int, num_bytes: int) -> str:
    """What a dry run says of a folder that would be written.

    Raises: CheckpointError when `destination` exists.
    """
    refuse_existing(destination)
    free = free_bytes(destination)
    lack = "" if num_bytes <= free else ": not enough"
    return (
        f"dry run, nothing written. {destination} would hold {num_tensors} HF tensors, {size_text(num_bytes)};"
        f" {size_text(free)} are free there{lack}"
    )


def _folder_in(parent: Path, prefix: str) -> Path:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise CheckpointError(f"cannot write into {parent}: {error}") from error
