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
    Raises: CheckpointError when `destination` exists and may not be replaced.
    """
    destination = Path(destination)
    if destination.exists() and not replace:
        raise CheckpointError(f"{destination} exists already; remove it or name another folder")
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=destination.name + ".partial-", dir=destination.parent))
    partial.chmod(0o755)  # as mkdir would have made it
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    old = partial.with_name(partial.name.replace(".partial-", ".old-"))
    if replace and destination.exists():
        destination.rename(old)
    partial.rename(destination)  # refuses to take the place of a folder that came into being meanwhile
    shutil.rmtree(old, ignore_errors=True)
