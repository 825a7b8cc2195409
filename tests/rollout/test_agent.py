"""Whole episodes with a scripted engine (TOK-01, TOK-04, INP-04, INP-02, GAE-08 and their kind)."""

import asyncio
import math
from dataclasses import replace

import pytest

from megatron_sao.errors import DataError
from megatron_sao.records import Prompt, VersionSpan
from megatron_sao.rollout.agent import EpisodeSettings, request_seed, room_tokens, run_episode
from megatron_sao.rollout.assemble import Unscored
from megatron_sao.rollout.calculator import Calculator
from megatron_sao.rollout.demonstration import demonstrate
from megatron_sao.rollout.engine_client import Sample
from megatron_sao.rollout.environment import EnvStep

SETTINGS = EpisodeSettings(max_tokens_per_turn=16, max_turns=4, max_trajectory_tokens=128)


class Script:
    """An engine that writes given actions and remembers what it was asked."""

    def __init__(self, *actions, stop_reasons=()):
        self.actions = list(actions)
        self.stop_reasons = list(stop_reasons)
        self.requests = []

    async def generate(self, token_ids, **settings):
        self.requests.append((list(token_ids), settings))
        action = self.actions.pop(0)[: settings["max_tokens"]]
        reason = self.stop_reasons.pop(0) if self.stop_reasons else "stop"
        version = len(self.requests)
        return Sample(action, [-0.5] * len(action), reason, [VersionSpan(0, len(action), version)])


class Scripted:
    """An environment that answers with given steps."""

    domain = "agentic"
    observation_role = "tool"

    def __init__(self, *steps, start="hello"):
        self.steps = list(steps)
        self.first = start
        self.seen = []

    def start(self, task):
        return self

    async def begin(self):
        return self.first

    async def step(self, action, stop_reason):
        self.seen.append((action, stop_reason))
        return self.steps.pop(0)


def play(prompt, environment, engine, chat, **changes):
    return asyncio.run(run_episode(prompt, environment, engine, chat, replace(SETTINGS, **changes)))


def test_the_next_prompt_is_what_was_there_and_what_was_sampled(prompt, merging_chat):  # TOK-01
    engine = Script([1, 2, 13], [12, 13])
    environment = Scripted(EnvStep("ok"), EnvStep(None, reward=1), start=[{"role": "user", "content": "ok"}])
    got = play(prompt, environment, engine, merging_chat)
    first = [10, 12, 13, 14]
    second = [*first, 1, 2, 13, 11, 12, 13, 14]
    assert [ids for ids, _ in engine.requests] == [first, second]
    assert got.token_ids.tolist() == [*second, 12, 13]
    assert got.action_mask.astype(int).tolist() == [0] * 4 + [1] * 3 + [0] * 4 + [1] * 2
    assert got.version_t.tolist() == [-1] * 4 + [1] * 3 + [-1] * 4 + [2] * 2
    assert got.reward_t.tolist() == [0.0] * 12 + [1.0]
    assert environment.seen == [("hello", "stop"), ("ok", "stop")]
    assert not got.is_cut


def test_a_whole_calculator_episode(prompt, chat):
    engine = Script(chat.action_ids("[12+34]"), chat.action_ids("46"))
    got = play(prompt, Calculator(), engine, chat, seed=5, temperature=0.7)
    text = "<user>12+34=<end><assistant>[12+34]<end><tool>46<end><assistant>46<end>"
    assert chat.tokenizer.decode(got.token_ids) == text
    assert (got.reward, got.is_cut, got.metrics) == (1.0, False, {"tool_calls": 1.0})
    assert got.num_action_tokens == len("[12+34]") + 1 + len("46") + 1
    assert got.started_s <= got.finished_s
    settings = [s for _, s in engine.requests]
    assert all(s["stop_token_ids"] == [chat.end_of_turn_id] and s["temperature"] == 0.7 for s in settings)
    assert settings[0]["seed"] != settings[1]["seed"]


def test_an_open_turn_is_closed_with_ids_off_the_mask(prompt, chat):  # TOK-04
    engine = Script(chat.action_ids("a")[:-1], chat.action_ids("b"))
    got = play(prompt, Scripted(EnvStep("x"), EnvStep(None, reward=1), start="q"), engine, chat)
    assert chat.tokenizer.decode(got.token_ids) == "qa<end><tool>x<end><assistant>b<end>"
    assert got.action_mask.astype(int).tolist() == [0, 1, 0, 0, 0, 0, 0, 1, 1]
    assert got.turn_t.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("num_tokens", "asked"), [(200, 56), (255, 1), (256, 0), (273, 0), (0, 100)])
def test_room(num_tokens, asked):  # INP-04
    assert room_tokens(num_tokens, EpisodeSettings(100, 4, 256)) == asked


@pytest.mark.parametrize(("length", "asked"), [(200, 56), (255, 1)])
def test_the_engine_is_asked_for_what_fits(prompt, chat, length, asked):  # INP-04
    engine = Script(chat.action_ids("1" * 99))
    environment = Scripted(EnvStep(None, reward=1), start="1" * length)
    play(prompt, environment, engine, chat, max_tokens_per_turn=100, max_trajectory_tokens=256)
    assert engine.requests[0][1]["max_tokens"] == asked


@pytest.mark.parametrize("length", [256, 273])
def test_a_prompt_without_room_sends_no_request(prompt, chat, length):  # INP-04
    engine = Script()
    with pytest.raises(Unscored) as caught:
        play(prompt, Scripted(start="1" * length), engine, chat, max_trajectory_tokens=256)
    assert caught.value.reason == "prompt_too_long" and engine.requests == []


def test_no_room_for_another_turn_keeps_the_earlier_ones(prompt, chat):  # INP-04
    engine = Script(chat.action_ids("[12+34]"))
    long_answer = Scripted(EnvStep("9" * 200), start="q")
    got = play(prompt, long_answer, engine, chat)
    assert chat.tokenizer.decode(got.token_ids) == "q[12+34]<end>"
    assert (got.reward, got.is_cut, len(engine.requests)) == (0.0, True, 1)


def test_an_empty_prompt_is_refused_by_name(prompt, chat):  # INP-04
    with pytest.raises(DataError, match="train/e0/17.*empty"):
        play(prompt, Scripted(start=""), Script(), chat)


def test_the_turn_limit_cuts(prompt, chat):
    engine = Script(*[chat.action_ids("[1+1]")] * 3)
    got = play(prompt, Calculator(), engine, chat, max_turns=3)
    assert (got.reward, got.is_cut, got.metrics["tool_calls"], len(engine.requests)) == (0.0, True, 3.0, 3)
    assert chat.tokenizer.decode(got.token_ids).endswith("[1+1]<end>")


def test_cut_comes_from_the_stop_reason(prompt, chat):
    cut = Script(chat.action_ids("46"), stop_reasons=["length"])
    got = play(prompt, Calculator(), cut, chat)
    assert got.is_cut and got.reward == 0.0
    # The same ids, width and length, but ended by the sampler itself.
    got = play(prompt, Calculator(), Script(chat.action_ids("46")), chat)
    assert not got.is_cut and got.reward == 1.0


def test_a_cut_action_is_the_last_one_and_keeps_the_reward_it_was_given(prompt, chat):
    engine = Script(chat.action_ids("aa"), stop_reasons=["length"])
    got = play(prompt, Scripted(EnvStep("go on", reward=0.25), start="q"), engine, chat)
    assert (got.is_cut, got.reward, len(engine.requests)) == (True, 0.25, 1)
    assert got.token_ids.tolist()[-1] == chat.end_of_turn_id  # nothing was appended


@pytest.mark.parametrize("raw", [None, math.nan])
def test_an_ended_episode_without_a_reward_is_unscored(prompt, chat, raw):  # INP-02
    with pytest.raises(Unscored) as caught:
        play(prompt, Scripted(EnvStep(None, reward=raw)), Script(chat.action_ids("a")), chat)
    assert caught.value.reason == "unscored"


def test_a_reward_of_the_wrong_type_names_the_sample(prompt, chat):  # INP-02
    with pytest.raises(DataError, match="train/e0/17"):
        play(prompt, Scripted(EnvStep(None, reward="1")), Script(chat.action_ids("a")), chat)
    scored = Scripted(EnvStep(None, reward={"score": 0.5, "style": 1}))
    assert play(prompt, scored, Script(chat.action_ids("a")), chat, reward_key="score").reward == 0.5


def test_turn_rewards_stand_on_their_turns(prompt, chat):
    steps = EnvStep("x", turn_reward=0.5), EnvStep(None, reward=1.0, turn_reward=0.25)
    got = play(prompt, Scripted(*steps, start="q"), Script(chat.action_ids("a"), chat.action_ids("b")), chat)
    assert got.reward_t[got.reward_t != 0].tolist() == [0.5, 1.25]
    assert got.reward_t[2] == 0.5 and got.reward == 1.0


def test_a_turn_reward_is_checked_like_an_outcome(prompt, chat):  # INP-02
    def play_one(turn_reward):
        return play(prompt, Scripted(EnvStep(None, 1.0, turn_reward)), Script(chat.action_ids("a")), chat)

    with pytest.raises(Unscored) as caught:
        play_one(math.nan)
    assert caught.value.reason == "unscored"
    with pytest.raises(DataError, match="train/e0/17"):
        play_one("1")
    assert play_one(True).reward_t.sum() == 2.0


def test_an_environment_that_does_not_answer_drops_the_episode(prompt, chat):
    class Stuck(Scripted):
        async def step(self, action, stop_reason):
            await asyncio.sleep(30)

    with pytest.raises(Unscored) as caught:
        play(prompt, Stuck(), Script(chat.action_ids("a")), chat, environment_timeout_s=0.05)
    assert caught.value.reason == "environment_timeout"


def test_episodes_of_one_environment_do_not_disturb_each_other(chat):
    environment = Calculator(max_digits=3)

    async def one(number):
        task = {"prompt": f"{number}+1=", "answer": str(number + 1)}
        prompt = Prompt(prompt_id=f"train/e0/{number}", environment="calculator", domain="agentic", task=task)
        engine = Script(*[chat.action_ids(text) for text in environment.demonstration(task)])
        return await run_episode(prompt, environment, engine, chat, SETTINGS)

    async def many():
        return await asyncio.gather(*(one(number) for number in range(20)))

    assert [t.reward for t in asyncio.run(many())] == [1.0] * 20


def test_request_seeds():
    seeds = {request_seed(1, f"train/e0/{i}", turn) for i in range(100) for turn in range(3)}
    assert len(seeds) == 300 and all(0 <= s < 2**31 for s in seeds)
    assert request_seed(1, "a", 0) == request_seed(1, "a", 0) != request_seed(2, "a", 0)
    assert request_seed(None, "a", 0) is None


def test_a_demonstration_is_the_episode_that_its_actions_give(prompt, chat):
    environment = Calculator()
    shown = asyncio.run(demonstrate(environment, prompt.task, chat))
    played = play(prompt, environment, Script(chat.action_ids("[12+34]"), chat.action_ids("46")), chat)
    assert shown.token_ids.tolist() == played.token_ids.tolist()
    assert shown.action_mask.tolist() == played.action_mask.tolist()
    assert shown.reward == 1.0


def test_a_demonstration_closes_its_turns_as_the_template_does(prompt, glm_chat):
    shown = asyncio.run(demonstrate(Calculator(), prompt.task, glm_chat))
    whole = "[gMASK]<|user|>12+34=<|assistant|>[12+34]<|observation|>46<|assistant|>46<|user|>"
    assert glm_chat.tokenizer.decode(shown.token_ids) == whole
    sampled = glm_chat.tokenizer.decode(shown.token_ids[shown.action_mask])
    assert sampled == "[12+34]<|observation|>46<|user|>"
