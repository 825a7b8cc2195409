"""Rank 0 speaks with the scheduler, every rank hears: answers, refusals and silence alike."""

import dataclasses

import pytest
import torch.distributed as dist

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.errors import ProtocolError
from megatron_sao.records import Ack, Batch, EvalRequest, EvalResult, NeedBatch, PushWanted
from megatron_sao.train import link as link_module
from megatron_sao.train.link import SchedulerLink
from tests.support.ranks import run_ranks
from tests.support.trajectories import random_trajectories

NEED = NeedBatch(step=3, phase="train", num_trajectories=2, policy_version=1)


@dataclasses.dataclass
class Channel:
    """Rank 0's channel, with an answer or an error laid in."""

    answer: object
    asked: list = dataclasses.field(default_factory=list)

    def request(self, message, timeout_s=None):
        self.asked.append((message, timeout_s))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self):
        self.asked.append("closed")


def ask(answer, expected):
    """(what this rank heard, what rank 0 asked)."""
    dist.init_process_group("gloo")
    channel = Channel(answer)
    link_module.TrainerChannel = lambda address, timeout_s: channel
    link = SchedulerLink("tcp://127.0.0.1:1", longest_wait_s=5.0)
    try:
        heard = link.request(NEED, expected, timeout_s=2.0)
    except ProtocolError as error:
        heard = f"ProtocolError: {error}"
    link.close()
    return heard, channel.asked


def test_every_rank_gets_the_answer_that_rank_0_received():
    trajectories = random_trajectories(2)
    answer = Batch(step=3, trajectories=trajectories, metrics={"schedule/wait_s": 0.5})
    results = run_ranks(3, ask, answer, Batch)
    assert results[0][1] == [(NEED, 2.0), "closed"]
    assert results[1][1] == results[2][1] == [], "the others open no connection"
    for heard, _ in results:
        assert heard.step == 3 and heard.metrics == answer.metrics
        for got, sent in zip(heard.trajectories, trajectories, strict=True):
            assert got.prompt == sent.prompt and (got.token_ids == sent.token_ids).all()


@pytest.mark.parametrize(
    "answer, text",
    [
        (ProtocolError("the scheduler is gone"), "the scheduler is gone"),
        (Ack(), "the scheduler answered Ack to NeedBatch, not Batch"),
    ],
    ids=["gone", "out of turn"],
)
def test_a_failure_reaches_every_rank_with_its_reason(answer, text):
    for heard, _ in run_ranks(2, ask, answer, Batch):
        assert heard.startswith("ProtocolError: ") and text in heard


def several(count):
    dist.init_process_group("gloo")
    channel = Channel(Ack())
    link_module.TrainerChannel = lambda address, timeout_s: channel
    link = SchedulerLink("tcp://127.0.0.1:1", longest_wait_s=5.0)
    heard = []
    for number in range(count):
        channel.answer = EvalResult(name=f"step-{number}", pass_rate=0.5, mean_reward=0.5, num_episodes=number)
        heard.append(link.request(EvalRequest(name=f"step-{number}"), EvalResult).num_episodes)
    return heard


def test_requests_keep_their_order_on_every_rank():
    assert run_ranks(2, several, 4) == [[0, 1, 2, 3]] * 2


def wanted(num_pushes):
    dist.init_process_group("gloo")
    answers = [PushWanted()] * num_pushes + [Ack()]
    link_module.TrainerChannel = lambda address, timeout_s: Scripted(answers)
    link = SchedulerLink("tcp://127.0.0.1:1", longest_wait_s=5.0)
    pushes = []
    link.push_again = lambda: pushes.append(len(pushes))
    return type(link.request(NEED, Ack)).__name__, pushes, link.first("broke" if dist.get_rank() else "")


class Scripted:
    def __init__(self, answers):
        self.answers = iter(answers)

    def request(self, message, timeout_s=None):
        assert message == NEED
        return next(self.answers)


def test_every_rank_pushes_again_when_the_scheduler_wants_it_and_then_asks_again():
    assert run_ranks(2, wanted, 2) == [("Ack", [0, 1], "broke")] * 2
