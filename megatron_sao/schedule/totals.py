"""What a run has counted besides its ledger. Saved with a checkpoint, so that a resumed run goes on counting."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from megatron_sao.records import PushDone, Trajectory
from megatron_sao.schedule.ledger import IN_FLIGHT, Ledger


class Totals(msgspec.Struct, kw_only=True):
    """Counts since the first start of a run."""

    lag_max: int = 0
    num_trained_tokens: int = 0
    num_trained_tokens_lag_ge1: int = 0
    num_across_pushes: int = 0  # trajectories whose tokens were written by more than one version
    num_pushes: int = 0
    num_failed_pushes: int = 0
    num_taken_out: int = 0  # times that an engine ceased to answer
    num_reissued: int = 0  # requests that were asked again of another engine
    num_in_flight_at_pushes: int = 0  # prompts whose episodes ran during some push
    ids_in_flight_at_pushes: set[str] = set()  # those of them that may not have ended yet

    def add_batch(self, trajectories: Sequence[Trajectory], metrics: Mapping[str, float]) -> None:
        """A step trained on these, whose `batch_metrics` are given."""
        self.lag_max = max(self.lag_max, int(metrics["lag/max"]))
        num_tokens = sum(trajectory.num_action_tokens for trajectory in trajectories)
        self.num_trained_tokens += num_tokens
        self.num_trained_tokens_lag_ge1 += round(num_tokens * metrics["lag/share_ge1"])

    def add_in_flight(self, running_ids: Iterable[str], ledger: Ledger) -> None:
        """Engines were paused for a push while these episodes ran."""
        running = set(running_ids)
        self.num_in_flight_at_pushes += len(running - self.ids_in_flight_at_pushes)
        self.ids_in_flight_at_pushes = {i for i in running | self.ids_in_flight_at_pushes if ledger.state(i) == IN_FLIGHT}

    def add_push(self, done: PushDone) -> None:
        """A push came to its end."""
        self.num_pushes += bool(done.metrics)  # else no engine lacked the version
        self.num_failed_pushes += round(done.metrics.get("push/attempts", 1.0)) - 1

    def summary(self, ledger: Ledger, failed_ids: set[str]) -> dict[str, Any]:
        """What became of all prompts, and the counts. JSON-able.

        Args:
            failed_ids: prompts whose episode raised.
        Raises: ProtocolError when the ledger does not balance.
        """
        counts = ledger.check()
        lost = self.ids_in_flight_at_pushes & failed_ids
        open_ids = {i for i in self.ids_in_flight_at_pushes if ledger.state(i) == IN_FLIGHT} - lost
        return {
            "issued": counts.issued,
            "trained": counts.trained,
            "dropped": counts.dropped,
            "dropped_by_reason": counts.dropped_by_reason,
            # At the end of a run everything on the way is in flight; where exactly, is said apart.
            "in_flight": counts.in_flight + counts.buffered + counts.training,
            "in_flight_running": counts.in_flight,
            "in_flight_buffered": counts.buffered,
            "in_flight_training": counts.training,
            "num_pushes": self.num_pushes,
            "failed_push_attempts": self.num_failed_pushes,
            "engines_taken_out": self.num_taken_out,
            "requests_reissued": self.num_reissued,
            "lag_max": self.lag_max,
            "trained_action_tokens": self.num_trained_tokens,
            "trained_action_tokens_lag_ge1": self.num_trained_tokens_lag_ge1,
            "trajectories_across_pushes": self.num_across_pushes,
            "requests_in_flight_at_pushes": self.num_in_flight_at_pushes,
            "requests_finished_after_pushes": self.num_in_flight_at_pushes - len(open_ids) - len(lost),
            "requests_still_running": len(open_ids),
            "requests_lost_by_pushes": len(lost),
        }
