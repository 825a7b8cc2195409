"""One episode from its prompt to a Trajectory: token in, token out.

Invariants: the next context is the previous one + the sampled ids + the ids added by `chat`; nothing sampled is ever
re-encoded. A request is sent only if there is room for at least one token. A trajectory ends with an action.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from megatron_sao.errors import DataError
from megatron_sao.records import Prompt, Trajectory, Turn
from megatron_sao.rollout.assemble import Unscored, assemble, reward_value
from megatron_sao.rollout.chat import Chat
from megatron_sao.rollout.engine_client import Sample
from megatron_sao.rollout.environment import Environment, EnvStep, Message


@dataclass(frozen=True)
class EpisodeSettings:
    """The limits and the sampling of one episode."""

    max_tokens_per_turn: int
    max_turns: int
    max_trajectory_tokens: int  # context and actions together; at most the engine's max_model_len
    temperature: float = 1.0
    seed: int | None = None  # None = samples are not repeatable
    reward_key: str = ""  # which entry is the reward, if the environment scores with a dict
    environment_timeout_s: float = 60.0  # bound of one step of the environment


class Engine(Protocol):
    """What an episode needs: an EnginePool, an EngineClient, or a script of right answers."""

    async def generate(self, token_ids: list[int], *, max_tokens: int, temperature: float, stop_token_ids: list[int],
                       seed: int | None) -> Sample: ...


def room_tokens(num_context_tokens: int, settings: EpisodeSettings) -> int:
    """How many tokens the next action may have; 0 = no room, the episode is over."""
    return max(0, min(settings.max_tokens_per_turn, settings.max_trajectory_tokens - num_context_tokens))


def request_seed(seed: int | None, prompt_id: str, turn: int) -> int | None:
    """A sampling seed of its own for each request of a run; None stays None."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.blake2b(f"{seed}/{prompt_id}/{turn}".encode(), digest_size=4).digest()) >> 1


async def run_episode(
    prompt: Prompt, environment: Environment, engine: Engine, chat: Chat, settings: EpisodeSettings
) -> Trajectory:
    """Play one episode to its end.

    It is cut (`is_cut`) if an action hits its length limit, if there is no room for another action, or if the turns
    are used up. A cut episode has the reward that the environment gave with its last step, 0 if it gave none.

    Raises:
        Unscored: nothing to train on: no room for even one action, no reward, a reward (of a turn, too) that is not
            finite, or an environment that does not answer.
        DataError, EngineError: a malformed sample or reward, a failed engine.
    """
    episode = environment.start(prompt.task)
    started_s = time.time()
    turns: list[Turn] = []
    metrics: Counter[str] = Counter()
    context: list[int] = []  # all tokens before the coming action, the waiting observation included
    observation_ids = _prompt_ids(prompt, chat, await _bounded(episode.begin(), prompt, settings))
    context += observation_ids
    step = EnvStep(None)
    is_cut = False
    while True:
        max_tokens = room_tokens(len(context), settings)
        if len(turns) == settings.max_turns or max_tokens == 0:
            is_cut = True
            break
        sample = await engine.generate(
            context, max_tokens=max_tokens, temperature=settings.temperature, stop_token_ids=chat.stop_token_ids,
            seed=request_seed(settings.seed, prompt.prompt_id, len(turns)),
        )
        action = chat.action_text(sample.token_ids)
        step = await _bounded(episode.step(action, sample.stop_reason), prompt, settings)
        metrics.update(step.metrics)
        is_cut = sample.stop_reason == "length"
        is_over = is_cut or step.observation is None
        suffix_ids, next_ids = ([], []) if is_over else chat.observation_ids(
            sample.token_ids, step.observation, environment.observation_role)
        turns.append(Turn(
            observation_ids=observation_ids, action_ids=sample.token_ids, logp_sampler=sample.logp,
            version_spans=sample.version_spans, stop_reason=sample.stop_reason, suffix_ids=suffix_ids,
            reward=None if step.turn_reward is None else reward_value(step.turn_reward, prompt.prompt_id),
        ))
        if is_over:
            break
        observation_ids = next_ids
        context = context + sample.token_ids + suffix_ids + observation_ids
    if not turns:
        raise Unscored("prompt_too_long", f"the prompt of {prompt.prompt_id} has {len(context)} tokens; sampling."
                       f"max_trajectory_tokens = {settings.max_trajectory_tokens} leaves no room for an action")
    # An episode ended from outside has no outcome yet: 0, unless the environment gave one. Ended by the environment
    # itself, a missing reward means that it could not be scored.
    is_unfinished = is_cut and step.reward is None
    reward = 0.0 if is_unfinished else reward_value(step.reward, prompt.prompt_id, settings.reward_key)
    return assemble(prompt, turns, reward=reward, is_cut=is_cut, started_s=started_s, finished_s=time.time(),
                    metrics={name: float(value) for name, value in metrics.items()})


def _prompt_ids(prompt: Prompt, chat: Chat, start: str | list[Message]) -> list[int]:
    try:
        return chat.prompt_ids(start)
    except DataError as error:
        raise DataError(f"{prompt.prompt_id}: {error}") from error


async def _bounded[Answer](answer: Awaitable[Answer], prompt: Prompt, settings: EpisodeSettings) -> Answer:
    try:
        return await asyncio.wait_for(answer, settings.environment_timeout_s)
    except asyncio.TimeoutError as error:
        raise Unscored("environment_timeout", f"the environment {prompt.environment} did not answer {prompt.prompt_id} "
                       f"within {settings.environment_timeout_s:g} s") from error
