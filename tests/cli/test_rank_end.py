"""What a rank leaves behind when it or another one fails: one cause, for whoever started it."""

import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_sao.cli.failure import FAILURE_FILE, Failure, read_failure
from megatron_sao.cli.rank_end import RankEnd
from megatron_sao.config import load_config
from megatron_sao.errors import CheckpointError, ProtocolError
from tests.support.ranks import RankFailure, run_ranks

CONFIG = load_config(None, ["parallel.dp=2", "parallel.lost_after_s=6", "parallel.timeout_s=1"])


@pytest.fixture
def record(tmp_path, monkeypatch) -> Path:
    """The file in which the ranks record why they end."""
    monkeypatch.setenv(FAILURE_FILE, str(tmp_path / "failure.json"))
    return tmp_path / "failure.json"


def begin(end: RankEnd) -> int:
    end.watch(CONFIG, "127.0.0.1")
    dist.init_process_group("gloo", timeout=timedelta(seconds=CONFIG.parallel.timeout_s))
    return dist.get_rank()


def fail_on_rank_1():
    try:
        with RankEnd() as end:
            if begin(end) == 1:
                raise CheckpointError("tensor x is missing")
            time.sleep(60)
    except CheckpointError:
        time.sleep(60)  # rank 0 shall end by what it hears, not by the end of this process


def test_the_fault_of_one_rank_is_everybodys_cause(record, capfd):
    with pytest.raises(RankFailure, match=f"rank 0 ended with status {ProtocolError.exit_code}"):
        run_ranks(2, fail_on_rank_1)
    said = capfd.readouterr().err.splitlines()
    assert f"error: rank 1 of the trainer (host {socket.gethostname()}) failed: tensor x is missing" in said
    assert read_failure(record) == Failure(CheckpointError.exit_code, "tensor x is missing")


def hang_on_rank_1():
    with RankEnd() as end:
        if begin(end) == 1:
            time.sleep(60)
        dist.all_reduce(torch.ones(1))


def test_a_rank_that_hangs_is_told_from_one_that_is_gone(record):
    with pytest.raises(RankFailure, match="ProtocolError: ranks of the trainer could not exchange tensors"):
        run_ranks(2, hang_on_rank_1)
    failure = read_failure(record)
    assert failure.exit_code == ProtocolError.exit_code
    assert "a rank hangs or needs more than parallel.timeout_s = 1 s" in failure.message


def end_before_the_watch():
    with RankEnd():
        raise KeyError("x") if os.environ["RANK"] == "0" else CheckpointError("never seen")


def test_rank_0_speaks_first(record):
    with pytest.raises(RankFailure):
        run_ranks(2, end_before_the_watch)
    assert read_failure(record) == Failure(1, "KeyError: 'x'")
