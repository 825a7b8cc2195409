"""A Megatron distributed checkpoint, of a policy or a value model and from any layout, as a HF model folder.

    source launch/env.sh
    python tools/megatron_to_hf.py CKPT OUT_DIR [--source HF_DIR]

Configuration, tokenizer and tensors that the model does not train are taken from the checkpoint's own `hf` folder, or
from HF_DIR.
"""

import argparse
from collections.abc import Sequence

from megatron_sao.cli.options import run_command
from megatron_sao.observe.progress import BytesProgress


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", metavar="CKPT")
    parser.add_argument("out_dir", metavar="OUT_DIR")
    parser.add_argument("--source", metavar="HF_DIR", help="HF folder that the checkpoint's model came from")
    options = parser.parse_args(argv)

    import megatron_sao.parallel  # noqa: F401  makes megatron.core importable without CUDA
    from megatron_sao.models.conversion import megatron_to_hf

    with BytesProgress("convert") as progress:
        count = megatron_to_hf(options.checkpoint, options.out_dir, hf_source=options.source, report=progress.update)
    print(f"{options.out_dir}: {count} HF tensors")


if __name__ == "__main__":
    run_command(main)
