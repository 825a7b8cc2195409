"""A save that goes wrong, in every way that it can: what is left is whole, and the reason is named on every rank."""

import os
import resource
import shutil
import signal
import threading

import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao import checkpoints
from megatron_sao.checkpoints import ChecksummedFile
from megatron_sao.errors import CheckpointError
from megatron_sao.models.checkpoint import CheckpointWriter, StoredWeights
from megatron_sao.models.conversion import megatron_to_hf
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.train.export import export_policy
from megatron_sao.train.progress import Progress
from tests.support.families import make_family_folder
from tests.support.ranks import RankFailure, run_ranks
from tests.support.saved_runs import resumed, saved_and_continued, start, train_until

LAYOUT = ["parallel.tp=2", "parallel.ep=2"]


@pytest.fixture(scope="module")
def saved(tiny_folder, tmp_path_factory):
    """The checkpoints of a run of two ranks: one, of step 2; and the run's metrics of steps 3 and 4."""
    run = tmp_path_factory.mktemp("run")
    results = run_ranks(2, saved_and_continued, tiny_folder, run, LAYOUT, 2, 4, timeout_s=120)
    return run, results[0][1]


@pytest.fixture
def run(saved, tmp_path):
    """A copy of that folder."""
    folder = tmp_path / "checkpoints"
    return shutil.copytree(saved[0], folder)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- killed ----------------------------------------------------------------------------------------------------


def killed_while_saving(folder, run, rank, num_files, num_writes):
    """One rank is killed by SIGKILL once it has so many files and has begun so many writes into the next."""
    trainer, saving = start(folder, run, LAYOUT)
    progress = saving.restore(checkpoints.newest(run))
    train_until(trainer, progress, 3)
    if trainer.world.rank == rank:
        kill_at(num_files, num_writes, run.parent / "killed")
    saving.save(progress)


def kill_at(num_files, num_writes, mark):
    begin, write, done = ChecksummedFile.__enter__, ChecksummedFile.write, [0, 0]

    def counted_begin(file):
        if done[0] == num_files and num_writes == 0:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        done[0] += 1
        done[1] = 0
        return begin(file)

    def counted_write(file, data):
        done[1] += 1
        if done == [num_files + 1, num_writes]:
            write(file, bytes(data)[: len(bytes(data)) // 2])
            file.flush()
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return write(file, data)

    ChecksummedFile.__enter__, ChecksummedFile.write = counted_begin, counted_write


@pytest.mark.parametrize(
    "rank, num_files, num_writes",
    [(1, 0, 3), (0, 1, 0), (0, 3, 0), (0, 3, 1)],
    ids=["in a file of the policy", "between policy and value", "before the manifest", "in the manifest"],
)
def test_a_save_that_is_killed_leaves_the_one_before(tiny_folder, saved, run, rank, num_files, num_writes):
    with pytest.raises(RankFailure, match="ended with status"):
        run_ranks(2, killed_while_saving, tiny_folder, run, rank, num_files, num_writes, timeout_s=120)
    assert (run.parent / "killed").exists() and names(run) == ["step-000002", "step-000003.partial"]
    assert checkpoints.finished(run) == [run / "step-000002"]
    if num_files == 3:  # one case is enough
        results = run_ranks(2, resumed, tiny_folder, run, LAYOUT, 4, timeout_s=120)
        assert names(run) == ["step-000002"], "a start removes what is half-written"
        assert results[0][0] == saved[1]


# ---- what does not fit on the disk, and what is damaged --------------------------------------------------------


def full_disk_on_one_rank(folder, run, overrides):
    """-> (fault of a save while rank 1 may write no more than 100 kB, what was there then, what the next save said)."""
    trainer, saving = start(folder, run, overrides)
    progress = saving.restore(checkpoints.newest(run))
    train_until(trainer, progress, 3)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trainer.world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited[1]))
    try:
        saving.save(progress)
        saving.finish()
        fault = ""
    except CheckpointError as error:
        fault = str(error)
    left = names(run) if trainer.world.is_first else []
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    return fault, left, saving.save(progress) | saving.finish()


@pytest.mark.parametrize("in_background", ["false", "true"])
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_the_save_may_be_tried_again(tiny_folder, run, in_background):
    overrides = [*LAYOUT, f"checkpoint.in_background={in_background}"]
    results = run_ranks(2, full_disk_on_one_rank, tiny_folder, run, overrides, timeout_s=120)
    assert results[0][1] == ["step-000002"]
    for fault, _, said in results:
        assert fault.startswith("checkpoint step-000003, rank 1: [Errno 27] File too large: ")
        assert "step-000003.partial/policy/__1_0.distcp" in fault
        assert said["save/bytes"] > 1_000_000 and said["save/seconds"] > 0
    assert names(run) == ["step-000002", "step-000003"]


def restored_fault(folder, run):
    _, saving = start(folder, run, LAYOUT)
    with pytest.raises(CheckpointError) as caught:
        saving.restore(checkpoints.newest(run))
    return str(caught.value)


def test_a_damaged_file_is_named_on_every_rank(tiny_folder, run):
    for file in ("policy/__1_0.distcp", "value/__0_0.distcp"):
        path = run / "step-000002" / file
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 16
        path.write_bytes(raw)
        for fault in run_ranks(2, restored_fault, tiny_folder, run, timeout_s=120):
            assert f"{path} has the CRC-32" in fault
        raw[len(raw) // 2] ^= 16
        path.write_bytes(raw)
    (run / "step-000002" / "scheduler" / "ledger").unlink()
    for fault in run_ranks(2, restored_fault, tiny_folder, run, timeout_s=120):
        assert "step-000002/scheduler/ledger is missing (expected 2 bytes)" in fault


# ---- in the background -----------------------------------------------------------------------------------------


def trained_meanwhile(folder, run):
    """Rank 1 does not get to write before a step has been trained. -> (what there was then, what was said)."""
    trainer, saving = start(folder, run, [*LAYOUT, "checkpoint.in_background=true"])
    progress = saving.restore(checkpoints.newest(run))
    train_until(trainer, progress, 3)
    write, may_write = CheckpointWriter.write, threading.Event()
    if trainer.world.rank == 1:
        CheckpointWriter.write = lambda writer: may_write.wait(60) and write(writer)
    said = [saving.save(progress)]
    train_until(trainer, progress, 4)
    said.append(saving.settle())
    finished = names(run)
    may_write.set()
    said.append(saving.save(progress))  # waits for the one before
    return finished, said, saving.finish()


def test_training_goes_on_while_files_are_written_in_the_background(tiny_folder, run):
    for finished, said, last in run_ranks(2, trained_meanwhile, tiny_folder, run, timeout_s=120):
        assert finished == ["step-000002", "step-000003.partial"]
        nothing, still_nothing, of_step_3 = said
        assert nothing == still_nothing == {}
        for whole in (of_step_3, last):
            assert whole["save/bytes"] > 1e6 and whole["save/seconds"] > whole["save/waited_seconds"] > 0
    assert names(run) == ["step-000003", "step-000004"], "checkpoint.keep_last is 2"


# ---- what it is good for besides -------------------------------------------------------------------------------


def saved_and_exported(folder, run, export):
    trainer, saving = start(folder, run, LAYOUT)
    progress = Progress.at_start(trainer.config)
    train_until(trainer, progress, 3)
    saving.save(progress)
    export_policy(trainer, export)
    return trainer.models.value.chunks[0].output_layer.weight.detach().clone()


def test_both_models_of_a_checkpoint_become_hf_folders(tmp_path):
    """Of a family with an MTP layer that is not trained and copies in it."""
    folder = make_family_folder("glm4_moe", tmp_path / "hf", mtp=True, mtp_copies=True, seed=1)
    run, export = tmp_path / "checkpoints", tmp_path / "export"
    head, _ = run_ranks(2, saved_and_exported, folder, run, export, timeout_s=120)
    whole = checkpoints.newest(run)
    assert [StoredWeights(whole / part).common["vocab_size"] for part in ("policy", "value")] == [128, 128]
    megatron_to_hf(whole / "policy", tmp_path / "policy")
    megatron_to_hf(whole / "value", tmp_path / "value")
    expected, policy, value = (HFFolder(path) for path in (export, tmp_path / "policy", tmp_path / "value"))
    assert sorted(policy.names()) == sorted(expected.names()) == sorted(HFFolder(folder).names())
    assert all(torch.equal(policy.read_whole(name), expected.read_whole(name)) for name in expected.names())
    assert policy.config == expected.config
    assert torch.equal(value.read_whole("value_head.weight"), head) and head.any()
