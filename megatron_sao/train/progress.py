"""What a run remembers from step to step besides its models: a checkpoint keeps all of it."""

from dataclasses import asdict, dataclass
from typing import Any, Self

from megatron_sao.config import Config
from megatron_sao.train.outcome import Outcome
from megatron_sao.train.phases import Phases
from megatron_sao.train.sao_step import StepResult


@dataclass
class Progress:
    """Where a run stands, as of the last step that was finished. Equal on every rank."""

    phases: Phases
    outcome: Outcome
    policy_version: int = 0  # pushes so far: of the weights that the engines hold
    has_pretrained: bool = False  # the value pretraining is done
    pass_rate_before: float | None = None  # on held-out prompts, before the first step; None = not evaluated yet
    pass_rate: float | None = None  # the newest one, which may be of an earlier policy than there is now
    evaluated_step: int = 0  # after which that was

    @classmethod
    def at_start(cls, config: Config) -> Self:
        """Of a run that has done nothing yet."""
        return cls(Phases(config), Outcome(config.run.stop_after_bad_steps))

    @classmethod
    def restored(cls, config: Config, saved: dict[str, Any]) -> Self:
        """Of a run that goes on from what `saved()` gave, under a configuration that may differ."""
        progress = cls.at_start(config)
        progress.phases.restore(**saved.pop("phases"))
        progress.outcome = Outcome(**saved.pop("outcome") | {"stop_after_bad_steps": config.run.stop_after_bad_steps})
        for name, value in saved.items():
            setattr(progress, name, value)
        return progress

    def saved(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        own = ("policy_version", "has_pretrained", "pass_rate_before", "pass_rate", "evaluated_step")
        return {
            "phases": self.phases.saved(),
            "outcome": asdict(self.outcome),
            **{name: getattr(self, name) for name in own},
        }

    @property
    def step(self) -> int:
        """The last step that was finished; 0 = none."""
        return self.phases.num_finished

    @property
    def wants_pretraining(self) -> bool:
        """The value model is to be pretrained before the first step."""
        return self.phases.pretrains_value and not self.has_pretrained and self.step == 0

    @property
    def wants_evaluation(self) -> bool:
        """The last step is one after which held-out prompts are played, and they were not yet."""
        return self.phases.evaluation_is_due and self.evaluated_step < self.step

    @property
    def pass_rate_now(self) -> float | None:
        """Of the policy as the last step left it; None = that one was not evaluated."""
        return self.pass_rate if self.evaluated_step == self.step else None

    def add_evaluation(self, pass_rate: float) -> None:
        """Take in a pass rate on held-out prompts."""
        self.pass_rate, self.evaluated_step = pass_rate, self.step
        if self.pass_rate_before is None:
            self.pass_rate_before = pass_rate

    def finish_step(self, phase: str, result: StepResult) -> None:
        """Take in a step that is done and reported. Raises: TrainingError after too many bad ones in a row."""
        self.outcome.add(phase, result.metrics, result.num_skipped_updates)
        self.phases.finish_step(result.metrics)
