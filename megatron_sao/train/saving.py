"""Checkpoints of a run: everything that training needs to go on as if nothing had happened, written together.

A checkpoint is whole or absent (megatron_sao/checkpoints.py). Every rank writes its part of both models, rank 0 what
there is once, the scheduler its own part; rank 0 then names all files in the manifest and gives the folder its name.
Between two collectives each rank works alone and says how it went: a full disk on one of them is a CheckpointError on
all. With checkpoint.in_background a save takes a copy of all state and a thread writes it while training goes on; the
folder gets its name between two later steps, once all ranks have written. Only one is on its way at a time.
"""

import json
import shutil
import threading
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from megatron_sao import checkpoints
from megatron_sao.checkpoints import (
    CONFIG_FILE,
    POLICY_FOLDER,
    RNG_FOLDER,
    SCHEDULER_FOLDER,
    TRAINER_FILE,
    VALUE_FOLDER,
    ChecksummedFile,
    Keep,
    Manifest,
    StoredFile,
)
from megatron_sao.config import to_toml
from megatron_sao.errors import CheckpointError
from megatron_sao.models.checkpoint import HF_PART, VOCAB_SIZE, CheckpointWriter, Written
from megatron_sao.models.conversion import write_hf_part
from megatron_sao.models.training_state import state_shards
from megatron_sao.models.weights import mtp_part
from megatron_sao.parallel.exchange import any_rank
from megatron_sao.parallel.random_state import random_states
from megatron_sao.records import Ack, SaveState
from megatron_sao.train.agreement import Agreement
from megatron_sao.train.export import besides_policy
from megatron_sao.train.link import SchedulerLink
from megatron_sao.train.progress import Progress
from megatron_sao.train.restoring import layout, random_file, restore
from megatron_sao.train.setup import Trainer

Metrics = dict[str, float]


class Checkpoints:
    """Saves a run between its steps, and restores one.

    A loop calls `restore` before its first step or not at all; after each step `save` where it `is_due`, else `settle`;
    `finish` before it ends.
    """

    def __init__(self, trainer: Trainer, link: SchedulerLink, folder: Path):
        """Collective: every rank of the world. Effect: removes what a killed save left in `folder`.

        Args:
            folder: RUN/checkpoints, the same for all ranks and the scheduler.
        """
        self._trainer, self._link, self._folder = trainer, link, folder.resolve()
        self._config = trainer.config.checkpoint
        self._agreement = Agreement(self._config.timeout_s)
        self._saved: tuple[int, bool, bool] | None = None  # `_state` of what is on disk already, or on its way
        self._pending: _Save | None = None
        self._agreement.first(str(folder), lambda: bool(checkpoints.remove_leftovers(self._folder)))

    def restore(self, path: Path) -> Progress:
        """Make the trainer what it was when the checkpoint `path` was written; -> where the run stands.

        Raises: CheckpointError on every rank, naming the file or tensor that is not as it should be.
        Collective: every rank of the world.
        """
        path = path.resolve()
        progress = restore(self._trainer, path, self._agreement)
        if path.parent == self._folder:
            self._saved = self._state(progress)
        return progress

    def is_due(self, progress: Progress) -> bool:
        """After every checkpoint.every_steps steps, warm-up included; with keep_best also after each evaluation."""
        every = self._config.every_steps
        is_periodic = every > 0 and progress.step % every == 0
        return progress.step > 0 and (is_periodic or self._needs_rate(progress))

    def save(self, progress: Progress) -> Metrics:
        """Write the checkpoint of the last finished step, unless that is done; then remove superseded ones.

        Returns: of a save that is complete, seconds that it took in all, those of them that training waited, and bytes
            written; {} where there was nothing to do, or all goes on in the background.
        Raises: CheckpointError on every rank when one of them could not write; older checkpoints are as before.
        Collective: every rank of the world, between two steps.
        """
        metrics = self.finish()
        if self._saved == self._state(progress):
            return metrics
        started = time.monotonic()
        self._pending = save = _Save(self._trainer, self._agreement, self._begin(progress), progress, started)
        self._saved = self._state(progress)
        scheduler_folder = str(save.folder / SCHEDULER_FOLDER)
        self._link.request(SaveState(step=progress.step, folder=scheduler_folder), Ack)
        try:
            save.take(self._besides, in_background=self._config.in_background)
        except CheckpointError:
            self._give_up(save)
            raise
        save.held_up_s = time.monotonic() - started
        return metrics if self._config.in_background else self.finish()

    def settle(self) -> Metrics:
        """Complete a save in the background if every rank has written its part; -> as `save`.

        Raises: CheckpointError on every rank when one of them could not write it.
        Collective: every rank of the world, between two steps.
        """
        if self._pending is None or any_rank(self._pending.is_writing):
            return {}
        return self.finish()

    def finish(self) -> Metrics:
        """Wait for a save in the background, if there is one, and complete it; -> as `save`.

        Raises: CheckpointError on every rank when one of them could not write it.
        Collective: every rank of the world, between two steps.
        """
        save = self._pending
        if save is None:
            return {}
        started = time.monotonic()
        try:
            num_bytes = save.complete(Keep(self._config.keep_last, self._config.keep_every, self._config.keep_best))
        except CheckpointError:
            self._give_up(save)
            raise
        self._pending = None
        now = time.monotonic()
        return {
            "save/seconds": now - save.started,
            "save/waited_seconds": save.held_up_s + now - started,
            "save/bytes": float(num_bytes),
        }

    def _state(self, progress: Progress) -> tuple[int, bool, bool]:
        """Whatever both models learn shows in it, and whether a checkpoint can be the best."""
        return progress.step, progress.has_pretrained, self._needs_rate(progress)

    def _needs_rate(self, progress: Progress) -> bool:
        """The best are kept, and this policy was evaluated: one that was saved before that is saved again."""
        return self._config.keep_best > 0 and progress.pass_rate_now is not None

    def _begin(self, progress: Progress) -> Path:
        def begin() -> str:
            _ = self._besides  # reads from the model folder, once
            folder = checkpoints.begin(self._folder, progress.step)
            for part in (POLICY_FOLDER, VALUE_FOLDER, RNG_FOLDER, SCHEDULER_FOLDER):
                (folder / part).mkdir()
            return str(folder)

        return Path(self._agreement.first(f"checkpoint {checkpoints.folder_name(progress.step)}", begin))

    def _give_up(self, save: "_Save") -> None:
        self._pending = self._saved = None
        if self._trainer.world.is_first:
            shutil.rmtree(save.folder, ignore_errors=True)  # the disk may be full

    @cached_property
    def _besides(self) -> "_Besides":
        """For rank 0."""
        if not self._trainer.world.is_first:
            return _Besides({}, [], [])
        copies, carried = besides_policy(self._trainer)
        shape = self._trainer.shape
        return _Besides(copies, carried, [name for name in carried if not mtp_part(name, shape)])


@dataclass(frozen=True)
class _Besides:
    """What the model folder holds that neither model trains."""

    copies: dict[str, str]  # HF name -> of which tensor of the policy it is a copy
    carried_by_policy: list[str]  # HF names of the others
    carried_by_value: list[str]


@dataclass
class _Own:
    """What one rank wrote."""

    models: dict[str, Written] = field(default_factory=dict)  # by folder
    others: dict[str, StoredFile] = field(default_factory=dict)  # by path in the checkpoint


class _Save:
    """One checkpoint on its way: taken between two steps, written then or meanwhile, completed between two steps."""

    def __init__(self, trainer: Trainer, agreement: Agreement, folder: Path, progress: Progress, started: float):
        self.folder, self.started = folder, started
        self.held_up_s = 0.0  # that training waited for it so far
        self._trainer, self._agreement = trainer, agreement
        self._name = f"checkpoint {checkpoints.folder_name(progress.step)}"
        self._config = to_toml(trainer.config)
        self._remembered = progress.saved() | {
            "layout": layout(trainer.config.parallel),
            "running_mean": trainer.models.running_mean.mean,
        }
        self._manifest = Manifest(
            step=progress.step,
            policy_version=progress.policy_version,
            pass_rate=progress.pass_rate_now,
            config_hash=checkpoints.config_hash(self._config),
            seconds=0.0,
            files={},
        )
        self._random = random_states()
        self._writers: dict[str, CheckpointWriter] = {}
        self._own = _Own()
        self._thread: threading.Thread | None = None
        self._fault: Exception | None = None  # of the thread

    @property
    def is_writing(self) -> bool:
        """The thread is not through yet."""
        return self._thread is not None and self._thread.is_alive()

    def take(self, besides: _Besides, *, in_background: bool) -> None:
        """Write everything, or take a copy of it and begin to write that.

        Raises: CheckpointError on every rank. Collective: every rank of the world.
        """
        models, world = self._trainer.models, self._agreement.world
        for part, model in ((POLICY_FOLDER, models.policy), (VALUE_FOLDER, models.value)):
            models.turns.take(model)
            shards, counters = state_shards(model, self._trainer.shape, world, copied=in_background)
            copies = besides.copies if part == POLICY_FOLDER else {}
            common = counters | {"role": part, "copies": copies, VOCAB_SIZE: self._trainer.shape.vocab}
            self._writers[part] = CheckpointWriter(shards, self.folder / part, world, common)
            if not in_background:  # before the other model takes the memory
                self._agreement.each(self._name, lambda part=part: self._write_model(part))
        if in_background:
            self._thread = threading.Thread(target=self._write_all, args=(besides,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._agreement.each(self._name, lambda: self._write_others(besides))

    def complete(self, keep: Keep) -> int:
        """Wait for what is being written, then make it a checkpoint and remove superseded ones; -> bytes of all files.

        Raises: CheckpointError on every rank. Collective: every rank of the world.
        """
        written = self._agreement.each(self._name, self._result)
        return self._agreement.first(self._name, lambda: self._give_name(written, keep))

    def _write_all(self, besides: _Besides) -> None:
        try:
            for part in self._writers:
                self._write_model(part)
            self._write_others(besides)
        except Exception as error:
            self._fault = error

    def _write_model(self, part: str) -> None:
        self._own.models[part] = self._writers[part].write()

    def _write_others(self, besides: _Besides) -> None:
        file = random_file(self._trainer.world.rank)
        with ChecksummedFile(self.folder / file) as stream:
            torch.save(self._random, stream)
        self._own.others[file] = stream.stored
        if self._trainer.world.is_first:
            write_hf_part(self._trainer.folder, self.folder / POLICY_FOLDER / HF_PART, besides.carried_by_policy)
            write_hf_part(self._trainer.folder, self.folder / VALUE_FOLDER / HF_PART, besides.carried_by_value)

    def _result(self) -> _Own:
        if self._thread is not None:
            self._thread.join()
        if self._fault is not None:
            raise self._fault
        return self._own

    def _give_name(self, written: list[_Own], keep: Keep) -> int:
        """Rank 0's last part: what only it knows, the manifest, the name."""
        files: dict[str, StoredFile] = {}
        for part, writer in self._writers.items():
            writer.end([own.models[part] for own in written])
            files |= {f"{part}/{name}": file for own in written for name, file in own.models[part].files.items()}
        for own in written:
            files |= own.others
        (self.folder / TRAINER_FILE).write_text(json.dumps(self._remembered, indent=1) + "\n")
        (self.folder / CONFIG_FILE).write_text(self._config)
        manifest = replace(
            self._manifest,
            seconds=round(time.monotonic() - self.started, 3),
            files=checkpoints.checksums(self.folder, files),
        )
        checkpoints.write_manifest(self.folder, manifest)
        final = checkpoints.give_name(self.folder)
        checkpoints.remove_superseded(final.parent, keep, manifest.step)
        return manifest.num_bytes
