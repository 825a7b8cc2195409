"""What a trainer rank does in a push, told by a scheduler that follows a script."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.convert.slices import WeightSlice
from megatron_sao.errors import ProtocolError, TrainingError
from megatron_sao.records import (
    Ack,
    FormGroup,
    GroupOpen,
    Hello,
    PushDone,
    PushFailed,
    PushGo,
    PushRequest,
    PushSent,
    Welcome,
)
from megatron_sao.train import push as push_module
from megatron_sao.train.push import Pusher
from megatron_sao.transport.sender import PushStatistics
from tests.support.ranks import run_ranks

FORM = FormGroup(num_engines=2, num_workers=4, is_push_due=True)
JOIN_ONLY = FormGroup(num_engines=2, num_workers=4, is_push_due=False)
GO, FAILED = PushGo(policy_version=1), PushFailed(reason="an engine died")
DONE = PushDone(policy_version=1, metrics={"push/pause_s": 0.25})


class World:
    """The scheduler's answers, the group and the sender; everything that happens is written down in `events`."""

    def __init__(self, answers, faults):
        self.answers, self.faults, self.events = list(answers), list(faults), []
        self.num_groups = 0
        self.broken_weight = None
        self.num_prepared = 0  # neither sent nor discarded: files of it would stay on a shared disk

    def request(self, message, expected, timeout_s=None):
        match message:
            case Hello():
                return Welcome(num_engines=2)
            case PushRequest():
                self.events.append(f"ask {'in' if message.has_group else 'without'} group")
            case GroupOpen():
                self.events.append("open")
            case PushSent():
                self.events.append(f"sent {message.fault}".strip())
        answer = self.answers.pop(0)
        assert isinstance(answer, expected), (answer, expected)
        return answer

    def first(self, fault):
        return fault

    def host_store(self, host, timeout_s):
        return SimpleNamespace(port=1234)

    def weight_group(self, host, port, rank, world_size, **_):
        assert (port, rank, world_size) == (1234, 0, 5)
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "join":
            raise ProtocolError("nobody came")
        self.num_groups += 1
        number = self.num_groups
        return SimpleNamespace(fault=fault, close=lambda: self.events.append(f"leave {number}"))

    def make_sender(self, group, plan):
        def prepare(view_of, version):
            self.events.append("prepare")
            self.num_prepared = 1
            return self.broken_weight

        def discard():
            self.num_prepared = 0

        def send(view_of, version):
            self.events.append("send")
            if group.fault:
                raise ProtocolError(group.fault)
            return PushStatistics(0.5, 0.5, 100, 100, 1)

        return SimpleNamespace(prepare=prepare, send=send, discard=discard)


def connected(answers, faults):
    dist.init_process_group("gloo")
    world = World(answers, faults)
    for name in ("host_store", "weight_group", "make_sender"):
        setattr(push_module, name, getattr(world, name))
    exporter = SimpleNamespace(
        slices_by_rank=[[WeightSlice("model.norm.weight", (4,), 0, 0, 4, "float32", "a", 0)]],
        shape=SimpleNamespace(
            family="qwen3_moe", mla=None, num_kv_groups=2, num_experts=8, num_layers=4, is_tied=False
        ), view=None,
    )  # fmt: skip
    pusher = Pusher(exporter, {"model.norm.weight": (4,)}, load_config(None, []), world, "127.0.0.1")
    pusher.connect(0)
    world.events.append("--")
    return world, pusher


def play(answers, faults):
    world, pusher = connected(answers, faults)
    metrics = pusher.push(1)
    assert not world.answers and not world.num_prepared
    return world.events, metrics


CONNECTED = ["ask without group", "open", "ask in group", "--"]  # the answers to which are JOIN_ONLY, Ack(), DONE


@pytest.mark.parametrize(
    ("answers", "faults", "events"),
    [
        # The first bucket is ready before engines are asked to stop.
        ([GO, DONE], [], ["prepare", "ask in group", "send", "sent"]),
        # Other engines answer than before.
        ([FORM, Ack(), GO, DONE], [],
         ["prepare", "ask in group", "leave 1", "open", "prepare", "ask in group", "send", "sent"]),
        # An engine dies while the trainer sends; the others are brought to the version by a new group.
        ([GO, FAILED, FORM, Ack(), GO, DONE], ["broke"],
         ["prepare", "ask in group", "send", "leave 1", "sent broke", "ask without group", "open", "prepare",
          "ask in group", "send", "sent"]),
        # An engine dies after it got everything; nobody else lacks the version.
        ([GO, FAILED, JOIN_ONLY, Ack(), DONE], [],
         ["prepare", "ask in group", "send", "sent", "leave 1", "ask without group", "open", "ask in group"]),
        # An engine does not join.
        ([FORM, FAILED, FORM, Ack(), GO, DONE], [],
         ["prepare", "ask in group", "leave 1", "open", "ask without group", "open", "prepare", "ask in group", "send",
          "sent"]),
        # This rank itself does not join.
        ([FORM, Ack(), FORM, Ack(), GO, DONE], ["", "join"],
         ["prepare", "ask in group", "leave 1", "open", "ask without group", "open", "prepare", "ask in group", "send",
          "sent"]),
    ],
)  # fmt: skip
def test_a_rank_does_what_the_scheduler_asks_for_until_it_is_done(answers, faults, events):
    ((found, metrics),) = run_ranks(1, play, [JOIN_ONLY, Ack(), DONE, *answers], faults)
    assert found == CONNECTED + events
    assert metrics["push/pause_s"] == 0.25 and metrics["push/bytes"] == (100 if "send" in events else 0)
    assert metrics["push/total_s"] > 0


def play_with_a_broken_weight(answers):
    world, pusher = connected(answers, [])
    world.broken_weight = "trainer rank 1: model.norm.weight holds a number that is not finite"
    with pytest.raises(TrainingError, match="the weights of policy_version 1 are not pushed: trainer rank 1: model"):
        pusher.push(1)
    assert not world.num_prepared
    return world.events


def test_weights_that_cannot_be_sent_end_the_run_before_an_engine_is_asked_to_stop():
    (events,) = run_ranks(1, play_with_a_broken_weight, [JOIN_ONLY, Ack(), DONE])
    assert events == CONNECTED + ["prepare"]
