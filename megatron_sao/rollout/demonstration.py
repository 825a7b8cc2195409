"""Episodes of right actions, built by the very code that builds rollouts: what the warm start learns from."""

from megatron_sao.records import Prompt, Trajectory, VersionSpan
from megatron_sao.rollout.agent import EpisodeSettings, run_episode
from megatron_sao.rollout.chat import Chat
from megatron_sao.rollout.engine_client import Sample
from megatron_sao.rollout.environment import Environment, Task


class _Script:
    """Stands in for an engine and writes down the given actions, one per turn."""

    def __init__(self, actions: list[list[int]]) -> None:
        self._actions = iter(actions)

    async def generate(self, token_ids: list[int], **_: object) -> Sample:
        action = next(self._actions)
        return Sample(action, [0.0] * len(action), "stop", [VersionSpan(0, len(action), 0)])


async def demonstrate(environment: Environment, task: Task, chat: Chat) -> Trajectory:
    """The trajectory of a task solved by the environment's own demonstration (log-probs 0, version 0)."""
    *texts, answer = environment.demonstration(task)
    actions = [chat.action_ids(text, environment.observation_role) for text in texts] + [chat.action_ids(answer)]
    prompt = Prompt(prompt_id="demonstration", environment=type(environment).__name__, domain=environment.domain,
                    task=task)
    no_limits = EpisodeSettings(max_tokens_per_turn=1 << 30, max_turns=len(actions), max_trajectory_tokens=1 << 30)
    return await run_episode(prompt, environment, _Script(actions), chat, no_limits)
