"""Steps done again from what was written down: no scheduler, no engines, no push."""

from collections.abc import Callable, Iterator, Sequence

from megatron_sao.records import TRAIN, Trajectory
from megatron_sao.train.progress import Progress
from megatron_sao.train.sao_step import StepResult, sao_step
from megatron_sao.train.setup import Trainer


def replay_steps(
    trainer: Trainer, progress: Progress, batch_of: Callable[[int, str], Sequence[Trajectory]]
) -> Iterator[tuple[int, StepResult]]:
    """Do the steps after `progress`, each when it is asked for; -> (step, what it did to the models).

    Args:
        batch_of: (step, phase) -> the trajectories that were trained then, in their order.
    Effect: trains both models and moves `progress` on. Collective: every rank of the world.
    """
    for step, phase in progress.phases:
        share = trainer.share_of_batch(batch_of(step, phase), progress.policy_version)
        result = sao_step(trainer.models, share, trainer.config, trains_policy=phase == TRAIN)
        progress.policy_version += result.has_updated_policy
        progress.finish_step(phase, result)
        yield step, result
