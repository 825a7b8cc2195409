"""Greedy continuations of a few prompts, to tell whether two engines hold the same weights.

A run leaves those of its last push in `greedy.json`; `tools/check_export.py` compares them with a fresh engine's.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from megatron_sao.rollout.engine_client import Sample

GREEDY_FILE = "greedy.json"
MAX_PROMPTS = 32
MAX_TOKENS = 32


class Engine(Protocol):
    """An EngineClient or an EnginePool."""

    async def generate(self, token_ids: list[int], *, max_tokens: int, temperature: float,
                       stop_token_ids: Sequence[int]) -> Sample: ...  # fmt: skip


class Continuation(msgspec.Struct, frozen=True):
    """What the likeliest tokens are, one after another."""

    prompt_ids: list[int]
    output_ids: list[int]
    logp: list[float]  # one per output token


class GreedyRecord(msgspec.Struct, frozen=True):
    """The content of `greedy.json`."""

    policy_version: int
    max_tokens: int
    stop_token_ids: list[int]
    continuations: list[Continuation]


async def continue_greedily(
    engine: Engine, prompts: Sequence[list[int]], *, max_tokens: int, stop_token_ids: Sequence[int]
) -> list[Continuation]:
    """The continuation of each prompt, in order.

    One request at a time: the same requests then make the same batches, so that equal weights give equal bits.
    Raises: EngineError, DataError.
    """
    continuations = []
    for prompt_ids in prompts:
        sample = await engine.generate(
            prompt_ids, max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop_token_ids
        )
        continuations.append(Continuation(prompt_ids, sample.token_ids, sample.logp))
    return continuations


def compare(ours: Sequence[Continuation], theirs: Sequence[Continuation]) -> tuple[int, float]:
    """(how many outputs are equal, largest difference of log-probs over the tokens that are equal from the start)."""
    num_equal, max_logp_diff = 0, 0.0
    for mine, other in zip(ours, theirs, strict=True):
        num_equal += mine.output_ids == other.output_ids
        for my_id, other_id, my_logp, other_logp in zip(mine.output_ids, other.output_ids, mine.logp, other.logp):
            if my_id != other_id:
                break
            max_logp_diff = max(max_logp_diff, abs(my_logp - other_logp))
    return num_equal, max_logp_diff
