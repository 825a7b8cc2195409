"""Turns put together into one Trajectory, and raw rewards turned into numbers.

Invariants: every token gets its place from recorded lengths, never from looking for an end or pad id; tokens that
nobody sampled (observations, an appended end-of-turn) are off the mask and carry no log-prob and no version.
"""

import math
import numbers
from typing import Any

import numpy as np

from megatron_sao.errors import DataError, SaoError
from megatron_sao.records import NO_VERSION, Prompt, Trajectory, Turn


LARGEST_REWARD = float(np.finfo(np.float32).max)  # rewards travel as float32; beyond it they would become infinite


class Unscored(SaoError):
    """The episode gives nothing to train on; it is dropped and counted under `reason`, never given a reward of 0."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason  # "unscored" | "prompt_too_long" | "environment_timeout"


def reward_value(raw: Any, prompt_id: str, reward_key: str = "") -> float:
    """A raw outcome reward as a float.

    Args:
        raw: a number or bool; a dict of which `reward_key` is one; None, NaN or infinite (in float32) = could not be
            scored.
        prompt_id: names the sample in errors.
        reward_key: which entry of a dict is the reward; "" = no dict is expected.
    Raises:
        Unscored: None, NaN or infinite.
        DataError: anything else (text, a list, a dict without the key).
    """
    if isinstance(raw, dict):
        if not reward_key or reward_key not in raw:
            raise DataError(f"the reward of {prompt_id} is a dict with the keys {sorted(map(str, raw))}; "
                            f"task.reward_key = {reward_key!r} must name one of them")
        raw = raw[reward_key]
    if raw is None:
        raise Unscored("unscored", f"{prompt_id} has no reward")
    if not isinstance(raw, (numbers.Real, np.bool_)):
        raise DataError(f"the reward of {prompt_id} is {raw!r} ({type(raw).__name__}); it must be a number or a bool")
    try:
        value = float(raw)
    except OverflowError:  # a whole number of more than 308 digits
        value = math.inf
    if not abs(value) <= LARGEST_REWARD:
        raise Unscored("unscored", f"the reward of {prompt_id} is {value}")
    return value


def assemble(
    prompt: Prompt,
    turns: list[Turn],
    *,
    reward: float,
    is_cut: bool,
    started_s: float,
    finished_s: float,
    metrics: dict[str, float] | None = None,
) -> Trajectory:
    """One flat trajectory of T tokens: for each turn observation, action, suffix.

    reward_t holds the outcome on the last action token of all and each turn's own reward on the last action token of
    that turn (their sum where both fall on one token).

    Args:
        turns: in order; each with at least one action token.
        reward: outcome, finite.
    Raises:
        DataError: no turn, a turn without action tokens, unequal lengths, spans that leave a gap, a reward that is
            not finite.
    """
    if not turns:
        raise DataError(f"{prompt.prompt_id} has no turn to train on")
    if not math.isfinite(reward):
        raise DataError(f"the reward of {prompt.prompt_id} is {reward}; unscored episodes are dropped, not assembled")
    num_tokens = sum(len(t.observation_ids) + len(t.action_ids) + len(t.suffix_ids) for t in turns)
    token_ids = np.zeros(num_tokens, dtype=np.int64)
    action_mask = np.zeros(num_tokens, dtype=bool)
    logp_sampler = np.zeros(num_tokens, dtype=np.float32)
    reward_t = np.zeros(num_tokens, dtype=np.float32)
    version_t = np.full(num_tokens, NO_VERSION, dtype=np.int32)
    turn_t = np.zeros(num_tokens, dtype=np.int32)
    position = 0
    for index, turn in enumerate(turns):
        _check_turn(turn, f"{prompt.prompt_id} turn {index}")
        start = position
        first = start + len(turn.observation_ids)
        last = first + len(turn.action_ids) - 1
        position = last + 1 + len(turn.suffix_ids)
        token_ids[start:position] = turn.observation_ids + turn.action_ids + turn.suffix_ids
        turn_t[start:position] = index
        action_mask[first : last + 1] = True
        logp_sampler[first : last + 1] = turn.logp_sampler
        for span in turn.version_spans:
            version_t[first + span.start : first + span.end] = span.policy_version
        reward_t[last] += turn.reward or 0.0
    reward_t[last] += reward
    return Trajectory(
        prompt=prompt, token_ids=token_ids, action_mask=action_mask, logp_sampler=logp_sampler, reward_t=reward_t,
        version_t=version_t, turn_t=turn_t, reward=reward, is_cut=is_cut, started_s=started_s, finished_s=finished_s,
        metrics=metrics or {},
    )


def _check_turn(turn: Turn, where: str) -> None:
    num_actions = len(turn.action_ids)
    if num_actions == 0:
        raise DataError(f"{where} has no action token")
    if len(turn.logp_sampler) != num_actions:
        raise DataError(f"{where} has {num_actions} action tokens but {len(turn.logp_sampler)} log-probs")
    if turn.reward is not None and not math.isfinite(turn.reward):
        raise DataError(f"{where} has the turn reward {turn.reward}; it must be finite, or None for no reward")
    end = 0
    for span in turn.version_spans:
        if span.start != end or span.end <= span.start:
            raise DataError(f"{where}: the version spans {turn.version_spans} do not tile its {num_actions} tokens")
        end = span.end
    if end != num_actions:
        raise DataError(f"{where}: the version spans {turn.version_spans} do not tile its {num_actions} tokens")
