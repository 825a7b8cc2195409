"""Held-out prompts played under the weights that the engines hold now. They never enter the ledger."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from megatron_sao.errors import ProtocolError
from megatron_sao.records import EvalResult, Prompt, Trajectory
from megatron_sao.rollout.assemble import Unscored
from megatron_sao.schedule.statistics import pass_rate


class Evaluation:
    """One round over the held-out prompts."""

    def __init__(
        self,
        name: str,
        prompts: Sequence[Prompt],
        run_episode: Callable[[Prompt], Awaitable[Trajectory]],
        *,
        max_in_flight: int,
        timeout_s: float,
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Args:
            name: of the round.
            prompts: at least one.
            run_episode: one whole episode.
            max_in_flight: episodes that run at the same time.
            timeout_s: an episode must end at least this often.
            on_progress: called with (episodes that have ended, all) whenever some end.
        """
        self._name = name
        self._prompts = prompts
        self._run_episode = run_episode
        self._slots = asyncio.Semaphore(max_in_flight)
        self._timeout_s = timeout_s
        self._on_progress = on_progress

    async def play(self) -> tuple[EvalResult, list[Trajectory]]:
        """The result over all prompts, and the trajectories; an episode that could not be scored counts as reward 0.

        Raises: whatever an episode raised first; ProtocolError when none ended in time.
        """
        episodes = [asyncio.create_task(self._play(prompt)) for prompt in self._prompts]
        running = set(episodes)
        try:
            while running:
                done, running = await asyncio.wait(
                    running, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise ProtocolError(
                        f"no held-out episode of evaluation {self._name} ended within schedule.batch_timeout_s = "
                        f"{self._timeout_s:.0f}; {len(running)} of {len(episodes)} still run"
                    )
                for episode in done:
                    episode.result()  # raises what the episode raised
                self._on_progress(len(episodes) - len(running), len(episodes))
        finally:
            for episode in running:
                episode.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)
        trajectories = [episode.result() for episode in episodes]
        rewards = [0.0 if trajectory is None else trajectory.reward for trajectory in trajectories]
        result = EvalResult(
            name=self._name,
            pass_rate=pass_rate(rewards),
            mean_reward=sum(rewards) / len(rewards),
            num_episodes=len(rewards),
        )
        return result, [trajectory for trajectory in trajectories if trajectory is not None]

    async def _play(self, prompt: Prompt) -> Trajectory | None:
        async with self._slots:
            try:
                return await self._run_episode(prompt)
            except Unscored:
                return None
