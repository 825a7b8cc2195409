"""Trajectories by hand for the tests of the scheduler."""

import numpy as np

from megatron_sao.records import NO_VERSION, Prompt, Trajectory


def make_prompt(name: str) -> Prompt:
    return Prompt(prompt_id=name, environment="test", domain="agentic", task={"question": "1+1"})


def make_trajectory(
    name: str = "p0", versions: tuple[int, ...] = (0, 0), reward: float = 1.0, *, num_observation: int = 1, **fields
) -> Trajectory:
    """Observation tokens, then one action token per entry of `versions`."""
    num_tokens = num_observation + len(versions)
    action_mask = np.arange(num_tokens) >= num_observation
    reward_t = np.zeros(num_tokens, np.float32)
    reward_t[-1] = reward
    given = dict(
        prompt=make_prompt(name),
        token_ids=np.arange(10, 10 + num_tokens, dtype=np.int64),
        action_mask=action_mask,
        logp_sampler=np.where(action_mask, -0.5, 0.0).astype(np.float32),
        reward_t=reward_t,
        version_t=np.array([NO_VERSION] * num_observation + list(versions), np.int32),
        turn_t=np.zeros(num_tokens, np.int32),
        reward=reward,
        is_cut=False,
        started_s=100.0,
        finished_s=101.0,
    )
    return Trajectory(**(given | fields))
