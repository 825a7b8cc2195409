"""The push of a run of any size, from one process: the plan that its trainer would make, without a GPU or weights.

Every rank's slices come from its place in a fake world of the real size; the ranks of one pipeline stage hold tensors
of equal shapes (every split is even), so one model of each stage is built, on the meta device.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron_sao.config import Config
from megatron_sao.convert.expected import expected_tensors
from megatron_sao.convert.family import read_shape
from megatron_sao.convert.slices import LocalTensor, local_slices
from megatron_sao.models.build import build_model
from megatron_sao.models.weights import assign_owners, describe, tensor_ranks
from megatron_sao.parallel.fake_world import fake_world
from megatron_sao.train.push import push_plan
from megatron_sao.transport.plan import PushPlan


def plan_push(config: Config, hf_config: dict[str, Any], progress: Callable[[int, int], None]) -> PushPlan:
    """The plan of a run's pushes, equal to the one that its ranks make together.

    Args:
        hf_config: what [parallel] has been checked against.
        progress: called with (ranks done, ranks) after each.
    Effect: none that lasts; must not run inside a world.
    """
    parallel, shape, with_mtp = config.parallel, read_shape(hf_config), config.policy.mtp_loss_weight > 0
    stages: dict[int, list[LocalTensor]] = {}
    holders = []
    for rank in range(parallel.world_size):
        with fake_world(parallel, rank) as world:
            if world.pp not in stages:
                with torch.device("meta"):
                    dtype = getattr(torch, config.model.dtype)
                    stages[world.pp] = describe(
                        build_model("policy", hf_config, parallel, dtype, with_mtp=with_mtp)
                    )
            holders.append(local_slices(stages[world.pp], shape, tensor_ranks(world)))
        progress(rank + 1, parallel.world_size)
    return push_plan(assign_owners(holders), shape, config, expected_tensors(hf_config, with_mtp=with_mtp))
