"""The doctor's trial between real processes, small."""

import os

import pytest
import torch

from megatron_sao.errors import ProtocolError
from megatron_sao.transport import trial
from tests.support.ranks import run_ranks
from tests.transport.test_push_over_gloo import free_port, join


def try_out(port):
    trial.SUM_BYTES, trial.PUSH_BYTES = {"cpu": 4096}, {"cpu": 2 * trial.PIECE_BYTES}
    rank, group = join(port, 3)
    texts = trial.gather_texts(group, "é" * rank)
    return texts, trial.run_trial(group, "gloo")


def test_a_trial_sums_over_all_ranks_and_pushes_from_the_first_to_the_last():
    for texts, found in run_ranks(3, try_out, free_port()):
        assert texts == ["", "é", "éé"]
        assert (found.backend, found.num_ranks) == ("gloo", 3)
        assert (found.sum_bytes, found.push_bytes) == (4096, 2 * trial.PIECE_BYTES)
        assert found.sum_s > 0 and found.push_s > 0
    assert found.sum_bytes_per_s == pytest.approx(2 * 2 / 3 * 4096 / found.sum_s)


def sum_with_a_rank_that_adds_something_else(port):
    trial.SUM_BYTES = {"cpu": 4096}
    rank, group = join(port, 2)
    ones = torch.ones
    torch.ones = lambda *size, **options: ones(*size, **options) * (1 + int(os.environ["RANK"]))
    with pytest.raises(ProtocolError, match="a sum of ones over 2 ranks is not 2 everywhere"):
        trial.run_trial(group, "gloo")


def test_a_sum_that_is_wrong_is_told():
    run_ranks(2, sum_with_a_rank_that_adds_something_else, free_port())
