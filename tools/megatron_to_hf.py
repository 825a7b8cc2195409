"""A Megatron distributed checkpoint, of a policy or a value model and from any layout, as a HF model folder.

    source launch/env.sh
    python tools/megatron_to_hf.py CKPT OUT_DIR [--source HF_DIR] [--quantize fp8] [--dry-run]

Configuration, tokenizer and tensors that the model does not train are taken from the checkpoint's own `hf` folder, or
from HF_DIR. With --quantize the matrices become FP8 (megatron_sao/models/quantize.py says which, and how); the model in
its own number format lies beside OUT_DIR meanwhile.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from megatron_sao.cli.options import hush_libraries, run_command
from megatron_sao.models.new_folder import announcement, check_space, refuse_existing, scratch_folder
from megatron_sao.observe.progress import BytesProgress


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", metavar="CKPT")
    parser.add_argument("out_dir", metavar="OUT_DIR")
    parser.add_argument("--source", metavar="HF_DIR", help="HF folder that the checkpoint's model came from")
    parser.add_argument("--quantize", choices=("fp8",), help="make the matrices FP8, in blocks of 128 x 128")
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would be written, and exit")
    options = parser.parse_args(argv)

    import megatron_sao.parallel  # noqa: F401  makes megatron.core importable without CUDA
    from megatron_sao.models.conversion import announced_tensors, megatron_to_hf
    from megatron_sao.models.hf_writer import num_bytes
    from megatron_sao.models.quantize import check_modelopt, quantize_folder

    def convert(destination: Path) -> int:
        with BytesProgress("convert") as progress:
            return megatron_to_hf(options.checkpoint, destination, hf_source=options.source, report=progress.update)

    out_dir = Path(options.out_dir)
    if options.quantize:
        check_modelopt()  # what is missing is said before hours of conversion, not after
    if options.dry_run:
        tensors = announced_tensors(options.checkpoint, options.source)
        print(announcement(out_dir, len(tensors), sum(num_bytes(*one) for one in tensors.values())))
        return
    if not options.quantize:
        print(f"{out_dir}: {convert(out_dir)} HF tensors")
        return
    refuse_existing(out_dir)
    tensors = announced_tensors(options.checkpoint, options.source).values()
    # The model as it is lies there meanwhile; FP8 takes a byte for each of its numbers.
    check_space(out_dir, sum(num_bytes(*one) + math.prod(one[1]) for one in tensors))
    with scratch_folder(out_dir.parent, f"{out_dir.name}.unquantized-") as folder:
        count = convert(folder / "hf")
        with BytesProgress("quantize") as progress:
            num_fp8 = quantize_folder(folder / "hf", out_dir, progress.update)
    print(f"{out_dir}: {count} HF tensors, {num_fp8} of them in FP8")


if __name__ == "__main__":
    hush_libraries()
    run_command(main)
