"""The demonstration task: a sum is asked, the policy calls a calculator, reads the result and answers.

    user       12+34=
    assistant  [12+34]        a call: one expression in square brackets
    tool       46
    assistant  46             anything that is no call is the final answer; reward 1 if it is right, else 0

A malformed call ends the episode with reward 0. The other choice, an error message and another try, was decided
against: demonstrations hold no error messages, so what a small policy writes after one is noise; that noise would
count in the token mean of the loss and blur which token was the mistake. Ended at once, the reward of 0 stands on the
faulty call itself. `retry_malformed = true` gives the other behaviour.
"""

import random
import re
from dataclasses import dataclass

from megatron_sao.errors import ConfigError, DataError
from megatron_sao.rollout.environment import EnvStep, Message, Task, opening_messages

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
_EXPRESSION = re.compile(r"([0-9]{1,9})([-+*])([0-9]{1,9})")


def calculate(expression: str) -> str | None:
    """The value of `number operator number`, or None if it is no such expression."""
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        return None
    left, operator, right = match.groups()
    return str(OPERATIONS[operator](int(left), int(right)))


@dataclass(frozen=True)
class Calculator:
    """Numbers of min_digits..max_digits digits, one of `operators` between them."""

    min_digits: int = 1
    max_digits: int = 2
    operators: str = "+"
    retry_malformed: bool = False

    domain = "agentic"
    observation_role = "tool"

    def __post_init__(self) -> None:
        for name in ("min_digits", "max_digits"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 9:
                raise ConfigError(f"task.params.{name} = {value!r}; use a whole number from 1 to 9")
        if self.min_digits > self.max_digits:
            raise ConfigError(f"task.params.min_digits = {self.min_digits} is above max_digits = {self.max_digits}")
        if not isinstance(self.operators, str) or not self.operators or set(self.operators) - set(OPERATIONS):
            raise ConfigError(f"task.params.operators = {self.operators!r}; use some of {''.join(OPERATIONS)}")
        if type(self.retry_malformed) is not bool:
            raise ConfigError(f"task.params.retry_malformed = {self.retry_malformed!r}; use true or false")

    def draw(self, rng: random.Random) -> Task:
        expression = self._number(rng) + rng.choice(self.operators) + self._number(rng)
        return {"prompt": f"{expression}=", "answer": calculate(expression)}

    def _number(self, rng: random.Random) -> str:
        num_digits = rng.randint(self.min_digits, self.max_digits)
        smallest = 0 if num_digits == 1 else 10 ** (num_digits - 1)
        return str(rng.randint(smallest, 10**num_digits - 1))

    def start(self, task: Task) -> "CalculatorEpisode":
        if not isinstance(task.get("answer"), str):
            raise DataError(f"the calculator task {task.get('prompt')!r} needs its answer as text under \"answer\"")
        return CalculatorEpisode(task, self.retry_malformed)

    def demonstration(self, task: Task) -> list[str]:
        return [f"[{task['prompt'].removesuffix('=')}]", task["answer"]]


class CalculatorEpisode:
    """One question."""

    def __init__(self, task: Task, retry_malformed: bool) -> None:
        self._task = task
        self._retry_malformed = retry_malformed

    async def begin(self) -> list[Message]:
        return opening_messages(self._task)

    async def step(self, action: str, stop_reason: str) -> EnvStep:
        if stop_reason != "stop":
            return EnvStep(None, reward=0.0, metrics={"cut_actions": 1.0})
        action = action.strip()
        if "[" not in action and "]" not in action:
            return EnvStep(None, reward=float(action == self._task["answer"]))
        is_call = action.startswith("[") and action.endswith("]")
        result = calculate(action[1:-1]) if is_call else None
        if result is not None:
            return EnvStep(result, metrics={"tool_calls": 1.0})
        if self._retry_malformed:
            return EnvStep("error", metrics={"malformed_calls": 1.0})
        return EnvStep(None, reward=0.0, metrics={"malformed_calls": 1.0})
