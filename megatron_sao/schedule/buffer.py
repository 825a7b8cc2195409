"""Finished trajectories that wait for a step.

Invariants: first finished, first trained; a trajectory leaves exactly once, taken by a step or returned as stale; what
a step does not need stays, in order.
"""

import asyncio
from collections import deque

from megatron_sao.records import Trajectory
from megatron_sao.schedule.freshness import is_fresh


class Buffer:
    """A queue of finished trajectories. One event loop, no locks."""

    def __init__(self) -> None:
        self._trajectories: deque[tuple[int, Trajectory]] = deque()  # (oldest version, trajectory)
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._trajectories)

    def all(self) -> list[Trajectory]:
        """What waits, in order; it stays."""
        return [trajectory for _, trajectory in self._trajectories]

    def put(self, trajectory: Trajectory) -> None:
        """Add one at the end. Never blocks: the dispatcher bounds how many can come. Effect: wakes `arrival`."""
        self._trajectories.append((trajectory.oldest_version, trajectory))
        self._arrived.set()

    def take(
        self, num_trajectories: int, policy_version: int, max_staleness: int
    ) -> tuple[list[Trajectory], list[Trajectory]]:
        """The first `num_trajectories` that are fresh enough for a step of `policy_version`, or none if too few are.

        Args:
            num_trajectories: how many the step needs, > 0.
            policy_version: version that trains the step.
            max_staleness: largest lag of the oldest action token.

        Returns:
            (taken, stale): `taken` has num_trajectories entries or none. `stale` are those that are too old; they have
            left the buffer in either case, because versions only grow and they can never become fresh again.

        Raises:
            ProtocolError: a trajectory is newer than the step (negative lag). The buffer is then unchanged.
        """
        fresh, stale = [], []
        for oldest_version, trajectory in self._trajectories:
            if is_fresh(policy_version, oldest_version, max_staleness):
                fresh.append((oldest_version, trajectory))
            else:
                stale.append(trajectory)
        num_taken = num_trajectories if len(fresh) >= num_trajectories else 0
        self._trajectories = deque(fresh[num_taken:])
        return [trajectory for _, trajectory in fresh[:num_taken]], stale

    async def arrival(self, timeout_s: float) -> bool:
        """Wait until a trajectory arrives after this call. False = none came within `timeout_s`."""
        self._arrived.clear()
        try:
            await asyncio.wait_for(self._arrived.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
