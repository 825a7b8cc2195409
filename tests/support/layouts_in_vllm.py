"""Which elements of a HF folder each worker of an engine loads, by vLLM's own model classes: CASES.json OUT.

CASES: a list of [folder, {"tensor_parallel_size": 2, ...}]. Every element of the folder gets a number of its own (1, 2,
... in the order of the names, sorted) and is loaded; what is found in a worker's parameters afterwards is what it has
loaded. One process is each worker in turn: it has the places of real groups, but nobody to talk to.
OUT: for each case, for each worker a bool tensor [number of elements].
"""

import json
import os
import sys
from types import SimpleNamespace

os.environ |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import set_default_torch_dtype


_ALIVE: list[torch.nn.Module] = []  # vLLM remembers by id which layers a model lacks


def take_any_attention() -> None:
    """Models with sparse attention load too; a CPU could not compute them (vLLM 0.32, platforms/cpu.py)."""
    choose = CpuPlatform.get_attn_backend_cls.__func__

    def chosen(cls, selected_backend, attn_selector_config, num_heads=None):
        return choose(cls, selected_backend, attn_selector_config._replace(use_sparse=False), num_heads)

    type(current_platform).get_attn_backend_cls = classmethod(chosen)


def take_place(parallel, number: int) -> None:
    """This process is worker `number` of an engine."""
    tp, pp, dp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size
    replica, rank = divmod(number, tp * pp)
    stage, tensor_rank = divmod(rank, tp)
    sizes = {"_TP": (tensor_rank, tp), "_PP": (stage, pp), "_DP": (replica, dp), "_PCP": (0, 1), "_DCP": (0, 1),
             "_EP": (replica * tp + tensor_rank, dp * tp), "_EPLB": (0, 1)}  # fmt: skip
    for name, (place, size) in sizes.items():
        group = SimpleNamespace(rank_in_group=place, world_size=size, rank=number, ranks=list(range(size)))
        group.is_first_rank, group.is_last_rank = place == 0, place == size - 1
        group.device_group = SimpleNamespace(size=lambda size=size: size, rank=lambda place=place: place)
        group.cpu_group = group.device_group
        group.device_communicator = None
        setattr(parallel_state, name, group)
    parallel.rank, parallel.data_parallel_rank = rank, replica


def loaded(folder: str, options: dict) -> list[torch.Tensor]:
    """For each worker, whether it loads each element."""
    config = EngineArgs(
        model=folder, dtype="float32", enforce_eager=True, max_model_len=64, distributed_executor_backend="mp",
        **options,
    ).create_engine_config()
    parallel, found = config.parallel_config, []
    numbered, first = [], 1
    for name, tensor in sorted(load_file(f"{folder}/model.safetensors").items()):
        ids = torch.arange(first, first + tensor.numel(), dtype=torch.float32).view(tensor.shape)
        numbered.append((name, ids))
        first += tensor.numel()
    assert first < 2**24, "not every number has a float32 of its own"
    for worker in range(parallel.world_size * parallel.data_parallel_size):
        take_place(parallel, worker)
        config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
            model = initialize_model(config)
            for parameter in model.parameters():
                parameter.data.zero_()
            model.load_weights(iter(numbered))
        mask = torch.zeros(first, dtype=torch.bool)
        for parameter in model.parameters():
            mask[parameter.data.flatten().long()] = True
        found.append(mask[1:])
        _ALIVE.append(model)
    return found


def main(cases: str, out: str) -> None:
    take_any_attention()
    torch.save([loaded(folder, options) for folder, options in json.loads(cases)], out)


if __name__ == "__main__":
    main(*sys.argv[1:])
