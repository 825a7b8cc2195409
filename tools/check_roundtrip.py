"""Does a HF folder come back bit by bit from a conversion to Megatron and back?

    source launch/env.sh
    python tools/check_roundtrip.py HF_DIR [--scratch FOLDER] [--dry-run]

Converts into a scratch folder (which needs twice the model's size on disk and is removed again) and prints

    CHECK roundtrip tensors=135 equal=135 missing=0 added=0 config_equal=True

Exit code 0 only if every tensor came back with its name, shape, number format and bits, and the configuration too.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_sao.cli.options import hush_libraries, run_command
from megatron_sao.errors import ConfigError
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.new_folder import check_space, free_bytes, scratch_folder, size_text
from megatron_sao.observe.progress import BytesProgress


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("hf_dir", metavar="HF_DIR")
    parser.add_argument("--scratch", metavar="FOLDER", help="where the two copies are written; default: beside HF_DIR")
    parser.add_argument("--dry-run", action="store_true", help="read the folder's lists, say what is needed, and exit")
    options = parser.parse_args(argv)
    before = HFFolder(options.hf_dir)
    scratch = Path(options.scratch or Path(options.hf_dir).resolve().parent)
    if not scratch.is_dir():
        raise ConfigError(f"--scratch {scratch} does not exist; name a folder that does")
    if options.dry_run:
        print(
            f"dry run, nothing written. {len(before.names())} tensors of {size_text(before.num_bytes)} would be"
            f" written twice below {scratch}, where {size_text(free_bytes(scratch))} are free"
        )
        return 0
    check_space(scratch, 2 * before.num_bytes)

    import megatron_sao.parallel  # noqa: F401  makes megatron.core importable without CUDA
    from megatron_sao.models.conversion import hf_to_megatron, megatron_to_hf

    with scratch_folder(scratch, "roundtrip-") as folder:
        there, back = folder / "megatron", folder / "hf"
        with BytesProgress("there") as progress:
            hf_to_megatron(before.path, there, report=progress.update)
        with BytesProgress("back") as progress:
            megatron_to_hf(there, back, report=progress.update)
        after = HFFolder(back)
        shared = [name for name in before.names() if after.has(name)]
        num_equal = sum(_is_equal(before, after, name) for name in shared)
        added = sum(not before.has(name) for name in after.names())
        is_config_equal = before.config == after.config
    missing = len(before.names()) - len(shared)
    print(
        f"CHECK roundtrip tensors={len(before.names())} equal={num_equal} missing={missing} added={added}"
        f" config_equal={is_config_equal}"
    )
    return int(not is_config_equal or added > 0 or num_equal < len(before.names()))


def _is_equal(before: HFFolder, after: HFFolder, name: str) -> bool:
    """Number format, shape and bits; NaN equals itself."""
    if before.dtype(name) != after.dtype(name) or before.shape(name) != after.shape(name):
        return False
    raw = [folder.read_whole(name).contiguous().view(-1).view(torch.uint8) for folder in (before, after)]
    return torch.equal(*raw)


if __name__ == "__main__":
    hush_libraries()
    run_command(main)
