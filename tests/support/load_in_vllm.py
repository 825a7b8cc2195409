"""Loads a HF folder with vLLM's own model class and weight loader, without computing: FOLDER PORT OUT.

Writes what the parameters then hold, by name, before vLLM prepares them for its kernels. On a CPU without AMX tiles
vLLM has no kernel for FP8 blocks and would refuse before it loads anything; here it is made to believe in them. Its
library for CPUs with AVX2 alone does not even hold the kernel.
"""

import os
import sys

os.environ |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

import torch

torch.cpu._is_amx_tile_supported = lambda: True

from safetensors.torch import load_file
from vllm import _custom_ops
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

_custom_ops._supports_cpu_fp8_w8a16 = True


def main(folder: str, port: str, out: str) -> None:
    config = EngineArgs(model=folder, dtype="bfloat16", enforce_eager=True, max_model_len=64).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        model = initialize_model(config)
        loaded = model.load_weights(load_file(f"{folder}/model.safetensors").items())
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    torch.save({"loaded": sorted(loaded), "parameters": parameters}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
