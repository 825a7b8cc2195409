"""The registry, the calculator, and reasoning-gym through the same protocol."""

import asyncio
import random

import pytest

from megatron_sao.errors import ConfigError, DataError
from megatron_sao.rollout.calculator import Calculator, calculate
from megatron_sao.rollout.demonstration import demonstrate
from megatron_sao.rollout.environment import EnvStep, generated_task, make_environment, split_of

TASK = {"prompt": "12+34=", "answer": "46"}


def answer(action: str, stop_reason: str = "stop", **params) -> EnvStep:
    return asyncio.run(Calculator(**params).start(TASK).step(action, stop_reason))


@pytest.mark.parametrize(("expression", "value"), [
    ("12+34", "46"), ("3-12", "-9"), ("12*12", "144"), ("007+1", "8"), ("0*5", "0"), ("999999999+1", "1000000000"),
    ("1000000000+1", None), ("12", None), ("", None), ("12+", None), ("1+2+3", None), ("12 + 3", None), ("-1+2", None),
    ("2**9", None), ("1/2", None), ("\u0661+1", None), ("1+1\n", None), ("__import__('os')", None),
])
def test_calculate(expression, value):
    assert calculate(expression) == value


def test_a_call_is_answered_and_an_answer_is_scored():
    assert answer("[12+34]") == EnvStep("46", metrics={"tool_calls": 1.0})
    assert answer("[1+1]").observation == "2"  # the tool computes what it is asked, not what was right
    assert answer("46") == EnvStep(None, reward=1.0)
    assert answer(" 46 ").reward == 1.0
    for wrong in ("47", "", "046", "46.0", "4 6", "46 47", "46<pad>"):
        assert answer(wrong) == EnvStep(None, reward=0.0)


@pytest.mark.parametrize("action", [
    "[12+34", "12+34]", "[12++34]", "[]", "x[12+34]", "[12+34][1+1]", "[12+34]46", "[["])
def test_a_malformed_call_ends_the_episode_with_nothing(action):
    assert answer(action) == EnvStep(None, reward=0.0, metrics={"malformed_calls": 1.0})
    assert answer(action, retry_malformed=True) == EnvStep("error", metrics={"malformed_calls": 1.0})


def test_a_cut_action_is_no_answer():
    assert answer("46", "length").reward == 0.0
    assert answer("[12+34]", "length").observation is None


def test_calculator_tasks_are_as_the_settings_say():
    environment = make_environment("calculator", {"min_digits": 2, "max_digits": 3, "operators": "+*"})
    prompts = [environment.draw(random.Random(i))["prompt"] for i in range(300)]
    assert all(prompt[-1] == "=" and calculate(prompt[:-1]) for prompt in prompts)
    assert {len(part) for prompt in prompts for part in prompt[:-1].replace("*", "+").split("+")} == {2, 3}
    assert {"+", "*"} == {c for prompt in prompts for c in prompt} - set("0123456789=")


@pytest.mark.parametrize("params", [
    {"min_digits": 0}, {"max_digits": 10}, {"min_digits": 3, "max_digits": 2}, {"min_digits": True},
    {"max_digits": 2.0}, {"max_digits": "2"}, {"operators": ""}, {"operators": "/"}, {"operators": ["+"]},
    {"retry_malformed": 1},
])
def test_calculator_settings_out_of_range_are_refused(params):
    with pytest.raises(ConfigError, match="task.params"):
        make_environment("calculator", params)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean calculator"):
        make_environment("calculater")
    with pytest.raises(ConfigError, match="did you mean max_digits"):
        make_environment("calculator", {"max_digit": 2})
    with pytest.raises(ConfigError, match="cannot be imported"):
        make_environment("no_such_module:Thing")
    with pytest.raises(ConfigError, match="cannot be imported"):
        make_environment("megatron_sao.rollout.calculator:Thing")


def test_an_environment_from_elsewhere_needs_no_registry():
    assert make_environment("megatron_sao.rollout.calculator:Calculator", {"max_digits": 3}) == Calculator(max_digits=3)


def test_a_task_without_its_answer_is_refused():
    for task in ({"prompt": "1+1="}, {"prompt": "1+1=", "answer": 2}):
        with pytest.raises(DataError, match="answer"):
            Calculator().start(task)


def test_generated_tasks_are_repeatable_and_on_their_side():
    environment = Calculator()
    for split in ("train", "eval"):
        tasks = [generated_task(environment, split, i, 7) for i in range(50)]
        assert tasks == [generated_task(environment, split, i, 7) for i in range(50)]
        assert {split_of(task) for task in tasks} == {split}


@pytest.fixture(scope="module")
def sums():
    return make_environment("reasoning_gym", {
        "dataset": "chain_sum", "prompt_key": "expression",
        "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}})


def test_reasoning_gym_scores_with_its_own_scorer(sums, chat):
    task = generated_task(sums, "train", 0, 1)
    assert task == generated_task(sums, "train", 0, 1)
    assert set(task) == {"prompt", "answer", "item"}
    shown = asyncio.run(demonstrate(sums, task, chat))
    assert shown.reward == 1.0 and not shown.is_cut and shown.prompt.domain == "reasoning"
    assert chat.tokenizer.decode(shown.token_ids) == f"<user>{task['prompt']}<end><assistant>{task['answer']}<end>"
    assert sums.score(task, "no idea") == 0.0 and sums.score(task, "") == 0.0
    step = asyncio.run(sums.start(task).step(task["answer"], "length"))
    assert step.observation is None and step.reward == 0.0


def test_reasoning_gym_answers_inside_a_tag():
    tagged = make_environment("reasoning_gym", {"dataset": "chain_sum", "answer_tag": "answer"})
    task = generated_task(tagged, "eval", 3, 1)
    right = task["answer"]
    assert tagged.demonstration(task) == [f"<answer>{right}</answer>"]
    assert tagged.score(task, f"5 <answer>no</answer> so <answer> {right} </answer>.") == 1.0
    for wrong in (right, f"<answer>{right}", f"{right}</answer>", f"</answer>{right}<answer>"):
        assert tagged.score(task, wrong) == 0.0


@pytest.mark.parametrize(("params", "word"), [
    ({"dataset": "chain_summ"}, "not registered"), ({"options": {"terms": 2}}, "terms"),
    ({"options": {"min_terms": -1}}, "min_terms"), ({"prompt_key": "answer_text"}, "expression"),
    ({"datset": "chain_sum"}, "did you mean dataset"), ({"num_items": 0}, "num_items"),
])
def test_reasoning_gym_settings_are_checked_at_start(params, word):
    with pytest.raises(ConfigError, match=word):
        make_environment("reasoning_gym", params)


def test_a_reasoning_gym_row_needs_its_item(sums):
    for item in (None, -1, True, 10**9):
        with pytest.raises(DataError, match="item"):
            sums.start({"prompt": "1 + 1", "answer": "2", "item": item})
