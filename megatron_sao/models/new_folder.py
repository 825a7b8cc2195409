"""A folder that appears under its name whole or not at all: whoever is killed while writing leaves no impostor."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_sao.errors import CheckpointError


@contextmanager
def new_folder(destination: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """An empty folder to write into, which becomes `destination` by one rename when the block ends well.

    Until then it stands beside it as DESTINATION.partial-PID; an error removes it, a killed process leaves it.

    Args:
        replace: an older `destination` is removed just before the rename; otherwise it is refused before anything is
            written.
    Raises: CheckpointError when `destination` exists and may not be replaced.
    """
    destination = Path(destination)
    if destination.exists() and not replace:
        raise CheckpointError(f"{destination} exists already; remove it or name another folder")
    partial = destination.with_name(destination.name + f".partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(destination, ignore_errors=True)
    partial.rename(destination)
