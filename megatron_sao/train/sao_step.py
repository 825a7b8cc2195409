"""One step of SAO: the box of the paper.

    V      <- values of the batch
    target <- A(lambda_value) + V                         skip-observation GAE, Monte-Carlo by default
    repeat K times: value model <- one regression step    frozen attention
    V      <- values again                                the values adapt before they judge
    A      <- skip-observation GAE(lambda of the policy)
    policy <- one DIS step                                token-level double-sided mask against the sampler

Source: arXiv 2607.07508, equations (1)-(5). K = 2; `advantages_from` restores the other order.
"""

from dataclasses import dataclass, field

from megatron_sao.config import Config
from megatron_sao.data.share import Share
from megatron_sao.models.offload import Turns
from megatron_sao.models.optimizer import TrainedModel
from megatron_sao.train.advantages import (
    RunningMean,
    group_baseline_advantages,
    policy_advantages,
    value_quality,
    value_targets,
)
from megatron_sao.train.policy_step import policy_update
from megatron_sao.train.value_step import value_update
from megatron_sao.train.values import ValueReadout, infer_values


@dataclass(frozen=True)
class Models:
    """The two models that live on the same ranks and take turns."""

    policy: TrainedModel
    value: TrainedModel
    readout: ValueReadout
    true_vocab: int
    turns: Turns = field(default_factory=Turns)  # which of the two is awake
    running_mean: RunningMean = field(default_factory=RunningMean)  # baseline of one control arm


@dataclass(frozen=True)
class StepResult:
    """What one step did to the models."""

    has_trained: bool  # False: no action token in the step, nothing was touched
    has_updated_policy: bool = False  # True: there is a new version to push
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def num_skipped_updates(self) -> int:
        """Updates left out because their gradients were not finite."""
        return int(self.metrics.get("value/skipped_updates", 0) + self.metrics.get("policy/skipped_updates", 0))


def sao_step(models: Models, share: Share, config: Config, *, trains_policy: bool = True) -> StepResult:
    """Train both models on one batch; without `trains_policy` the value model alone (warm-up, pretraining).

    Collective: every rank of the world, each with its own share of the same step.
    """
    if share.num_step_action_tokens == 0:  # a zero gradient would still move weights through Adam's momentum
        return StepResult(has_trained=False)
    algo, value_model = config.algo, models.value
    if algo.baseline != "value":
        return control_step(models, share, config) if trains_policy else StepResult(has_trained=False)

    models.turns.take(value_model)
    value = value_before = infer_values(value_model.wrapped, share, models.readout)
    target = value_targets(share, value_before, algo)
    metrics = value_quality(share, value_before, target)

    updates = [
        value_update(value_model, share, target, value_before, models.readout)
        for _ in range(config.value.updates_per_step)
    ]
    metrics |= updates[-1] | {"value/skipped_updates": sum(update["value/skipped_updates"] for update in updates)}

    if not trains_policy:
        return StepResult(has_trained=True, metrics=metrics)

    if algo.advantages_from == "updated_values":
        value = infer_values(value_model.wrapped, share, models.readout)
    advantage = policy_advantages(share, value, algo)
    models.turns.take(models.policy)
    metrics |= policy_update(models.policy, share, advantage, config, models.true_vocab)
    return StepResult(True, has_updated_policy=not metrics["policy/skipped_updates"], metrics=metrics)


def control_step(models: Models, share: Share, config: Config) -> StepResult:
    """A step of the control arms without a value model: GRPO's group baseline, or a running mean of rewards."""
    models.turns.take(models.policy)
    is_group = config.algo.baseline == "group"
    advantage = group_baseline_advantages(share) if is_group else models.running_mean.advantages(share)
    metrics = policy_update(models.policy, share, advantage, config, models.true_vocab)
    return StepResult(True, has_updated_policy=not metrics["policy/skipped_updates"], metrics=metrics)
