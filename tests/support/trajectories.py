"""Made-up trajectories with random lengths, observations in the middle and per-token versions."""

import numpy as np

from megatron_sao.records import NO_VERSION, Prompt, Trajectory


def random_trajectories(
    count: int, *, seed: int = 0, vocab: int = 128, longest: int = 40, newest_version: int = 0
) -> list[Trajectory]:
    """`count` trajectories: prompt, action, observation, action; log-probs near what a random model gives."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        spans = rng.integers(2, max(3, longest // 4), size=4)
        mask = np.repeat([False, True, False, True], spans)
        total = int(spans.sum())
        reward_t = np.zeros(total, np.float32)
        reward_t[-1] = float(rng.integers(0, 2))
        made.append(
            Trajectory(
                prompt=Prompt(prompt_id=f"test/{number}", environment="calculator", domain="agentic", task={}),
                token_ids=rng.integers(0, vocab, size=total),
                action_mask=mask,
                logp_sampler=np.where(mask, -np.log(vocab) + 0.3 * rng.standard_normal(total), 0).astype(np.float32),
                reward_t=reward_t,
                version_t=np.where(mask, newest_version, NO_VERSION).astype(np.int32),
                turn_t=np.repeat([0, 0, 1, 1], spans).astype(np.int32),
                reward=float(reward_t[-1]),
                is_cut=False,
                started_s=0.0,
                finished_s=0.0,
            )
        )
    return made
