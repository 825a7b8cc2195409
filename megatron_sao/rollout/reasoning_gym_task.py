"""Any data set of the package reasoning-gym as a single-turn environment; its own scorer gives the reward."""

import random
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_sao.errors import ConfigError, DataError
from megatron_sao.rollout.environment import EnvStep, Message, Task, opening_messages


@dataclass(frozen=True)
class ReasoningGymTask:
    """One data set of reasoning-gym.

    Args:
        dataset: its name there, e.g. "chain_sum".
        options: its own settings, e.g. {"min_terms": 2, "max_terms": 2}.
        prompt_key: "question", or an entry of the item's metadata that is a shorter question, e.g. "expression".
        num_items: different items to draw from; a few data sets hold less than a million. An item is made when drawn.
        answer_tag: if given, the answer is what stands inside <tag>...</tag> of the action, else the whole action.
    """

    dataset: str = "chain_sum"
    options: dict[str, Any] = field(default_factory=dict)
    prompt_key: str = "question"
    num_items: int = 1_000_000
    answer_tag: str = ""

    domain = "reasoning"
    observation_role = "user"  # never used: there is one turn

    def __post_init__(self) -> None:
        if type(self.num_items) is not int or self.num_items < 1:
            raise ConfigError(f"task.params.num_items = {self.num_items!r}; use a whole number from 1")
        item = self._items[0]  # a wrong name or option shows at start
        if not isinstance(self._question(item), str):
            raise ConfigError(f"task.params.prompt_key = {self.prompt_key!r} is no text of {self.dataset}; "
                              f"use question or one of {', '.join(item['metadata'])}")

    @cached_property
    def _items(self) -> Any:
        try:
            import reasoning_gym  # heavy (seconds), and only this environment needs it
        except ImportError as error:
            raise ConfigError("task.environment = reasoning_gym needs the package reasoning-gym") from error
        if self.dataset not in reasoning_gym.factory.DATASETS:
            raise ConfigError(f"task.params.dataset = {self.dataset!r} is not registered in reasoning-gym; "
                              "see its GALLERY.md for the names")
        try:
            # A fixed seed: an item is known by its number alone, in every process and whatever run.seed is.
            return reasoning_gym.create_dataset(self.dataset, seed=0, size=self.num_items, **self.options)
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(f"task.params.options = {self.options} does not fit {self.dataset}: {error}") from error

    def _question(self, item: dict[str, Any]) -> Any:
        return item["question"] if self.prompt_key == "question" else item["metadata"].get(self.prompt_key)

    def draw(self, rng: random.Random) -> Task:
        number = rng.randrange(self.num_items)
        item = self._items[number]
        return {"prompt": self._question(item), "answer": item["answer"], "item": number}

    def start(self, task: Task) -> "ReasoningGymEpisode":
        number = task.get("item")
        if type(number) is not int or not 0 <= number < self.num_items:
            raise DataError(f"the reasoning_gym task {task.get('prompt')!r} needs its number as \"item\"")
        return ReasoningGymEpisode(task, self)

    def demonstration(self, task: Task) -> list[str]:
        return [f"<{self.answer_tag}>{task['answer']}</{self.answer_tag}>" if self.answer_tag else task["answer"]]

    def score(self, task: Task, action: str) -> float:
        """The data set's own score, 0 to 1, of what the action answers."""
        answer = action.strip()
        if self.answer_tag:
            before, opening, rest = answer.rpartition(f"<{self.answer_tag}>")
            inside, closing, _ = rest.partition(f"</{self.answer_tag}>")
            answer = inside.strip() if opening and closing else ""
        return float(self._items.score_answer(answer=answer, entry=self._items[task["item"]]))


class ReasoningGymEpisode:
    """One question, one answer."""

    def __init__(self, task: Task, environment: ReasoningGymTask) -> None:
        self._task = task
        self._environment = environment

    async def begin(self) -> list[Message]:
        return opening_messages(self._task)

    async def step(self, action: str, stop_reason: str) -> EnvStep:
        if stop_reason != "stop":
            return EnvStep(None, reward=0.0, metrics={"cut_actions": 1.0})
        return EnvStep(None, reward=self._environment.score(self._task, action))
