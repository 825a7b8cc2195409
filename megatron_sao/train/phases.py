"""Which step belongs to which phase of a run: value warm-up first, then policy steps."""

from collections.abc import Iterator

from megatron_sao.config import Config
from megatron_sao.records import TRAIN, WARMUP


class Phases:
    """Iterates over (step, phase), counting both kinds of steps together from 1.

    The control arms without a value model have nothing to pretrain or to warm up.
    """

    def __init__(self, config: Config):
        self._config = config
        has_value_model = config.algo.baseline == "value"
        self.pretrains_value = has_value_model and config.value.pretrain_trajectories > 0
        self._num_warmup_steps = config.value.warmup_steps if has_value_model else 0
        self._step = 0

    def __iter__(self) -> Iterator[tuple[int, str]]:
        while self._step < self._num_warmup_steps + self._config.run.steps:
            self._step += 1
            yield self._step, WARMUP if self._step <= self._num_warmup_steps else TRAIN

    def end_warmup_if_value_explains(self, metrics: dict[str, float]) -> None:
        """End the warm-up with this step if V explains enough (value.warmup_until_explained_variance)."""
        threshold = self._config.value.warmup_until_explained_variance
        is_warmup = self._step < self._num_warmup_steps
        if is_warmup and 0 < threshold <= metrics.get("value/explained_variance", 0.0):
            self._num_warmup_steps = self._step

    @property
    def evaluation_is_due(self) -> bool:
        """After every run.eval_every policy steps."""
        every, num_policy_steps = self._config.run.eval_every, self._step - self._num_warmup_steps
        return every > 0 and num_policy_steps > 0 and num_policy_steps % every == 0
