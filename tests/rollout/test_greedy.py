"""Greedy continuations: asked one at a time, and compared token by token."""

import asyncio

from megatron_sao.records import VersionSpan
from megatron_sao.rollout.engine_client import Sample
from megatron_sao.rollout.greedy import Continuation, compare, continue_greedily


class OneAtATime:
    """Answers each context with its length; fails when asked again before it has answered."""

    def __init__(self) -> None:
        self.is_busy = False
        self.settings = []

    async def generate(self, token_ids, **settings):
        assert not self.is_busy
        self.is_busy = True
        await asyncio.sleep(0)
        self.is_busy = False
        self.settings.append(settings)
        return Sample([len(token_ids)], [-0.5], "stop", [VersionSpan(0, 1, 0)])


def test_prompts_are_continued_in_order_one_at_a_time():
    engine = OneAtATime()
    found = asyncio.run(continue_greedily(engine, [[7], [7, 8]], max_tokens=5, stop_token_ids=[1]))
    assert found == [Continuation([7], [1], [-0.5]), Continuation([7, 8], [2], [-0.5])]
    assert engine.settings == 2 * [{"max_tokens": 5, "temperature": 0.0, "stop_token_ids": [1]}]


def test_equal_outputs_are_counted_and_log_probs_compared_up_to_the_first_difference():
    ours = [Continuation([1], [5, 6, 7], [-0.1, -0.2, -0.3]), Continuation([2], [5], [-1.0])]
    theirs = [Continuation([1], [5, 9, 7], [-0.125, -9.0, -9.0]), Continuation([2], [5], [-1.0])]
    num_equal, difference = compare(ours, theirs)
    assert num_equal == 1
    assert abs(difference - 0.025) < 1e-12


def test_an_output_that_stops_sooner_is_another_one():
    assert compare([Continuation([1], [5, 6], [-0.1, -0.2])], [Continuation([1], [5], [-0.1])]) == (0, 0.0)
