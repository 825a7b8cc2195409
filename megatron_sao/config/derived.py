"""Numbers that follow from a configuration, computed in one place."""

from megatron_sao.config.config import Config


def derived_numbers(cfg: Config) -> dict[str, int]:
    """What a person wants to know before a run, and what several processes need alike."""
    batch = cfg.schedule.batch_trajectories
    return {
        "trainer_ranks": cfg.parallel.world_size,
        "model_copies": cfg.parallel.dp,
        "expert_copies": cfg.parallel.expert_dp,
        "prompts_per_step": batch // cfg.sampling.rollouts_per_prompt,
        "trajectories_per_step": batch,
        "tokens_per_step_bound": batch * cfg.sampling.max_trajectory_tokens,
        "max_in_flight": max_in_flight(cfg),
    }


def max_in_flight(cfg: Config) -> int:
    """Episodes that may run at the same time: what is asked for, else the engines' slots, never more than can be trained fresh."""
    fresh = (cfg.schedule.max_staleness + 1) * cfg.schedule.batch_trajectories
    return cfg.schedule.max_in_flight or min(fresh, cfg.engine.count * cfg.engine.max_num_seqs)
