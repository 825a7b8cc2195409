"""A HF model folder as a Megatron distributed checkpoint, which loads into any layout of ranks.

    source launch/env.sh
    python tools/hf_to_megatron.py HF_DIR OUT [--role policy|value] [--config CONFIG.toml] [--dry-run]

One process on a CPU, parameter by parameter: memory does not grow with the model. With a configuration, the model must
fit its [parallel] axes, and a value head gets the outputs that its [value] asks for (without: one). The head of a value
model is taken from the folder's `value_head.weight`, or starts at zero.
"""

import argparse
from collections.abc import Sequence

from megatron_sao.cli.options import hush_libraries, run_command
from megatron_sao.config import check_model_fits, load_config
from megatron_sao.convert.family import check_stage_starts, read_shape
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.new_folder import announcement, refuse_existing, size_text
from megatron_sao.observe.progress import BytesProgress


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("hf_dir", metavar="HF_DIR")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--role", choices=("policy", "value"), default="policy")
    parser.add_argument("--config", help="configuration of the run that the checkpoint is for")
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would be written, and exit")
    options = parser.parse_args(argv)
    # What is wrong with the folder or does not fit it is named before Megatron is imported.
    folder = HFFolder(options.hf_dir)
    shape = read_shape(folder.config)
    config = load_config(options.config, []) if options.config else None
    if config:
        check_model_fits(config, folder.config)
        check_stage_starts(shape, config.parallel)
    refuse_existing(options.out)

    import megatron_sao.parallel  # noqa: F401  makes megatron.core importable without CUDA
    from megatron_sao.models.conversion import check_conversion, hf_to_megatron
    from megatron_sao.train.values import ValueReadout

    outputs = ValueReadout(config.value).num_outputs if config else 1
    if options.dry_run:
        print(announcement(options.out, *check_conversion(folder.path, options.role, num_value_outputs=outputs)))
        return
    with BytesProgress("convert") as progress:
        done = hf_to_megatron(
            options.hf_dir, options.out, options.role, num_value_outputs=outputs, report=progress.update
        )
    print(f"{options.out}: {done.num_tensors} HF tensors, {size_text(done.num_bytes)}, as a {options.role}")
    for what, names in (("carried along as they are", done.carried), ("left out", done.dropped)):
        if names:
            print(f"{what}: {', '.join(names)}")
    if done.has_fresh_head:
        print(f"the value head starts at zero: {options.hf_dir} holds none that fits")


if __name__ == "__main__":
    hush_libraries()
    run_command(main)
