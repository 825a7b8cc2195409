"""A trainer made what it was when a checkpoint was written."""

import json
from pathlib import Path

import torch

from megatron_sao import checkpoints
from megatron_sao.checkpoints import POLICY_FOLDER, RNG_FOLDER, VALUE_FOLDER
from megatron_sao.config.parallel import Parallel
from megatron_sao.errors import CheckpointError
from megatron_sao.models.training_state import load_state
from megatron_sao.models.weights import weight_hashes
from megatron_sao.parallel.random_state import set_random_states
from megatron_sao.train.agreement import Agreement
from megatron_sao.train.progress import Progress
from megatron_sao.train.setup import Trainer


def restore(trainer: Trainer, path: Path, agreement: Agreement) -> Progress:
    """Weights, optimizers, schedules and random states of `path`; -> where its run stood.

    The layout may be another one; random states are those of a start then, which is said.
    Raises: CheckpointError on every rank, naming the file or tensor that is not as it should be.
    Collective: every rank of the world.
    """
    agreement.each(path.name, lambda: _check(trainer, path))
    for model, part in ((trainer.models.policy, POLICY_FOLDER), (trainer.models.value, VALUE_FOLDER)):
        trainer.models.turns.take(model)
        agreement.each(path.name, lambda model=model, part=part: load_state(model, trainer.shape, path / part))
    agreement.each(path.name, lambda: _check_frozen(trainer, path))
    remembered = json.loads((path / checkpoints.TRAINER_FILE).read_text())
    if remembered.pop("layout") == layout(trainer.config.parallel):
        set_random_states(torch.load(path / random_file(trainer.world.rank), weights_only=True))
    elif trainer.world.is_first:
        print(f"{path.name} was saved from another layout of ranks: random numbers start anew", flush=True)
    trainer.models.running_mean.mean = remembered.pop("running_mean")
    return Progress.restored(trainer.config, remembered)


def layout(parallel: Parallel) -> dict[str, int]:
    """In equal ones a rank has the same place, and so the same use for random numbers."""
    return {axis: getattr(parallel, axis) for axis in ("tp", "pp", "cp", "ep", "etp", "dp", "vpp")}


def random_file(rank: int) -> str:
    """Where a rank's random states stand in a checkpoint."""
    return f"{RNG_FOLDER}/rank-{rank:05d}.pt"


def _check(trainer: Trainer, path: Path) -> None:
    """All sizes; the contents of this rank's share of the files."""
    manifest, world = checkpoints.read_manifest(path), trainer.world
    checkpoints.check_sizes(path, manifest)
    largest_first = sorted(manifest.files, key=lambda file: (-manifest.files[file].num_bytes, file))
    checkpoints.check_contents(path, manifest, largest_first[world.rank :: world.size])


def _check_frozen(trainer: Trainer, path: Path) -> None:
    """What the value model does not train is what the model folder holds."""
    found = weight_hashes(trainer.models.value.chunks, set(trainer.frozen_hashes))
    differ = sorted(name for name, digest in trainer.frozen_hashes.items() if found[name] != digest)
    if differ:
        raise CheckpointError(
            f"{differ[0].partition(':')[2]} of the value model is frozen, but {path} holds another one than the model"
            f" folder {trainer.folder.path}: resume with the model that the run began with"
        )
