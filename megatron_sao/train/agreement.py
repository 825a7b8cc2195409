"""Work that every rank does for itself, with a fault of one made an error on all: nobody waits for who gave up."""

import time
from collections.abc import Callable
from typing import Any

from megatron_sao.errors import CheckpointError, SaoError
from megatron_sao.parallel.exchange import ObjectGroup, world_rank


class Agreement:
    """The ranks of the world as they save or restore a checkpoint together."""

    def __init__(self, timeout_s: float):
        """Collective: every rank of the world.

        Args:
            timeout_s: that one rank may take longer than another (checkpoint.timeout_s).
        """
        self.world = ObjectGroup(timeout_s)
        self._timeout_s = timeout_s

    def each(self, subject: str, action: Callable[[], Any]) -> list[Any] | None:
        """Do `action`, which has no collective; -> what it gave on each rank, on rank 0, None elsewhere.

        Args:
            subject: begins the message of a fault that does not name its subject.
        Raises: CheckpointError on every rank when it failed on one or took too long; whatever a collective raises when
            a rank has ended.
        Collective: every rank of the world.
        """
        done, fault = None, ""
        try:
            done = action()
        except CheckpointError as error:
            fault = str(error)
        except (OSError, RuntimeError, SaoError) as error:
            fault = f"{subject}, rank {world_rank()}: {error}"
        started = time.monotonic()
        try:
            collected = self.world.collect((done, fault))
            fault = self.world.broadcast(next((f for _, f in collected or () if f), ""))
        except RuntimeError as error:
            if time.monotonic() - started < self._timeout_s:
                raise  # a rank has ended: which one, and why, others know
            raise CheckpointError(
                f"{subject}: another rank needs more than checkpoint.timeout_s = {self._timeout_s:g} s longer than rank"
                f" {world_rank()} for its part; is its disk slow, or gone?"
            ) from error
        if fault:
            raise CheckpointError(fault)
        return [result for result, _ in collected] if collected else None

    def first(self, subject: str, action: Callable[[], Any]) -> Any:
        """What `action` gives on rank 0, where alone it is done, on every rank.

        Raises: CheckpointError on every rank, as `each`. Collective: every rank of the world.
        """
        done = self.each(subject, action if world_rank() == 0 else lambda: None)
        return self.world.broadcast(done and done[0])
