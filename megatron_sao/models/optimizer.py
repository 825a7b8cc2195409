"""A model wrapped for data parallelism with its Adam and its learning-rate schedule.

The schedule advances once per optimizer update: with K value updates a step, the value schedule moves K per step.
Megatron sets the first update's rate from a counter of 0, so under a warm-up the first update runs at rate 0.
"""

from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from megatron.core.transformer.module import MegatronModule

from megatron_sao.config.section import Optimizer
from megatron_sao.parallel.exchange import any_rank

NEVER = 2**31  # steps after which a constant schedule would end


@dataclass
class TrainedModel:
    """A model that learns: its chunks as built, the same chunks wrapped, the optimizer and the schedule."""

    chunks: list[MegatronModule]
    wrapped: list[DistributedDataParallel]
    optimizer: ChainedOptimizer  # one for dense parameters, one for experts
    schedule: OptimizerParamScheduler

    def zero_grad(self) -> None:
        """Effect: forgets the gradients of the last step."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def update(self) -> tuple[bool, float]:
        """One optimizer step and one tick of the schedule. -> (was done, gradient norm before clipping).

        A step whose gradients are not finite on any rank is done on none, and does not move the schedule: with
        Megatron's own norm a NaN would pass (NaN > threshold is false) and Adam's moments would be lost for ever.
        Collective: every rank of the world.
        """
        sums = [buffer.grad_data.sum() for buffer in self.grad_buffers()]
        is_bad = not all(bool(torch.isfinite(s)) for s in sums)
        if any_rank(is_bad):
            return False, float("nan")
        done, grad_norm, _ = self.optimizer.step()
        if done:
            self.schedule.step(1)
        return bool(done), float(grad_norm)

    def restart(self) -> None:
        """Begin a new stage of training: weights stay, Adam's moments and the schedule start from nothing."""
        for optimizer in self.optimizers():
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group.pop("step", None)  # both Adams count here and fill in what is absent
        self.schedule.num_steps = 0
        self.schedule.step(0)

    @property
    def learning_rate(self) -> float:
        """Of the next update; the largest of all groups."""
        return max((group["lr"] for group in self.optimizer.param_groups), default=0.0)

    def grad_buffers(self) -> list:
        """Megatron's buffers of gradients, each with the parameters that they are of."""
        return [buffer for chunk in self.wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The Adams inside Megatron's optimizers; none where this rank has nothing to train."""
        return [o.optimizer for o in self.optimizer.chained_optimizers if not o.is_stub_optimizer]


def data_parallel_config() -> DistributedDataParallelConfig:
    """How gradients are laid out and reduced; the plan asks it as well."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=True,
        check_for_nan_in_grad=False,  # `TrainedModel.update` leaves a bad step out instead
    )


def make_trained_model(
    chunks: list[MegatronModule], config: Optimizer, lr_multipliers: dict[str, float] | None = None
) -> TrainedModel:
    """Wrap chunks (already loaded, already frozen where they shall be) and build optimizer and schedule.

    Args:
        lr_multipliers: group -> factor on `config.lr` for parameters marked with `sao_group` (see models/groups.py).
    Collective: every rank of the world.
    """
    model_config = chunks[0].config
    ddp_config = data_parallel_config()
    wrapped = [
        DistributedDataParallel(model_config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        use_distributed_optimizer=True,
        bf16=model_config.params_dtype is torch.bfloat16,
        params_dtype=model_config.params_dtype,
    )
    overrides = get_standard_config_overrides(optimizer_config)
    for group, factor in (lr_multipliers or {}).items():
        if factor != 1.0:
            is_member = ParamPredicate(group, lambda p, group=group: getattr(p, "sao_group", "") == group)
            rate = ParamGroupOverride(max_lr=config.lr * factor, min_lr=config.lr * factor)
            overrides[ParamKey(predicate=is_member)] = rate
    optimizer = get_megatron_optimizer(
        optimizer_config, wrapped, config_overrides=overrides, use_gloo_process_groups=False
    )
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.lr,
        lr_warmup_steps=config.lr_warmup_steps,
        lr_decay_steps=NEVER,
        lr_decay_style="constant",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=NEVER,
        wd_incr_style="constant",
    )
    model_config.grad_scale_func = optimizer.scale_loss
    return TrainedModel(chunks, wrapped, optimizer, schedule)
