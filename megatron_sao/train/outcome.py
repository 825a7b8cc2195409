"""What is remembered over the steps of a run: agreement with the sampler, lag, and steps that went bad."""

from dataclasses import dataclass

from megatron_sao.errors import TrainingError
from megatron_sao.records import TRAIN


@dataclass
class Outcome:
    """Sums and maxima over the policy steps of a run."""

    stop_after_bad_steps: int  # steps in a row with a non-finite update, after which the run stops
    lag_max: float = 0.0
    lag0_logp_diff_max: float = 0.0
    lag0_tokens: float = 0.0
    lag0_tokens_above: float = 0.0  # tokens whose log-probs differ by more than 1e-4 (dis.LOGP_TOLERANCE) at lag 0
    num_lagged_steps: int = 0
    num_bad_steps: int = 0
    _bad_in_a_row: int = 0

    def add(self, phase: str, metrics: dict[str, float], num_skipped_updates: int) -> None:
        """Take in one step of any phase. Raises: TrainingError after `stop_after_bad_steps` bad ones in a row."""
        self._bad_in_a_row = self._bad_in_a_row + 1 if num_skipped_updates else 0
        self.num_bad_steps += bool(num_skipped_updates)
        if self._bad_in_a_row >= self.stop_after_bad_steps:
            raise TrainingError(
                f"{self._bad_in_a_row} steps in a row (run.stop_after_bad_steps) had gradients that are not"
                f" finite; their updates were left out; the last step was of phase {phase};"
                " lower policy.lr or value.lr, or look at the trajectories of the last steps"
            )
        if phase == TRAIN and "lag/token_max" in metrics:
            self.lag_max = max(self.lag_max, metrics["lag/token_max"])
            self.num_lagged_steps += metrics["lag/lagged_token_fraction"] > 0
            lag0_tokens = metrics.get("dis/num_tokens/lag0", 0.0)
            self.lag0_tokens += lag0_tokens
            self.lag0_tokens_above += round(lag0_tokens * metrics.get("dis/logp_apart/lag0", 0.0))
            self.lag0_logp_diff_max = max(self.lag0_logp_diff_max, metrics.get("dis/max_abs_logp_diff/lag0", 0.0))

    def summary(self) -> dict[str, float]:
        """What the last line and `result.json` report."""
        return {
            "logp_diff_lag0_max": self.lag0_logp_diff_max,
            "lag0_tokens": self.lag0_tokens,
            "lag0_tokens_above_1e-4": self.lag0_tokens_above,
            "lag_max": self.lag_max,
            "steps_with_lagged_tokens": float(self.num_lagged_steps),
            "bad_steps": float(self.num_bad_steps),
        }
