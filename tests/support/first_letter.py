"""An environment that even an untrained policy earns something in: about half of all rewards are 1.

The first letter of an action decides its reward. The first action, unless cut, is answered with its length and a second
one follows, so that episodes have one or two turns, observations and all.
"""

import random

from megatron_sao.rollout.environment import EnvStep, Message, Task, opening_messages


class FirstLetter:
    domain = "agentic"
    observation_role = "tool"

    def draw(self, rng: random.Random) -> Task:
        return {"prompt": "".join(rng.choices("0123456789", k=4))}

    def start(self, task: Task) -> "FirstLetterEpisode":
        return FirstLetterEpisode(task)

    def demonstration(self, task: Task) -> list[str]:
        return [4 * task["prompt"], 5 * task["prompt"]]  # long, so that greedy outputs are long too


class FirstLetterEpisode:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._num_actions = 0

    async def begin(self) -> list[Message]:
        return opening_messages(self._task)

    async def step(self, action: str, stop_reason: str) -> EnvStep:
        self._num_actions += 1
        if self._num_actions == 1 and stop_reason == "stop":
            return EnvStep(str(len(action)))
        return EnvStep(None, reward=float(bool(action) and ord(action[0]) % 2 == 0))
