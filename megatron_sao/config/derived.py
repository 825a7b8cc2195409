"""Numbers that follow from a configuration, each computed in this one place."""

from megatron_sao.config.config import Config
from megatron_sao.config.value import Value
from megatron_sao.config.write import to_toml


def derived_numbers(cfg: Config) -> dict[str, int]:
    """What follows from a configuration, by name; `describe` explains each name."""
    return {name: number for name, (number, _) in _explained_numbers(cfg).items()}


def describe(cfg: Config) -> str:
    """The resolved configuration as TOML, then the derived numbers as comments: what --dry-run prints."""
    rows = _explained_numbers(cfg).items()
    width = max(len(name) for name, _ in rows)
    lines = [f"# {name:<{width}} = {number:<10,} {meaning}" for name, (number, meaning) in rows]
    return "\n".join([to_toml(cfg), "# ---- derived numbers", *lines]) + "\n"


def max_in_flight(cfg: Config) -> int:
    """Episodes that may run at the same time: as asked for, else the engines' slots within freshness."""
    fresh = (cfg.schedule.max_staleness + 1) * cfg.schedule.batch_trajectories
    return cfg.schedule.max_in_flight or min(fresh, cfg.engine.count * cfg.engine.max_num_seqs)


def checkpoint_bytes(cfg: Config, num_parameters: int) -> int:
    """At most, of one checkpoint: two models, each with weights, fp32 masters and both moments (frozen ones have none).

    Args: num_parameters: of the policy; the value model has fewer.
    """
    return 2 * num_parameters * ((4 if cfg.model.dtype == "float32" else 2) + 3 * 4)


def num_kept_checkpoints(cfg: Config) -> int:
    """That the rules of [checkpoint] let stay by the end of a run, at most; what a stop saves is not counted."""
    rules, warmup = cfg.checkpoint, cfg.value.warmup_steps if cfg.algo.baseline == "value" else 0

    def is_saved(step: int) -> bool:
        every, eval_every = rules.every_steps, cfg.run.eval_every if rules.keep_best else 0
        is_evaluated = eval_every > 0 and step > warmup and (step - warmup) % eval_every == 0
        return is_evaluated or (every > 0 and step % every == 0)

    multiples = range(rules.keep_every, warmup + cfg.run.steps + 1, rules.keep_every) if rules.keep_every else ()
    return rules.keep_last + rules.keep_best + sum(map(is_saved, multiples))


def num_pretrain_holdout(value: Value) -> int:
    """Trajectories of the value pretraining that are kept to measure on: at least 1 where there is a pretraining."""
    return max(1, round(value.pretrain_trajectories * value.pretrain_holdout)) if value.pretrain_trajectories else 0


def _explained_numbers(cfg: Config) -> dict[str, tuple[int, str]]:
    p, batch = cfg.parallel, cfg.schedule.batch_trajectories
    has_value_model = cfg.algo.baseline == "value"
    warmup = cfg.value.warmup_steps if has_value_model else 0
    pretrain = cfg.value.pretrain_trajectories if has_value_model else 0
    pretrain_batches = (
        _ceil(pretrain - num_pretrain_holdout(cfg.value), cfg.value.pretrain_batch_trajectories) if pretrain else 0
    )
    tokens_bound = batch * cfg.sampling.max_trajectory_tokens
    value_updates = (warmup + cfg.run.steps) * cfg.value.updates_per_step if has_value_model else 0
    return {
        "trainer_ranks": (p.world_size, "tp * pp * cp * dp: what torchrun must start"),
        "model_copies": (p.dp, "data-parallel copies of the model"),
        "expert_copies": (p.expert_dp, "copies of each expert: tp * cp * dp / (ep * etp)"),
        "engine_workers": (cfg.engine.count * cfg.engine.num_workers, "engines * workers of each"),
        "trajectories_per_step": (batch, "trained by one step"),
        "prompts_per_step": (batch // cfg.sampling.rollouts_per_prompt, "different prompts among them"),
        "trajectories_per_model_copy": (_ceil(batch, p.dp), "of a step, at most"),
        "tokens_per_step_bound": (tokens_bound, "if every trajectory had max_trajectory_tokens"),
        "micro_batches_bound": (
            _ceil(tokens_bound, p.dp * p.micro_batch_tokens),
            "of a model copy in a step, about, for that many tokens",
        ),
        "max_in_flight": (max_in_flight(cfg), "episodes that run at the same time"),
        "pretrain_holdout_trajectories": (
            num_pretrain_holdout(cfg.value) if pretrain else 0,
            "kept to measure explained variance",
        ),
        "pretrain_updates": (cfg.value.pretrain_epochs * pretrain_batches, "of the value model, before the first step"),
        "value_updates": (value_updates, "(warm-up steps + steps) * updates_per_step, at most"),
        "policy_updates": (cfg.run.steps, "each followed by a push to the engines"),
        "trajectories_trained": (pretrain + (warmup + cfg.run.steps) * batch, "in the whole run, at most"),
    }


def _ceil(number: int, size: int) -> int:
    return -(-number // size)
