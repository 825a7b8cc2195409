"""What is reported about a batch, by hand."""

import pytest

from megatron_sao.errors import ProtocolError
from megatron_sao.schedule.statistics import batch_metrics, pass_rate
from tests.schedule.support import make_trajectory


def test_two_trajectories_by_hand():
    first = make_trajectory("a", versions=(3, 4, 5), reward=1.0, metrics={"tool_calls": 1})
    reported = {"tool_calls": 2, "x": 3}
    second = make_trajectory("b", versions=(5,), reward=0.0, num_observation=2, is_cut=True, metrics=reported)
    metrics = batch_metrics([first, second], policy_version=5)
    assert metrics["rollout/reward_mean"] == 0.5
    assert metrics["rollout/pass_rate"] == 0.5
    assert metrics["rollout/action_tokens_mean"] == 2.0
    assert metrics["rollout/tokens_mean"] == 3.5
    assert metrics["rollout/num_turns_mean"] == 1.0
    assert metrics["rollout/cut_fraction"] == 0.5
    assert metrics["rollout/seconds_mean"] == 1.0
    assert (metrics["lag/mean"], metrics["lag/max"]) == (1.0, 2.0)  # oldest tokens: 2 and 0
    assert metrics["lag/share_ge1"] == 0.5  # versions 3 and 4 of four action tokens
    assert metrics["environment/tool_calls"] == 1.5
    assert metrics["environment/x"] == 3.0  # of those that report it


def test_a_token_from_the_future_is_an_error():
    with pytest.raises(ProtocolError, match="-1"):
        batch_metrics([make_trajectory("a", versions=(3, 6))], policy_version=5)


def test_pass_rate_needs_full_reward():
    assert pass_rate([1.0, 0.99, 0.0, 2.0]) == 0.5
    with pytest.raises(ValueError):
        pass_rate([])
