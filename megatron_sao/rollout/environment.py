"""What a task is to the rest of the system, and the registry of environments by name.

Owns: the protocol between an episode and the agent. Invariants:
- an `Environment` holds settings only and serves any number of episodes at once; what changes lives in an `Episode`;
- the environment sees and writes TEXT; token ids, masks and log-probs are the agent's business (`rollout/agent.py`);
- a task is a JSON-able dict with at least "prompt" (text, or chat messages), so that generated tasks and the rows of a
  prompt file are the same thing;
- whether a task is for training or for evaluation follows from a hash of its prompt: the splits cannot overlap.
"""

import difflib
import hashlib
import importlib
import inspect
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_sao.errors import ConfigError

Message = dict[str, str]  # {"role": "system" | "user" | "assistant" | "tool", "content": text}
Task = dict[str, Any]

EVAL_SHARE = 8  # one prompt in eight belongs to the evaluation split

# Other environments need no entry here: task.environment may also be "package.module:ClassName".
REGISTRY = {
    "calculator": "megatron_sao.rollout.calculator:Calculator",
    "reasoning_gym": "megatron_sao.rollout.reasoning_gym_task:ReasoningGymTask",
}


@dataclass(frozen=True)
class EnvStep:
    """The environment's answer to one action."""

    observation: str | None  # text for the policy; None = the episode is over
    reward: Any = None  # outcome, read from the last step; None or NaN there = unscored (see assemble.reward_value)
    turn_reward: float | None = None  # of this turn alone; None = this turn gives none; NaN = unscored
    metrics: dict[str, float] = field(default_factory=dict)  # added up over the steps of an episode


class Episode(Protocol):
    """One attempt at one task."""

    async def begin(self) -> str | list[Message]:
        """The start of the conversation: chat messages, or plain text for a model without a chat template."""

    async def step(self, action: str, stop_reason: str) -> EnvStep:
        """Answer one action.

        Args:
            action: what the policy wrote, without its end-of-turn token; other special tokens show as their text.
            stop_reason: "stop", or "length" for an action that was cut off. After "length" no further action comes:
                the reward of this step counts (None = 0), an observation is not shown.
        """


class Environment(Protocol):
    """A family of tasks with fixed settings."""

    domain: str  # "reasoning" | "coding" | "agentic": selects the DIS bounds
    observation_role: str  # chat role under which observations are written: "tool" or "user"

    def draw(self, rng: random.Random) -> Task:
        """One random task. Raises ConfigError where tasks come from a prompt file only."""

    def start(self, task: Task) -> Episode:
        """A new episode of a task."""

    def demonstration(self, task: Task) -> list[str]:
        """The right action of each turn, for the supervised warm start."""


def make_environment(name: str, params: dict[str, Any] | None = None) -> Environment:
    """The environment called `name`, with `params` (the config's task.params) as its settings.

    Raises:
        ConfigError: unknown name or parameter (with the nearest one), or a value that the environment refuses.
    """
    kind = _environment_class(name)
    params = params or {}
    allowed = [p for p in inspect.signature(kind).parameters]
    unknown = [p for p in params if p not in allowed]
    if unknown:
        near = difflib.get_close_matches(unknown[0], allowed, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"task.params.{unknown[0]} is unknown to the environment {name}; {hint}"
                          f"it takes {', '.join(allowed) or 'no parameters'}")
    try:
        return kind(**params)
    except TypeError as error:
        raise ConfigError(f"task.params does not fit the environment {name}: {error}") from error


def _environment_class(name: str) -> Callable[..., Environment]:
    address = REGISTRY.get(name, name)
    if ":" not in address:
        near = difflib.get_close_matches(name, REGISTRY, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"task.environment = {name} is unknown; {hint}"
                          f"use one of {', '.join(REGISTRY)} or package.module:ClassName")
    module_name, class_name = address.split(":", 1)
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"task.environment = {name} cannot be imported: {error}") from error


def opening_messages(task: Task) -> list[Message]:
    """The chat messages that a task's "prompt" stands for: text is what the user says."""
    prompt = task["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def split_of(task: Task) -> str:
    """"train" or "eval", by a hash of the prompt alone: equal prompts always fall on the same side."""
    text = json.dumps(task["prompt"], sort_keys=True, ensure_ascii=True)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest) % EVAL_SHARE == 0 else "train"


def generated_task(environment: Environment, split: str, index: int, seed: int) -> Task:
    """Task number `index` of an endless split; the same arguments give the same task in every process.

    Raises:
        ConfigError: the settings allow so few tasks that none falls into the split.
    """
    rng = random.Random(f"{seed}/{split}/{index}")
    for _ in range(1000):
        task = environment.draw(rng)
        if split_of(task) == split:
            return task
    raise ConfigError(f"task.params of {type(environment).__name__} allow too few different tasks: "
                      f"none of 1000 draws belongs to the {split} split; allow longer or more varied tasks")
