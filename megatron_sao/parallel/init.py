"""Starts the trainer's world: torch.distributed, Megatron's groups, seeds."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_sao.config import Config, check_device, check_world_size
from megatron_sao.config.devices import device_index
from megatron_sao.config.parallel import Parallel


@dataclass(frozen=True)
class World:
    """This rank's place on every axis. `*_size` 1 and rank 0 where an axis is not used."""

    rank: int
    size: int
    tp: int
    tp_size: int
    pp: int
    pp_size: int
    cp: int
    cp_size: int
    ep: int
    ep_size: int
    etp: int
    etp_size: int
    dp: int
    dp_size: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def start_world(run_config: Config) -> World:
    """Join the torchrun world and build all process groups. Collective: every rank calls it once per process.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which torchrun sets.
    Raises: ConfigError when the world has another size than the axes ask for.
    """
    check_world_size(run_config, int(os.environ.get("WORLD_SIZE", 1)))
    config, seed = run_config.parallel, run_config.run.seed
    check_device(run_config, torch.cuda.is_available())
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            local_rank = int(os.environ.get("LOCAL_RANK", 0))
            torch.cuda.set_device(device_index(local_rank, torch.cuda.device_count()))
        dist.init_process_group(backend, timeout=timedelta(seconds=config.timeout_s))
    make_groups(config)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return current_world()


def make_groups(config: Parallel) -> None:
    """Megatron's process groups for a layout, in place of any from before. Collective: the whole world."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.vpp if config.vpp > 1 else None,
        context_parallel_size=config.cp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=config.etp,
        distributed_timeout_minutes=config.timeout_s / 60,
        create_gloo_process_groups=False,
    )


def current_world() -> World:
    """This rank's coordinates, read from Megatron's groups (no collective)."""
    ps = parallel_state
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        tp=ps.get_tensor_model_parallel_rank(),
        tp_size=ps.get_tensor_model_parallel_world_size(),
        pp=ps.get_pipeline_model_parallel_rank(),
        pp_size=ps.get_pipeline_model_parallel_world_size(),
        cp=ps.get_context_parallel_rank(),
        cp_size=ps.get_context_parallel_world_size(),
        ep=ps.get_expert_model_parallel_rank(),
        ep_size=ps.get_expert_model_parallel_world_size(),
        etp=ps.get_expert_tensor_parallel_rank(),
        etp_size=ps.get_expert_tensor_parallel_world_size(),
        dp=ps.get_data_parallel_rank(),
        dp_size=ps.get_data_parallel_world_size(),
    )


def stop_world() -> None:
    """Leave the world. Collective in effect: peers that still communicate would fail."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
