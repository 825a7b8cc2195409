"""Work that ranks do side by side: what one cannot do, none has done, and nobody waits for ever."""

import time

import pytest

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.errors import CheckpointError
from megatron_sao.parallel.init import start_world
from megatron_sao.train.agreement import Agreement
from tests.support.ranks import run_ranks


def fault_of(action):
    try:
        return action()
    except CheckpointError as error:
        return str(error)


def raised(error):
    raise error


def worked_together():
    rank = start_world(load_config(None, ["parallel.dp=2"])).rank
    agreement = Agreement(60)
    good = agreement.each("all", lambda: rank * 10), agreement.first("one", lambda: f"of rank {rank}")
    bad = fault_of(lambda: agreement.each("save", lambda: rank and raised(OSError(28, "No space left", "file"))))
    named = fault_of(lambda: agreement.first("save", lambda: raised(CheckpointError("file x is damaged"))))
    return good, bad, named


def test_results_come_to_rank_0_and_faults_to_all():
    first, second = run_ranks(2, worked_together)
    assert first[0] == ([0, 10], "of rank 0") and second[0] == (None, "of rank 0")
    for _, bad, named in (first, second):
        assert bad == "save, rank 1: [Errno 28] No space left: 'file'"
        assert named == "file x is damaged"


def waited_in_vain(mark):
    """Rank 1 does not come before rank 0 has given up."""
    rank = start_world(load_config(None, ["parallel.dp=2"])).rank
    agreement = Agreement(2)
    deadline = time.monotonic() + 30
    while rank == 1 and not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if rank == 0:
        fault = fault_of(lambda: agreement.each("checkpoint step-000003", lambda: None))
        mark.touch()
        return fault


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_configured(tmp_path):
    fault, _ = run_ranks(2, waited_in_vain, tmp_path / "mark")
    assert fault.startswith("checkpoint step-000003: another rank needs more than checkpoint.timeout_s = 2 s longer")
