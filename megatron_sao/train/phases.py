"""Which step belongs to which phase of a run: value warm-up first, then policy steps."""

from collections.abc import Iterator
from typing import Any

from megatron_sao.config import Config
from megatron_sao.records import TRAIN, WARMUP


class Phases:
    """Iterates over (step, phase), counting both kinds of steps together from 1.

    A step counts once `finish_step` was called for it: whoever leaves the loop in the middle of one has not done it.
    The control arms without a value model have nothing to pretrain or to warm up.
    """

    def __init__(self, config: Config):
        self._config = config
        has_value_model = config.algo.baseline == "value"
        self.pretrains_value = has_value_model and config.value.pretrain_trajectories > 0
        self._num_warmup_steps = config.value.warmup_steps if has_value_model else 0
        self.num_finished = 0

    def __iter__(self) -> Iterator[tuple[int, str]]:
        while self.num_finished < self._num_warmup_steps + self._config.run.steps:
            step = self.num_finished + 1
            yield step, WARMUP if step <= self._num_warmup_steps else TRAIN
            assert self.num_finished == step, "the loop goes on without finish_step"

    def finish_step(self, metrics: dict[str, float]) -> None:
        """Count a step; end the warm-up with it if V explains enough (value.warmup_until_explained_variance)."""
        self.num_finished += 1
        threshold = self._config.value.warmup_until_explained_variance
        is_warmup = self.num_finished < self._num_warmup_steps
        if is_warmup and 0 < threshold <= metrics.get("value/explained_variance", 0.0):
            self._num_warmup_steps = self.num_finished

    @property
    def evaluation_is_due(self) -> bool:
        """After every run.eval_every policy steps."""
        every, num_policy_steps = self._config.run.eval_every, self.num_finished - self._num_warmup_steps
        return every > 0 and num_policy_steps > 0 and num_policy_steps % every == 0

    def saved(self) -> dict[str, Any]:
        """For `restore`, JSON-able."""
        return {"num_finished": self.num_finished, "num_warmup_steps": self._num_warmup_steps}

    def restore(self, num_finished: int, num_warmup_steps: int) -> None:
        """Go on after step `num_finished`. A warm-up that is over stays as long as it was, whatever is set now."""
        self.num_finished = num_finished
        if num_warmup_steps <= num_finished:
            self._num_warmup_steps = num_warmup_steps
        else:
            self._num_warmup_steps = max(self._num_warmup_steps, num_finished)
