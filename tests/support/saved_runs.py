"""Training on fixed trajectories that is saved in the middle and goes on, in other processes if one likes."""

from pathlib import Path

import torch

from megatron_sao import checkpoints
from megatron_sao.config import load_config
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.parallel.init import start_world
from megatron_sao.records import Ack, SaveState, Trajectory
from megatron_sao.train.progress import Progress
from megatron_sao.train.replay import replay_steps
from megatron_sao.train.saving import Checkpoints
from megatron_sao.train.setup import Trainer, build_trainer
from tests.support.trajectories import random_trajectories

# Adam's epsilon is as large as gradients are: round-off in a gradient of nearly zero must not become a whole step.
SETTINGS = {
    "run.deterministic": "true",
    "value.warmup_steps": "2",
    "policy.lr": "1e-2",
    "value.lr": "1e-2",
    "policy.adam_eps": "1e-2",
    "value.adam_eps": "1e-2",
    "policy.lr_warmup_steps": "3",
    "value.lr_warmup_steps": "7",
    "value.groups.head.lr_multiplier": "2.0",
    "sampling.max_trajectory_tokens": "72",
    "parallel.micro_batch_tokens": "72",
}


class SchedulerPart:
    """Answers SaveState as the scheduler does, with a file of its own, after it was on disk."""

    def __init__(self, trainer: Trainer):
        self._writes = trainer.world.is_first

    def request(self, message, expected):
        assert isinstance(message, SaveState) and expected is Ack
        if self._writes:
            Path(message.folder, "ledger").write_text(f"{message.step}\n")
        return Ack()


def start(folder, run, overrides) -> tuple[Trainer, Checkpoints]:
    """Collective: every rank of the world."""
    settings = SETTINGS | dict(override.split("=") for override in overrides)
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
    world = start_world(config)
    torch.use_deterministic_algorithms(config.run.deterministic)
    trainer = build_trainer(config, HFFolder(folder), world)
    return trainer, Checkpoints(trainer, SchedulerPart(trainer), Path(run))


def batch_of(step: int, policy_version: int) -> list[Trajectory]:
    """What every run here trains on in a step."""
    return random_trajectories(6, seed=step, newest_version=policy_version)


def train_until(trainer: Trainer, progress: Progress, last: int) -> list[dict[str, float]]:
    """Train the steps up to `last`; -> their metrics."""
    metrics = []
    for step, result in replay_steps(trainer, progress, lambda n, phase: batch_of(n, progress.policy_version)):
        metrics.append(result.metrics)
        if step == last:
            break
    return metrics


def state_of(trainer: Trainer) -> dict[str, tuple[dict[str, torch.Tensor], list]]:
    """Of each model what this rank has: (weights and Adam's moments by name, all counters and rates)."""
    found = {}
    for role in ("policy", "value"):
        model, turns = getattr(trainer.models, role), trainer.models.turns
        turns.take(model)
        tensors = {
            f"{number}:{name}": parameter.detach().clone()
            for number, chunk in enumerate(model.chunks)
            for name, parameter in chunk.named_parameters()
        }
        counters = [model.schedule.num_steps, model.learning_rate]
        for number, adam in enumerate(model.optimizers()):
            for at, group in enumerate(adam.param_groups):
                counters += [group["lr"], group.get("step") if group["params"] else None]
                for place, main in enumerate(group["params"]):
                    key = f"adam {number} {at} {place}"
                    tensors |= {f"{key} {name}": tensor.clone() for name, tensor in adam.state[main].items()}
                    tensors[f"{key} param"] = main.detach().clone()
        found[role] = tensors, counters
    return found


def saved_and_continued(folder, run, overrides, saved_at, last):
    """Train, save after step `saved_at`, go on. -> (what the save said, later metrics, state, progress)."""
    trainer, saving = start(folder, run, overrides)
    progress = Progress.at_start(trainer.config)
    train_until(trainer, progress, saved_at)
    said = saving.save(progress)
    metrics = train_until(trainer, progress, last)
    said |= saving.finish()
    return said, metrics, state_of(trainer), progress.saved()


def resumed(folder, run, overrides, last):
    """Restore the newest checkpoint of another process and go on. -> (metrics, state, progress) at the end."""
    trainer, saving = start(folder, run, overrides)
    progress = saving.restore(checkpoints.newest(Path(run)))
    metrics = train_until(trainer, progress, last)
    return metrics, state_of(trainer), progress.saved()
