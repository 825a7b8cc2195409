"""Checkpoints of a run: everything that training needs to go on as if nothing had happened, written and read together.

A checkpoint is whole or absent (megatron_sao/checkpoints.py). Every rank writes its part of both models, rank 0 what
there is once, the scheduler its own part; rank 0 then names all files in the manifest and gives the folder its name.
Between two collectives each rank works alone and says how it went: a full disk on one of them is a CheckpointError on
all, within checkpoint.timeout_s.
"""

import json
import shutil
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megatron_sao import checkpoints
from megatron_sao.checkpoints import POLICY_FOLDER, VALUE_FOLDER, ChecksummedFile, Manifest, StoredFile
from megatron_sao.config import to_toml
from megatron_sao.errors import CheckpointError, SaoError
from megatron_sao.models.checkpoint import HF_PART, CheckpointWriter
from megatron_sao.models.conversion import write_hf_part
from megatron_sao.models.optimizer import TrainedModel
from megatron_sao.models.training_state import load_state, state_shards
from megatron_sao.models.weights import mtp_part, weight_hashes
from megatron_sao.parallel.exchange import ObjectGroup
from megatron_sao.parallel.random_state import random_states, set_random_states
from megatron_sao.records import Ack, SaveState
from megatron_sao.train.export import besides_policy
from megatron_sao.train.link import SchedulerLink
from megatron_sao.train.progress import Progress
from megatron_sao.train.setup import Trainer


class Checkpoints:
    """Saves a run, and restores one."""

    def __init__(self, trainer: Trainer, link: SchedulerLink, folder: Path):
        """Collective: every rank of the world.

        Args:
            folder: RUN/checkpoints, the same for all ranks and the scheduler.
        """
        self._trainer, self._link, self._folder = trainer, link, folder.resolve()
        self._config = trainer.config.checkpoint
        self._world = ObjectGroup(self._config.timeout_s)
        self._saved_step: int | None = None  # what is on disk already
        self._on_first("", lambda: checkpoints.remove_leftovers(self._folder) and None)

    def is_due(self, progress: Progress) -> bool:
        """After every checkpoint.every_steps steps, warm-up included."""
        every = self._config.every_steps
        return every > 0 and progress.step > 0 and progress.step % every == 0

    # ---- save --------------------------------------------------------------------------------------------------

    def save(self, progress: Progress) -> dict[str, float]:
        """Write the checkpoint of the last finished step, unless that is done already; then remove superseded ones.

        Returns: seconds that it took, bytes that were written.
        Raises: CheckpointError on every rank when one of them or the scheduler could not; older ones are as before.
        Collective: every rank of the world, between two steps.
        """
        if self._saved_step == progress.step:
            return {"save/seconds": 0.0, "save/bytes": 0.0}
        started = time.monotonic()
        name = checkpoints.folder_name(progress.step)
        partial = Path(self._on_first(name, lambda: str(self._begin(progress.step))))
        try:
            scheduler_folder = str(partial / checkpoints.SCHEDULER_FOLDER)
            self._link.request(SaveState(step=progress.step, folder=scheduler_folder), Ack)
            models = self._trainer.models
            files = self._save_model(models.policy, partial / POLICY_FOLDER, name, *self._besides_policy)
            files |= self._save_model(models.value, partial / VALUE_FOLDER, name, {}, self._besides_value)
            files |= self._save_random_states(partial, name)
            num_bytes = self._on_first(name, lambda: self._finish(partial, progress, files, started))
        except CheckpointError:
            if self._trainer.world.is_first:
                shutil.rmtree(partial, ignore_errors=True)  # the disk may be full
            raise
        self._saved_step = progress.step
        return {"save/seconds": time.monotonic() - started, "save/bytes": float(num_bytes)}

    def _begin(self, step: int) -> Path:
        _ = self._besides_policy  # reads from the model folder, once
        partial = checkpoints.begin(self._folder, step)
        for part in (POLICY_FOLDER, VALUE_FOLDER, checkpoints.RNG_FOLDER, checkpoints.SCHEDULER_FOLDER):
            (partial / part).mkdir()
        return partial

    def _save_model(
        self, model: TrainedModel, folder: Path, name: str, copies: dict[str, str], carried: list[str]
    ) -> dict[str, StoredFile]:
        self._trainer.models.turns.take(model)
        shards, counters = state_shards(model, self._trainer.shape, self._world)
        common = counters | {"role": folder.name, "copies": copies}
        writer = CheckpointWriter(shards, folder, self._world, common)
        written = self._together(name, writer.write)

        def end() -> None:
            write_hf_part(self._trainer.folder, folder / HF_PART, carried)
            writer.end(written)

        self._on_first(name, end)
        return {f"{folder.name}/{file}": stored for one in written or () for file, stored in one.files.items()}

    @cached_property
    def _besides_policy(self) -> tuple[dict[str, str], list[str]]:
        """For rank 0: what the model folder holds that is no part of the policy."""
        return besides_policy(self._trainer) if self._trainer.world.is_first else ({}, [])

    @property
    def _besides_value(self) -> list[str]:
        return [name for name in self._besides_policy[1] if not mtp_part(name, self._trainer.shape)]

    def _save_random_states(self, partial: Path, name: str) -> dict[str, StoredFile]:
        file = self._random_file

        def write() -> tuple[str, StoredFile]:
            with ChecksummedFile(partial / file) as stream:
                torch.save(random_states(), stream)
            return file, stream.stored

        return dict(self._together(name, write) or ())

    @property
    def _random_file(self) -> str:
        return f"{checkpoints.RNG_FOLDER}/rank-{self._trainer.world.rank:05d}.pt"

    def _finish(self, partial: Path, progress: Progress, files: dict[str, StoredFile], started: float) -> int:
        """Rank 0: the rest of the files, the manifest, the name. -> bytes in all."""
        remembered = progress.saved() | {
            "layout": self._layout,
            "running_mean": self._trainer.models.running_mean.mean,
        }
        config = to_toml(self._trainer.config)
        (partial / checkpoints.TRAINER_FILE).write_text(json.dumps(remembered, indent=1) + "\n")
        (partial / checkpoints.CONFIG_FILE).write_text(config)
        manifest = Manifest(
            step=progress.step,
            policy_version=progress.policy_version,
            pass_rate=progress.pass_rate,
            config_hash=checkpoints.config_hash(config),
            seconds=round(time.monotonic() - started, 3),
            files=checkpoints.checksums(partial, files),
        )
        checkpoints.write_manifest(partial, manifest)
        checkpoints.give_name(partial)
        rules = {rule: getattr(self._config, rule) for rule in ("keep_last", "keep_every", "keep_best")}
        checkpoints.remove_superseded(self._folder, newest_step=progress.step, **rules)
        return manifest.num_bytes

    @property
    def _layout(self) -> dict[str, int]:
        """On which every rank holds the same part of the models, and so uses the same random numbers."""
        parallel = self._trainer.config.parallel
        return {axis: getattr(parallel, axis) for axis in ("tp", "pp", "cp", "ep", "etp", "dp", "vpp")}

    # ---- restore -----------------------------------------------------------------------------------------------

    def restore(self, path: Path) -> Progress:
        """Make the trainer what it was when the checkpoint `path` was written; -> where the run stands.

        The layout may be another one; random states are those of the start then, which is said.
        Raises: CheckpointError on every rank, naming the file or tensor that is not as it should be.
        Collective: every rank of the world.
        """
        trainer, path = self._trainer, path.resolve()
        name = path.name
        self._together(name, lambda: self._check(path))
        for model, part in ((trainer.models.policy, POLICY_FOLDER), (trainer.models.value, VALUE_FOLDER)):
            trainer.models.turns.take(model)
            self._together(name, lambda model=model, part=part: load_state(model, trainer.shape, path / part))
        self._together(name, lambda: self._check_frozen(path))
        remembered = json.loads((path / checkpoints.TRAINER_FILE).read_text())
        if remembered.pop("layout") == self._layout:
            set_random_states(torch.load(path / self._random_file, weights_only=True))
        elif trainer.world.is_first:
            print(f"{name} was saved from another layout of ranks: random numbers start anew", flush=True)
        trainer.models.running_mean.mean = remembered.pop("running_mean")
        self._saved_step = checkpoints.step_of(path)
        return Progress.restored(trainer.config, remembered)

    def _check(self, path: Path) -> None:
        """All sizes; the contents of this rank's share of the files."""
        manifest, world = checkpoints.read_manifest(path), self._trainer.world
        checkpoints.check_sizes(path, manifest)
        largest_first = sorted(manifest.files, key=lambda file: (-manifest.files[file].num_bytes, file))
        checkpoints.check_contents(path, manifest, largest_first[world.rank :: world.size])

    def _check_frozen(self, path: Path) -> None:
        """What the value model does not train is what the model folder holds."""
        trainer = self._trainer
        found = weight_hashes(trainer.models.value.chunks, set(trainer.frozen_hashes))
        differ = sorted(name for name, digest in trainer.frozen_hashes.items() if found[name] != digest)
        if differ:
            raise CheckpointError(
                f"{differ[0].partition(':')[2]} of the value model is frozen, but {path} holds another one than the"
                f" model folder {trainer.folder.path}: resume with the model that the run began with"
            )

    # ---- together ----------------------------------------------------------------------------------------------

    def _on_first(self, name: str, action: Callable[[], Any]) -> Any:
        """What `action` gives on rank 0, on every rank; or its fault. Collective: every rank of the world."""
        done = self._together(name, action if self._trainer.world.is_first else lambda: None)
        return self._world.broadcast(done and done[0])

    def _together(self, name: str, action: Callable[[], Any]) -> list[Any] | None:
        """Do `action`, which has no collective; -> what it gave on each rank, on rank 0.

        Raises: CheckpointError on every rank when it failed on one. Collective: every rank of the world.
        """
        done, fault = None, ""
        try:
            done = action()
        except (OSError, RuntimeError, SaoError) as error:
            rank = self._trainer.world.rank
            fault = str(error) if isinstance(error, CheckpointError) else f"checkpoint {name}, rank {rank}: {error}"
        try:
            collected = self._world.collect((done, fault))
            fault = self._world.broadcast(next((f for _, f in collected or () if f), ""))
        except RuntimeError as error:
            raise CheckpointError(
                f"checkpoint {name}: not all ranks were heard of within checkpoint.timeout_s ="
                f" {self._config.timeout_s:g} ({error})"
            ) from error
        if fault:
            raise CheckpointError(fault)
        return [result for result, _ in collected] if collected else None
