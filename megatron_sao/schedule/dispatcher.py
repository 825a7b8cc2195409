"""Keeps episodes running, and moves each one's end into ledger and buffer.

Invariants:
- a prompt is in the ledger before its episode starts, and leaves "in flight" only when the episode ended by itself;
- what was in flight when the run was interrupted is played again before any new prompt is issued;
- an exception is never only logged: the first one of a prompt source, an environment or an engine is handed to
  `on_failure` at once, unchanged, and no further episode starts. Only after `close` its prompt just stays in flight;
- it never waits: a full buffer stops new episodes, not the event loop.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from megatron_sao.errors import ProtocolError
from megatron_sao.records import Prompt, Trajectory
from megatron_sao.rollout.assemble import Unscored
from megatron_sao.schedule.buffer import Buffer
from megatron_sao.schedule.ledger import NO_ACTION, Ledger


log = logging.getLogger(__name__)


class Prompts(Protocol):
    """Training prompts, in the order in which they are issued; an iterator that knows its place."""

    def __next__(self) -> Prompt:
        """The next one. Raises StopIteration when there are no more."""

    def state(self) -> dict[str, int]:
        """The position after the last prompt it gave; the same source goes on from there."""


class Dispatcher:
    """Runs the episodes of training prompts. Used inside one event loop."""

    def __init__(
        self,
        *,
        prompts: Prompts,
        again: Sequence[Prompt] = (),
        run_episode: Callable[[Prompt], Awaitable[Trajectory]],
        ledger: Ledger,
        buffer: Buffer,
        num_to_issue: Callable[[int], int],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Args:
            prompts: where training prompts come from; may end.
            again: prompts that the ledger holds in flight already: they come first.
            run_episode: one whole episode; raises Unscored when it gave nothing to train on.
            ledger: the book.
            buffer: where finished trajectories go.
            num_to_issue: given the number of running episodes, how many more may start now.
            on_failure: called with the first exception.
        """
        self._prompts = prompts
        self._again = deque(again)
        self._run_episode = run_episode
        self._ledger = ledger
        self._buffer = buffer
        self._num_to_issue = num_to_issue
        self._on_failure = on_failure
        self._episodes: dict[str, asyncio.Task[None]] = {}
        self._is_stopped = True
        self._is_closed = False
        self.is_exhausted = False  # the prompt source ended
        self.failed_ids: set[str] = set()  # prompts whose episode raised
        self.num_action_tokens = 0  # of all finished trajectories
        self.num_across_pushes = 0  # trajectories whose tokens were written by more than one version

    @property
    def running_ids(self) -> list[str]:
        """Prompts whose episodes run now, in order of issue."""
        return list(self._episodes)

    @property
    def num_running(self) -> int:
        """Episodes that run now."""
        return len(self._episodes)

    def start(self) -> None:
        """From now on keep episodes running. Effect: starts the first ones."""
        self._is_stopped = self._is_closed
        self.fill()

    def fill(self) -> None:
        """Start as many episodes as are allowed now. Called whenever something changed that may allow more."""
        if self._is_stopped or self.is_exhausted:
            return
        for _ in range(self._num_to_issue(self.num_running)):
            try:
                prompt = self._next_prompt()
            except StopIteration:
                self.is_exhausted = True
                return
            except Exception as error:
                self._fail(error)
                return
            self._episodes[prompt.prompt_id] = asyncio.create_task(self._follow(prompt), name=prompt.prompt_id)

    def close(self) -> None:
        """Start no further episodes; those that run may end, well or badly. Effect: cannot be taken back."""
        self._is_stopped = self._is_closed = True

    async def stop(self) -> None:
        """Cancel what runs; its prompts stay in flight in the ledger. Effect: no episode runs afterwards."""
        self._is_stopped = True
        episodes = list(self._episodes.values())
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)

    def _next_prompt(self) -> Prompt:
        if self._again:
            return self._again.popleft()
        prompt = next(self._prompts)
        self._ledger.issue(prompt)
        return prompt

    async def _follow(self, prompt: Prompt) -> None:
        try:
            trajectory = await self._run_episode(prompt)
            self._receive(prompt, trajectory)
        except Unscored as nothing:
            self._ledger.drop(prompt.prompt_id, nothing.reason)
        except Exception as error:
            if self._is_closed:
                log.info("the episode of %s is given up: %s", prompt.prompt_id, error)
            else:
                self.failed_ids.add(prompt.prompt_id)
                self._fail(error)
        finally:
            del self._episodes[prompt.prompt_id]
        self.fill()

    def _receive(self, prompt: Prompt, trajectory: Trajectory) -> None:
        if trajectory.prompt.prompt_id != prompt.prompt_id:
            raise ProtocolError(f"the episode of {prompt.prompt_id} returned {trajectory.prompt.prompt_id}")
        if trajectory.num_action_tokens == 0:
            self._ledger.drop(prompt.prompt_id, NO_ACTION)
            return
        self._ledger.finish(prompt.prompt_id)
        self._buffer.put(trajectory)
        versions = trajectory.version_t[trajectory.action_mask]
        self.num_action_tokens += len(versions)
        self.num_across_pushes += int(versions.min() != versions.max())

    def _fail(self, error: BaseException) -> None:
        self._is_stopped = True
        self._on_failure(error)


class TokenRate:
    """Action tokens per second between two readings."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._num_tokens = dispatcher.num_action_tokens
        self._since_s = time.monotonic()

    def read(self) -> float:
        """Finished action tokens per second since the last reading. Effect: starts the next interval."""
        now_s, num_tokens = time.monotonic(), self._dispatcher.num_action_tokens
        rate = (num_tokens - self._num_tokens) / max(now_s - self._since_s, 1e-9)
        self._num_tokens, self._since_s = num_tokens, now_s
        return rate
