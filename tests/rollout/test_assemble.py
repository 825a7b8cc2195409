"""Turns to trajectories and raw rewards to numbers (GAE-08, TOK-04, INP-02 and their kind)."""

import math

import numpy as np
import pytest

from megatron_sao.errors import DataError
from megatron_sao.records import NO_VERSION, Trajectory, Turn, VersionSpan, decode, encode
from megatron_sao.rollout.assemble import Unscored, assemble, reward_value


def turn(observation_ids, action_ids, logp=None, spans=None, **rest) -> Turn:
    return Turn(
        observation_ids=observation_ids, action_ids=action_ids,
        logp_sampler=[-0.5] * len(action_ids) if logp is None else logp,
        version_spans=[VersionSpan(0, len(action_ids), 0)] if spans is None else spans, stop_reason="stop", **rest)


def put_together(prompt, turns, reward=1.0, **rest) -> Trajectory:
    return assemble(prompt, turns, reward=reward, is_cut=False, started_s=1.0, finished_s=2.0, **rest)


def test_the_reward_stands_where_the_recorded_length_says(prompt):  # GAE-08: EOS = PAD = 2
    got = put_together(prompt, [turn([10], [11, 12, 2])])
    assert got.token_ids.tolist() == [10, 11, 12, 2]
    assert got.reward_t.tolist() == [0, 0, 0, 1]
    assert got.action_mask.tolist() == [False, True, True, True]
    # An end token in the middle or a pad id as action changes nothing either.
    got = put_together(prompt, [turn([2, 2], [2, 11, 0, 2, 2])])
    assert got.reward_t.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert got.action_mask.sum() == 5


def test_an_appended_end_of_turn_is_context_only(prompt):  # TOK-04
    got = put_together(prompt, [turn([], [7, 8], [-0.1, -0.2], suffix_ids=[2])])
    assert got.token_ids.tolist() == [7, 8, 2]
    assert got.action_mask.tolist() == [True, True, False]
    assert got.reward_t.tolist() == [0, 1, 0]
    np.testing.assert_allclose(got.logp_sampler, [-0.1, -0.2, 0.0], rtol=1e-6)
    assert got.version_t.tolist() == [0, 0, NO_VERSION]


def test_two_turns_with_rewards_versions_and_turn_numbers(prompt):
    got = put_together(prompt, [
        turn([1, 2], [3, 4, 5], [-0.1, -0.2, -0.3], [VersionSpan(0, 2, 7), VersionSpan(2, 3, 8)], reward=0.25),
        turn([6], [7, 8], [-0.4, -0.5], [VersionSpan(0, 2, 8)], reward=0.5),
    ], reward=1.0, metrics={"tool_calls": 1.0})
    assert got.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert got.turn_t.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert got.version_t.tolist() == [-1, -1, 7, 7, 8, -1, 8, 8]
    assert got.reward_t.tolist() == [0, 0, 0, 0, 0.25, 0, 0, 1.5]
    assert got.reward == 1.0 and got.oldest_version == 7 and got.num_action_tokens == 5
    back = decode(encode(got), Trajectory)
    assert back.token_ids.tolist() == got.token_ids.tolist() and back.metrics == {"tool_calls": 1.0}


@pytest.mark.parametrize("bad", [
    [],
    [turn([1], [])],
    [turn([1], [2, 3], [-0.1])],
    [turn([1], [2, 3], [-0.1, -0.2, -0.3])],
    [turn([1], [2, 3], spans=[])],
    [turn([1], [2, 3], spans=[VersionSpan(0, 1, 0)])],
    [turn([1], [2, 3], spans=[VersionSpan(0, 3, 0)])],
    [turn([1], [2, 3], spans=[VersionSpan(0, 1, 0), VersionSpan(0, 2, 0)])],
    [turn([1], [2, 3], spans=[VersionSpan(1, 2, 0)])],
    [turn([1], [2, 3], spans=[VersionSpan(0, 2, 0), VersionSpan(2, 2, 1)])],
    [turn([1], [2], reward=math.nan)],
])
def test_malformed_turns_are_refused(prompt, bad):
    with pytest.raises(DataError, match=prompt.prompt_id):
        put_together(prompt, bad)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_never_gets_into_a_trajectory(prompt, reward):
    with pytest.raises(DataError):
        put_together(prompt, [turn([1], [2])], reward=reward)


@pytest.mark.parametrize(("raw", "value"), [
    (1, 1.0), (0.5, 0.5), (-2, -2.0), (0, 0.0), (True, 1.0), (False, 0.0), (np.float32(0.25), 0.25),
    (np.int64(3), 3.0), (np.bool_(True), 1.0),
])
def test_numbers_and_bools_are_rewards(raw, value):  # INP-02
    got = reward_value(raw, "train/e0/1")
    assert type(got) is float and got == value


@pytest.mark.parametrize("raw", [None, math.nan, math.inf, -math.inf, np.float32("nan"), -1e39, 10**400])
def test_no_reward_is_unscored_never_zero(raw):  # INP-02
    with pytest.raises(Unscored) as caught:
        reward_value(raw, "train/e0/1")
    assert caught.value.reason == "unscored"
    with pytest.raises(Unscored):
        reward_value({"score": raw}, "train/e0/1", "score")


@pytest.mark.parametrize("raw", ["0.5", "", b"1", [1.0], (1.0,), {"score": 0.5}, {}, 1j, np.array([1.0]), object()])
def test_other_types_are_errors_that_name_the_sample(raw):  # INP-02
    with pytest.raises(DataError, match="train/e0/1"):
        reward_value(raw, "train/e0/1")


def test_a_dict_needs_the_key_that_the_config_names():  # INP-02
    assert reward_value({"score": 0.5, "fmt": 1}, "p", "score") == 0.5
    with pytest.raises(DataError, match="fmt"):
        reward_value({"fmt": 1}, "p", "score")
    with pytest.raises(DataError):
        reward_value({"score": "0.5"}, "p", "score")
    with pytest.raises(DataError):
        reward_value({"score": {"score": 1}}, "p", "score")
    assert reward_value(0.5, "p", "score") == 0.5  # a plain number needs no key
