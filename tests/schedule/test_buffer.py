"""What a step takes, what stays, what is stale."""

import asyncio
import random

import numpy as np
import pytest

from megatron_sao.errors import ProtocolError
from megatron_sao.schedule.buffer import Buffer
from tests.schedule.support import make_trajectory


def names(trajectories) -> list[str]:
    return [trajectory.prompt.prompt_id for trajectory in trajectories]


def filled(*trajectories) -> Buffer:
    buffer = Buffer()
    for trajectory in trajectories:
        buffer.put(trajectory)
    return buffer


def test_surplus_stays_in_order():  # ASY-05
    buffer = filled(*[make_trajectory(f"g{i}") for i in range(7)])
    taken, stale = buffer.take(4, policy_version=0, max_staleness=4)
    assert (names(taken), stale, len(buffer)) == (["g0", "g1", "g2", "g3"], [], 3)
    buffer.put(make_trajectory("g7"))
    taken, _ = buffer.take(4, policy_version=0, max_staleness=4)
    assert names(taken) == ["g4", "g5", "g6", "g7"]


def test_too_few_takes_nothing_and_loses_nothing():
    buffer = filled(*[make_trajectory(f"g{i}") for i in range(3)])
    assert buffer.take(4, policy_version=0, max_staleness=4) == ([], [])
    assert len(buffer) == 3


def test_staleness_is_measured_by_the_oldest_token_when_consumed():  # WSY-12
    # 57 tokens by version 7, then 71 by version 8: at version 9 it is 2 old, however new its end is.
    trajectory = make_trajectory("mixed", versions=(7,) * 57 + (8,) * 71)
    assert trajectory.oldest_version == 7
    assert names(filled(trajectory).take(1, policy_version=9, max_staleness=2)[0]) == ["mixed"]
    taken, stale = filled(trajectory).take(1, policy_version=9, max_staleness=1)
    assert (taken, names(stale)) == ([], ["mixed"])


def test_the_same_trajectory_is_dropped_after_two_more_pushes():
    buffer = filled(make_trajectory("g", versions=(3,)))
    assert buffer.take(2, policy_version=4, max_staleness=2) == ([], [])  # fresh, but one is not enough
    taken, stale = buffer.take(1, policy_version=6, max_staleness=2)
    assert (taken, names(stale), len(buffer)) == ([], ["g"], 0)


def test_observation_tokens_have_no_say_in_freshness():
    trajectory = make_trajectory("g", versions=(5, 5), num_observation=3)
    assert names(filled(trajectory).take(1, policy_version=5, max_staleness=0)[0]) == ["g"]


def test_a_trajectory_from_the_future_is_an_error_and_loses_nothing():
    buffer = filled(make_trajectory("a", versions=(0,)), make_trajectory("b", versions=(57,)))
    with pytest.raises(ProtocolError, match="-56"):
        buffer.take(1, policy_version=1, max_staleness=2)
    assert len(buffer) == 2


def test_random_runs_account_for_every_trajectory():  # ASY-05
    for seed in range(20):
        rng = random.Random(seed)
        buffer, version, issued, taken_names, stale_names = Buffer(), 0, [], [], []
        for i in range(200):
            match rng.randrange(3):
                case 0 | 1:
                    issued.append(f"p{i}")
                    buffer.put(make_trajectory(f"p{i}", versions=(max(0, version - rng.randrange(4)), version)))
                case 2:
                    taken, stale = buffer.take(rng.randint(1, 8), version, max_staleness=2)
                    taken_names += names(taken)
                    stale_names += names(stale)
                    version += bool(taken)
        left, stale = buffer.take(max(len(buffer), 1), version, max_staleness=10**6)
        assert sorted(taken_names + stale_names + names(left + stale)) == sorted(issued)


def test_arrival_wakes_a_waiting_step_and_is_bounded():
    async def run():
        buffer = filled(make_trajectory("before"))
        assert not await buffer.arrival(0.01)  # what was there before the call is no arrival
        asyncio.get_running_loop().call_soon(buffer.put, make_trajectory("after"))
        assert await buffer.arrival(5.0)

    asyncio.run(run())


def test_arrays_are_untouched():
    trajectory = make_trajectory("g", versions=(0, 1))
    before = trajectory.token_ids.copy()
    (taken,), _ = filled(trajectory).take(1, policy_version=1, max_staleness=1)
    assert taken is trajectory
    assert np.array_equal(taken.token_ids, before)
