"""How the sections of a configuration must fit together, and how they must fit a world of ranks.

Each check takes the sections it needs and yields faults; it runs as soon as those sections are sound by themselves,
so that one report holds the faults of single fields and of their combinations alike. How they fit a model stands in
model_fit.py.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from math import lcm
from typing import Any, Literal

from megatron_sao.config.algo import Algo
from megatron_sao.config.arms import ARMS
from megatron_sao.config.checkpoint import Checkpoint
from megatron_sao.config.config import Config
from megatron_sao.config.derived import num_pretrain_holdout
from megatron_sao.config.engine import Engine
from megatron_sao.config.model import Model
from megatron_sao.config.model_fit import demonstration_model_faults
from megatron_sao.config.parallel import Parallel
from megatron_sao.config.placement import Placement
from megatron_sao.config.run import Run
from megatron_sao.config.sampling import Sampling
from megatron_sao.config.schedule import Schedule
from megatron_sao.config.section import Section
from megatron_sao.config.value import Groups, Value
from megatron_sao.config.warm_start import WarmStart
from megatron_sao.errors import ConfigError


def cross_field_faults(sections: Mapping[str, Section]) -> list[str]:
    """Faults between sections. `sections` holds the sound ones; checks that need another one are left out."""
    faults: list[str] = []
    for check in _CHECKS:
        needed = inspect.signature(check).parameters
        if needed.keys() <= sections.keys():
            faults += check(**{name: sections[name] for name in needed})
    return faults


def check_world_size(cfg: Config, world_size: int) -> None:
    """Raises ConfigError unless the trainer was started with as many ranks as [parallel] describes."""
    p = cfg.parallel
    if p.world_size != world_size:
        raise ConfigError(
            f"parallel.tp * pp * cp * dp = {p.tp} * {p.pp} * {p.cp} * {p.dp} = {p.world_size}, but the trainer was"
            f" started with {world_size} ranks; start {p.world_size} or change [parallel]"
        )


def check_nodes(cfg: Config, ranks_on_node: int) -> None:
    """Raises ConfigError unless a trainer node was started with as many ranks as [placement] says, if it says so."""
    said = cfg.placement.trainer_gpus_per_node
    if said and said != ranks_on_node:
        raise ConfigError(
            f"placement.trainer_gpus_per_node = {said}, but this node was started with {ranks_on_node} trainer ranks;"
            f" start {said} or change [placement]"
        )


def check_num_nodes(cfg: Config, role: Literal["trainer", "rollout"], num_nodes: int) -> None:
    """Raises ConfigError unless a role was started on as many nodes as [placement] says, if it says so."""
    key = f"{role}_nodes"
    said = getattr(cfg.placement, key)
    if said and said != num_nodes:
        raise ConfigError(
            f"placement.{key} = {said}, but --nodes {num_nodes}; start it on {said} nodes or change [placement]"
        )


def check_one_machine(cfg: Config) -> None:
    """Raises ConfigError for a configuration of several nodes: for commands that start everything on this machine."""
    p = cfg.placement
    if p.trainer_nodes + p.rollout_nodes > 1:
        raise ConfigError(
            f"placement.trainer_nodes = {p.trainer_nodes} and placement.rollout_nodes = {p.rollout_nodes}, but this"
            " command starts everything on this machine; start it with launch/slurm.sbatch or launch/node.sh, or leave"
            " [placement] out"
        )


def check_is_built(cfg: Config) -> None:
    """Raises ConfigError for what can be described (--dry-run, plan) but not run as a whole yet."""
    if cfg.algo.baseline == "group":
        raise ConfigError(
            f"algo.arm = {cfg.algo.arm!r}: a step would have to take whole groups of rollouts, which the scheduler does"
            " not do yet, and the mean of half a group is a wrong baseline; use an arm without a group baseline"
        )
    if cfg.placement.mode == "colocated":
        raise ConfigError(
            'placement.mode = "colocated" can be planned (megatron_sao.cli.plan) but not run yet: nothing puts the'
            " engines to sleep (vLLM's sleep mode, which needs CUDA) and wakes them in turns with the trainer; use"
            ' "separate"'
        )
    if cfg.placement.value_model == "own_ranks":
        raise ConfigError(
            'placement.value_model = "own_ranks" can be planned (megatron_sao.cli.plan) but not run yet: the trainer'
            ' holds both models on the same ranks, in turns; use "with_policy"'
        )


def check_device(cfg: Config, has_cuda: bool) -> None:
    """Raises ConfigError for settings that need a GPU where there is none."""
    if cfg.push.backend == "nccl" and not has_cuda:
        raise ConfigError('push.backend = "nccl" needs CUDA in the trainer and the engines; use "gloo" here')
    if cfg.engine.quantization != "none" and not has_cuda:
        raise ConfigError(
            f'engine.quantization = "{cfg.engine.quantization}" needs CUDA in the engines: vLLM\'s CPU build has no FP8'
            ' experts without AMX tiles; use "none" here'
        )
    if cfg.placement.mode == "colocated" and not has_cuda:
        raise ConfigError(
            'placement.mode = "colocated" needs CUDA in the engines: vLLM\'s sleep mode frees GPU memory, and its CPU'
            ' build has none; use "separate" here'
        )
    kernel = cfg.parallel.sparse_attention_kernel
    if kernel != "none" and not has_cuda:
        raise ConfigError(f'parallel.sparse_attention_kernel = "{kernel}" needs CUDA in the trainer; use "none" here')


# ---- the checks; a parameter names the section it gets ---------------------------------------------------------


def _one_source_of_weights(model: Model, warm_start: WarmStart) -> Iterator[str]:
    if model.path == "" and not warm_start.enabled:
        yield "model.path is empty and warm_start.enabled = false: name a model folder, or let the warm start make one"
    if model.path and warm_start.enabled:
        yield (
            f"model.path = {model.path!r} and warm_start.enabled = true: the warm start makes a model of its own; "
            "set warm_start.enabled = false or leave model.path empty"
        )


def _demonstration_model_fits(warm_start: WarmStart, parallel: Parallel, engine: Engine) -> Iterator[str]:
    if warm_start.enabled:
        yield from demonstration_model_faults(warm_start, parallel, engine)


def _experts_fit_ranks(parallel: Parallel) -> Iterator[str]:
    p = parallel
    stage_ranks = p.tp * p.cp * p.dp
    if stage_ranks % (p.ep * p.etp):
        yield (
            f"parallel.ep * etp = {p.ep} * {p.etp} = {p.ep * p.etp} does not divide parallel.tp * cp * dp = "
            f"{p.tp} * {p.cp} * {p.dp} = {stage_ranks}, the ranks of one pipeline stage; change ep, etp or dp"
        )


def _lengths_fit(sampling: Sampling, engine: Engine, parallel: Parallel) -> Iterator[str]:
    longest = sampling.max_trajectory_tokens
    if longest > engine.max_model_len:
        yield (
            f"sampling.max_trajectory_tokens = {longest} is more than engine.max_model_len = {engine.max_model_len}; "
            "lower the first or raise the second"
        )
    if longest > parallel.micro_batch_tokens:
        yield (
            f"sampling.max_trajectory_tokens = {longest} is more than parallel.micro_batch_tokens = "
            f"{parallel.micro_batch_tokens}, and a trajectory is never split; lower the first or raise the second"
        )
    if sampling.max_tokens_per_turn >= longest:
        yield (
            f"sampling.max_tokens_per_turn = {sampling.max_tokens_per_turn} leaves no room for a prompt in "
            f"sampling.max_trajectory_tokens = {longest}; lower the first or raise the second"
        )


def _batch_divides(schedule: Schedule, sampling: Sampling, parallel: Parallel) -> Iterator[str]:
    batch, rollouts = schedule.batch_trajectories, sampling.rollouts_per_prompt
    if batch % rollouts:
        yield (
            f"sampling.rollouts_per_prompt = {rollouts} does not divide schedule.batch_trajectories = {batch}: "
            "a step takes whole groups"
        )
    if batch < parallel.dp:
        yield (
            f"schedule.batch_trajectories = {batch} is less than parallel.dp = {parallel.dp}: "
            "each copy of the model needs a trajectory; raise the first or lower the second"
        )


def _in_flight_is_useful(schedule: Schedule, sampling: Sampling) -> Iterator[str]:
    s = schedule
    fresh = (s.max_staleness + 1) * s.batch_trajectories
    if s.max_in_flight > fresh:
        yield (
            f"schedule.max_in_flight = {s.max_in_flight} is more than (max_staleness + 1) * batch_trajectories ="
            f" ({s.max_staleness} + 1) * {s.batch_trajectories} = {fresh}: the rest would end too stale to train on;"
            f" use {fresh} or less"
        )
    if 0 < s.max_in_flight < sampling.rollouts_per_prompt:
        yield (
            f"schedule.max_in_flight = {s.max_in_flight} is less than sampling.rollouts_per_prompt = "
            f"{sampling.rollouts_per_prompt}, one group; raise it or use 0"
        )


def _ports_are_free_of_each_other(engine: Engine, schedule: Schedule) -> Iterator[str]:
    last = engine.port + engine.count - 1
    if engine.port and last > 65535:
        yield (
            f"engine.port = {engine.port} with engine.count = {engine.count} ends at port {last}; the last port is"
            " 65535"
        )
    if engine.port and engine.port <= schedule.port <= last:
        yield f"schedule.port = {schedule.port} is one of the engines' ports {engine.port} to {last}; choose another"


def _replicas_of_an_engine_share_something(engine: Engine) -> Iterator[str]:
    if engine.data_parallel > 1 and not engine.expert_parallel:
        yield (
            f"engine.data_parallel = {engine.data_parallel} needs engine.expert_parallel = true: replicas of one server"
            " share nothing but experts; without, use engine.count"
        )


def _arm_means_what_it_says(algo: Algo, sampling: Sampling, value: Value) -> Iterator[str]:
    sections = {"algo": algo, "sampling": sampling, "value": value}
    for path, meant in ARMS[algo.arm].items():
        section, *names = path.split(".")
        found: Any = sections[section]
        for name in names:
            found = getattr(found, name)
        # Any group will do for a group arm: 8 is only what it sets.
        is_other_group_size = path == "sampling.rollouts_per_prompt" and meant > 1 and found > 1
        if found != meant and not is_other_group_size:
            yield (
                f"algo.arm = {algo.arm!r} means {path} = {meant!r}, but it is {found!r}; leave {path} out or choose"
                " another arm"
            )


def _value_model_can_learn(value: Value) -> Iterator[str]:
    if not value.groups.head.trained:
        yield "value.groups.head.trained = false: the head starts at zero, so every value would stay 0; it must be true"
    for name in Groups.model_fields:
        group = getattr(value.groups, name)
        if not group.trained and group.lr_multiplier != 1.0:
            yield (
                f"value.groups.{name}.lr_multiplier = {group.lr_multiplier} has no effect: the group is frozen; set"
                " trained = true or leave it out"
            )


def _value_loss_is_whole(value: Value) -> Iterator[str]:
    if value.hl_gauss_min >= value.hl_gauss_max:
        yield f"value.hl_gauss_min = {value.hl_gauss_min} is not below value.hl_gauss_max = {value.hl_gauss_max}"
    if value.loss == "hl_gauss" and value.value_clip:
        yield f"value.value_clip = {value.value_clip} has no effect with value.loss = 'hl_gauss'; use 0 or loss 'mse'"


def _value_stages_can_run(value: Value) -> Iterator[str]:
    if value.warmup_until_explained_variance and not value.warmup_steps:
        yield (
            f"value.warmup_until_explained_variance = {value.warmup_until_explained_variance} needs value.warmup_steps"
            " > 0: that is the most the warm-up may take"
        )
    if value.pretrain_trajectories:
        held_out = num_pretrain_holdout(value)
        left = value.pretrain_trajectories - held_out
        if left < value.pretrain_batch_trajectories:
            yield (
                f"value.pretrain_trajectories = {value.pretrain_trajectories} less {held_out} held out leaves {left},"
                f" fewer than value.pretrain_batch_trajectories = {value.pretrain_batch_trajectories}; raise the first"
                " or lower the last"
            )


def _learner_and_sampler_agree(model: Model, engine: Engine) -> Iterator[str]:
    if engine.dtype != model.dtype:
        yield (
            f"engine.dtype = {engine.dtype!r} is not model.dtype = {model.dtype!r}: sampler and learner would score"
            " tokens differently at lag 0; set both to the same"
        )


def _nodes_are_said_as_a_whole(placement: Placement) -> Iterator[str]:
    p, is_colocated = placement, placement.mode == "colocated"
    trainer, rollout = ("trainer_nodes", "trainer_gpus_per_node"), ("rollout_nodes", "rollout_gpus_per_node")
    needed = trainer if is_colocated else trainer + rollout
    said = [name for name in needed if getattr(p, name)]
    if said and len(said) < len(needed):
        missing = ", ".join(f"placement.{name}" for name in needed if name not in said)
        yield f"placement.{said[0]} = {getattr(p, said[0])} is given, but {missing} is not; give all of them or none"
    if is_colocated:
        for name in rollout:
            if getattr(p, name):
                yield (
                    f'placement.{name} = {getattr(p, name)} has no effect with placement.mode = "colocated": the'
                    " engines have the trainer's nodes; leave it out"
                )
        if p.rollout_gpu_gib != p.trainer_gpu_gib:
            yield (
                f"placement.rollout_gpu_gib = {p.rollout_gpu_gib:g} is not placement.trainer_gpu_gib ="
                f' {p.trainer_gpu_gib:g}, but with placement.mode = "colocated" they are the same GPUs'
            )
        if p.value_model == "own_ranks":
            yield (
                'placement.value_model = "own_ranks" with placement.mode = "colocated": both give a GPU to one model at'
                " a time in their own way; choose one of them"
            )


def _trainer_fills_its_nodes(placement: Placement, parallel: Parallel) -> Iterator[str]:
    p, gpus = placement, placement.trainer_gpus
    ranks, product = parallel.world_size, f"parallel.tp * pp * cp * dp = {parallel.world_size}"
    if p.value_model == "own_ranks":
        ranks, product = 2 * ranks, f"2 * {product} (policy, then value model on as many)"
    if gpus and gpus != ranks:
        yield (
            f"placement.trainer_nodes * trainer_gpus_per_node = {p.trainer_nodes} * {p.trainer_gpus_per_node} = {gpus},"
            f" but the trainer has {product} ranks; change [placement] or [parallel]"
        )
    if p.value_model == "own_ranks" and parallel.offload_sleeping_model:
        yield (
            'parallel.offload_sleeping_model = true has no effect with placement.value_model = "own_ranks": no model'
            " sleeps; leave it out"
        )


def _engines_fill_their_nodes(placement: Placement, engine: Engine, parallel: Parallel) -> Iterator[str]:
    p, width = placement, engine.num_workers
    workers, is_colocated = engine.count * width, p.mode == "colocated"
    further = {"pipeline_parallel": engine.pipeline_parallel, "data_parallel": engine.data_parallel}
    axes = {"tensor_parallel": engine.tensor_parallel} | {name: size for name, size in further.items() if size > 1}
    names, sizes = " * ".join(axes), " * ".join(map(str, axes.values()))
    gpus = parallel.world_size if is_colocated else p.rollout_gpus
    per_node = p.trainer_gpus_per_node if is_colocated else p.rollout_gpus_per_node
    nodes = "trainer" if is_colocated else "rollout"
    if gpus and gpus != workers:
        there = (
            "there are as many GPUs as the trainer has ranks, parallel.tp * pp * cp * dp"
            if is_colocated
            else f"placement.rollout_nodes * rollout_gpus_per_node = {p.rollout_nodes} * {p.rollout_gpus_per_node}"
        )
        yield (
            f"engine.count * {names} = {engine.count} * {sizes} = {workers}, but {there} = {gpus}; change"
            " [engine] or [placement]"
        )
    if per_node and per_node % width:
        yield (
            f"engine.{names} = {width} does not divide placement.{nodes}_gpus_per_node = {per_node}: an engine"
            " must not lie on two nodes; change either"
        )


def _the_best_can_be_told(checkpoint: Checkpoint, run: Run) -> Iterator[str]:
    if checkpoint.keep_best and not run.eval_every:
        yield (
            f"checkpoint.keep_best = {checkpoint.keep_best} goes by the pass rate on held-out prompts, but"
            " run.eval_every = 0 evaluates none while training; set it, or keep_best = 0"
        )


def _multiples_are_saved(checkpoint: Checkpoint) -> Iterator[str]:
    every, keep = checkpoint.every_steps, checkpoint.keep_every
    if every and keep and keep % every and every % keep:
        below = keep - keep % every
        use = f"{below} or {below + every}" if below else f"{every}"
        yield (
            f"checkpoint.keep_every = {keep} does not fit checkpoint.every_steps = {every}: of what is saved then, it"
            f" would keep only multiples of {lcm(keep, every)}; use {use}, or change every_steps"
        )


_CHECKS: list[Callable[..., Iterator[str]]] = [
    _one_source_of_weights,
    _demonstration_model_fits,
    _experts_fit_ranks,
    _lengths_fit,
    _batch_divides,
    _in_flight_is_useful,
    _ports_are_free_of_each_other,
    _replicas_of_an_engine_share_something,
    _arm_means_what_it_says,
    _value_model_can_learn,
    _value_loss_is_whole,
    _value_stages_can_run,
    _learner_and_sampler_agree,
    _nodes_are_said_as_a_whole,
    _trainer_fills_its_nodes,
    _engines_fill_their_nodes,
    _the_best_can_be_told,
    _multiples_are_saved,
]
