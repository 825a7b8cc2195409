"""A HF model folder in FP8: matrices in blocks of 128 x 128, each block with a scale of its own, by nvidia-modelopt.

The form is the one that DeepSeek and GLM publish and that vLLM and transformers read: `X.weight` in float8_e4m3fn and
`X.weight_scale_inv` in float32, weight = float8 * scale of its block. Activations are scaled as they come, so nothing
is calibrated. Embedding, output layer, router, norms, indexer and what joins an MTP layer keep their number format.
Matrices that an engine computes as one (q, k and v; gate and up; all experts of a layer) are quantised all or none:
none where a size is no multiple of a block.

Not tried: a forward pass. vLLM's CPU build has kernels for FP8 blocks only where the CPU has AMX tiles, and refuses
such a folder elsewhere. So the tests compare the weights with those they came from, and show that vLLM's own loader
puts every tensor where it belongs.
"""

import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_sao.errors import CheckpointError, ConfigError
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.hf_writer import HFWriter, copy_side_files, num_bytes
from megatron_sao.models.new_folder import check_space, new_folder

BLOCK = 128
SCALE = "_scale_inv"  # behind the name of a weight
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max

_MATRIX = re.compile(
    r"(model\.layers\.\d+\.)(self_attn|mlp|mlp\.shared_experts?|mlp\.experts\.\d+)"
    r"\.(\w+_proj|kv_a_proj_with_mqa)\.weight"
)
# Of matrices that are computed as one, only the last may end within a block.
_MAY_END_WITHIN_A_BLOCK = ("v_proj", "kv_a_proj_with_mqa")
_COMPUTED_AS_ONE = {
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "q_a_proj": "qkv_a", "kv_a_proj_with_mqa": "qkv_a",
    "gate_proj": "gate_up", "up_proj": "gate_up",
}  # fmt: skip


def quantize_folder(
    source: str | Path, destination: str | Path, report: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """Write the FP8 form of a HF model folder; one tensor is in memory at a time.

    Args:
        source: float weights. destination: must not exist; it appears when it is complete.
        report: called with (bytes read, bytes of the source) after each tensor.
    Returns: how many matrices became FP8.
    Raises: CheckpointError when the source is quantised already, holds nothing to quantise, or a weight that is not
        finite; ConfigError where nvidia-modelopt is absent.
    """
    quantize = block_quantizer()
    folder = HFFolder(source)
    chosen = fp8_names(folder)
    announced, total = {}, 0
    for name in folder.names():
        total += num_bytes(folder.dtype(name), folder.shape(name))
        announced[name] = (FP8 if name in chosen else folder.dtype(name), folder.shape(name))
        if name in chosen:
            announced[name + SCALE] = (torch.float32, tuple(-(-size // BLOCK) for size in folder.shape(name)))
    with new_folder(destination) as partial:
        check_space(destination, sum(num_bytes(*one) for one in announced.values()))
        with HFWriter(partial, announced) as writer:
            done = 0
            for name in folder.names():
                tensor = folder.read_whole(name)
                done += num_bytes(tensor.dtype, tuple(tensor.shape))
                if name in chosen:
                    if not tensor.isfinite().all():
                        raise CheckpointError(f"{name} holds a number that is not finite; it cannot become FP8")
                    tensor, scale = quantize(tensor)
                    writer.write(name + SCALE, scale)
                writer.write(name, tensor)
                report(done, total)
        config = folder.config | {"quantization_config": _quantization_config(folder, chosen)}
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        copy_side_files(folder.path, partial)
    return len(chosen)


def check_modelopt() -> None:
    """Raises: ConfigError unless nvidia-modelopt is installed. Imports nothing."""
    if importlib.util.find_spec("modelopt") is None:
        raise ConfigError("FP8 needs the package nvidia-modelopt; install it, or convert without --quantize")


def fp8_names(folder: HFFolder) -> set[str]:
    """HF names of the matrices that become FP8.

    Raises: CheckpointError when there is none, or when the folder is quantised already.
    """
    if folder.config.get("quantization_config") is not None:
        raise CheckpointError("the model is quantised already (quantization_config in its config.json)")
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in folder.names():
        if found := _MATRIX.fullmatch(name):
            layer, part, matrix = found.groups()
            is_expert = part.startswith("mlp.experts.")
            groups[layer + ("experts" if is_expert else f"{part}.{_COMPUTED_AS_ONE.get(matrix, matrix)}")].append(name)
    fitting = [group for group in groups.values() if all(_fits(name, folder.shape(name)) for name in group)]
    chosen = {name for group in fitting for name in group}
    if not chosen:
        raise CheckpointError(
            f"no matrix of this model becomes FP8: rows and columns must be multiples of {BLOCK} in all matrices that"
            " are computed as one"
        )
    return chosen


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight [R, C] in float8 times its scales [ceil(R / 128), ceil(C / 128)] -> [R, C] in float32."""
    rows, columns = weight.shape
    return weight.float() * scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def _fits(name: str, shape: tuple[int, ...]) -> bool:
    rows, columns = shape
    is_last = name.split(".")[-2] in _MAY_END_WITHIN_A_BLOCK
    return columns % BLOCK == 0 and (is_last or rows % BLOCK == 0)


def _quantization_config(folder: HFFolder, chosen: set[str]) -> dict[str, Any]:
    matrices = {n.removesuffix(".weight") for n in folder.names() if len(folder.shape(n)) == 2 and n not in chosen}
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(matrices),
    }


def block_quantizer() -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """-> weight [R, C] -> (float8 [R, C], scales [ceil(R / 128), ceil(C / 128)] in float32), by nvidia-modelopt.

    Raises: ConfigError where that is absent.
    Effect: where there is no CUDA, no model of Megatron's can be built in this process afterwards: modelopt imports
        vLLM (0.32), which has torch ask for the number of devices, and parallel/cpu.py answers 1.
    """
    check_modelopt()
    from modelopt.torch.quantization.qtensor import FP8QTensor
    from modelopt.torch.quantization.utils import reduce_block_amax, reduce_block_padding

    blocks = {-1: BLOCK, -2: BLOCK}

    def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = weight.float()
        largest = reduce_block_amax(reduce_block_padding(weight, blocks), blocks)
        # modelopt 0.47 divides by the scale: a block of zeros would become NaN.
        scale = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        quantized, scale = FP8QTensor.quantize(weight, scale, block_sizes=blocks)
        return quantized._quantized_data, scale

    return quantize
