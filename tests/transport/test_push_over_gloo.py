"""Real pushes between forked processes over gloo: two trainer ranks and one or two receivers, no engine."""

import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from megatron_sao.errors import ConfigError, ProtocolError
from megatron_sao.transport.group import WeightGroup, host_store, weight_group
from megatron_sao.transport.plan import WireItem, make_plan
from megatron_sao.transport.receiver import TensorAssembler, WeightReceiver
from megatron_sao.transport.sender import WeightSender
from tests.support.ranks import run_ranks

NUM_TRAINERS = 2
TIMEOUT_S = 10.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def the_plan(bucket_bytes: int = 64):
    """Rank 0 sends `a` whole and the upper rows of `b`; rank 1 the right half of `c`, the rest of `b`, and so on."""
    by_rank = [
        [WireItem("layers.0.a", "float32", (3, 5)), WireItem("layers.1.b", "float32", (6, 4), 0, 0, 2),
         WireItem("layers.2.c", "bfloat16", (4, 8), 1, 0, 4)],
        [WireItem("layers.1.b", "float32", (6, 4), 0, 2, 4), WireItem("layers.2.c", "bfloat16", (4, 8), 1, 4, 4),
         WireItem("bias", "float32", ())],
    ]  # fmt: skip
    return make_plan(by_rank, bucket_bytes=bucket_bytes)


def the_weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    shapes = {"layers.0.a": (3, 5), "layers.1.b": (6, 4), "layers.2.c": (4, 8), "bias": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def view_of(weights: dict[str, torch.Tensor]):
    return lambda item: (
        weights[item.name] if item.dim < 0 else weights[item.name].narrow(item.dim, item.start, item.length)
    )


def join(port: int, world_size: int):
    """This process's place in the weight group, and its rank."""
    rank = int(os.environ["RANK"])
    store = host_store("127.0.0.1", port=port, timeout_s=TIMEOUT_S) if rank == 0 else None
    return rank, weight_group("127.0.0.1", port, rank, world_size, timeout_s=TIMEOUT_S, store=store)


def refusal(function, *args, **kwargs) -> str:
    """The message of the ProtocolError that a call raises; "" if it raises none."""
    try:
        function(*args, **kwargs)
    except ProtocolError as error:
        return str(error)
    return ""


def push_twice(port):
    rank, group = join(port, 4)
    if rank < NUM_TRAINERS:
        sender = WeightSender(group, the_plan())
        return [sender.send(view_of(the_weights(version)), version).num_bytes for version in (1, 2)]
    receiver, got = WeightReceiver(group, the_plan()), []
    for version in (1, 2):
        arrived: list[tuple[str, torch.Tensor]] = []
        receiver.receive(version, load=arrived.extend)
        got.append(arrived)
    return got


def test_every_tensor_arrives_whole_once_and_new_each_time():  # WSY-09
    results = run_ranks(4, push_twice, free_port())
    assert results[0] == results[1] == [the_plan().num_bytes] * 2
    for received in results[2:]:
        for version, arrived in zip((1, 2), received, strict=True):
            expected = the_weights(version)
            assert sorted(name for name, _ in arrived) == sorted(expected)
            for name, tensor in arrived:
                cast = expected[name].bfloat16() if name == "layers.2.c" else expected[name]
                assert tensor.dtype == cast.dtype and torch.equal(tensor, cast), name


def push_without_a_tensor(port):
    rank, group = join(port, 3)
    if rank < NUM_TRAINERS:
        weights = the_weights(1)
        if rank == 1:
            del weights["bias"]
        sender = WeightSender(group, the_plan())
        message = refusal(sender.send, view_of(weights), 1)
        sender.send(view_of(the_weights(2)), 1)
        return message
    receiver, loads = WeightReceiver(group, the_plan()), []
    message = refusal(receiver.receive, 1, load=loads.append)
    num_loads = len(loads)
    receiver.receive(1, load=loads.append)
    return message, num_loads, len(loads)


def test_a_rank_that_lacks_a_tensor_stops_the_push_before_the_first_byte_and_the_next_push_works():
    first, second, (engine, num_loads, num_loads_after) = run_ranks(3, push_without_a_tensor, free_port())
    assert "bias" in second
    assert "trainer rank 1 refused" in first and "trainer rank 1 refused" in engine
    assert num_loads == 0 and num_loads_after > 0


def push_with_a_wrong_view(port, kind):
    rank, group = join(port, 3)
    if rank == 2:
        return refusal(WeightReceiver(group, the_plan()).receive, 1, load=lambda tensors: None)
    weights = the_weights(1)
    if kind == "shape":
        weights["layers.0.a"] = torch.zeros(5, 3)
    elif kind == "dtype":
        weights["layers.0.a"] = torch.zeros(3, 5, dtype=torch.int32)
    else:
        weights["layers.0.a"] = torch.zeros(3, 5, device="meta")
    return refusal(WeightSender(group, the_plan()).send, view_of(weights), 1)


@pytest.mark.parametrize(("kind", "message"), [("shape", "(5, 3)"), ("dtype", "int32"), ("meta", "meta device")])
def test_a_tensor_of_another_shape_or_dtype_is_refused(kind, message):
    first, second, engine = run_ranks(3, push_with_a_wrong_view, free_port(), kind)
    assert message in first and "layers.0.a" in first
    assert "trainer rank 0 refused" in second and "trainer rank 0 refused" in engine


def load_fails_in_the_middle(port, where):
    rank, group = join(port, 4)
    if rank < NUM_TRAINERS:
        sender = WeightSender(group, the_plan())
        message = refusal(sender.send, view_of(the_weights(1)), 1)
        sender.send(view_of(the_weights(1)), 1)
        return message
    receiver = WeightReceiver(group, the_plan())

    def load(tensors):
        if rank == 3 and where == "load" and any(name == "layers.1.b" for name, _ in tensors):
            raise RuntimeError("no room for layers.1.b")

    def add(assembler, item, piece):
        if item.name == "layers.1.b":
            raise MemoryError
        return whole_add(assembler, item, piece)

    whole_add = TensorAssembler.add
    if rank == 3 and where == "assembly":
        TensorAssembler.add = add
    message = refusal(receiver.receive, 1, load=load)
    TensorAssembler.add = whole_add
    receiver.receive(1, load=lambda tensors: None)
    return message


@pytest.mark.parametrize(("where", "said"), [("load", "no room for layers.1.b"), ("assembly", "MemoryError()")])
def test_an_engine_that_fails_while_loading_is_heard_by_all_and_the_next_push_works(where, said):
    messages = run_ranks(4, load_fails_in_the_middle, free_port(), where)
    assert all("engine worker 1 refused" in message for message in messages[:3])
    assert said in messages[3]


def verify_fails(port):
    rank, group = join(port, 3)
    if rank < NUM_TRAINERS:
        return refusal(WeightSender(group, the_plan()).send, view_of(the_weights(1)), 1)

    def verify():
        raise ProtocolError("module x received nothing")

    return refusal(WeightReceiver(group, the_plan()).receive, 1, load=lambda tensors: None, verify=verify)


def test_an_engine_whose_model_is_not_whole_refuses_at_the_end():
    first, second, engine = run_ranks(3, verify_fails, free_port())
    assert "engine worker 0 refused" in first and "engine worker 0 refused" in second
    assert "module x received nothing" in engine


def disagree(port, what):
    rank, group = join(port, 3)
    version = 8 if (what == "version" and rank == 2) else 7
    plan = the_plan(bucket_bytes=1024) if (what == "plan" and rank == 2) else the_plan()
    if rank < NUM_TRAINERS:
        return refusal(WeightSender(group, plan).send, view_of(the_weights(1)), version)
    return refusal(WeightReceiver(group, plan).receive, version, load=lambda tensors: None)


@pytest.mark.parametrize(("what", "message"), [("version", "is at policy_version 8"), ("plan", "another push plan")])
def test_ranks_that_disagree_refuse(what, message):
    first, second, engine = run_ranks(3, disagree, free_port(), what)
    assert message in first and message in second and "engine worker 0" in first
    assert engine.count("trainer rank") == 2


def trainer_dies_in_the_middle(port):
    rank, group = join(port, 3)
    if rank == 1:
        send, sent = group.send, []

        def send_or_die(tensor, dst_rank, tag):
            sent.append(tag)
            if len(sent) == 2:
                os._exit(0)
            return send(tensor, dst_rank, tag)

        group.send = send_or_die
    started = time.monotonic()
    if rank < NUM_TRAINERS:
        message = refusal(WeightSender(group, the_plan()).send, view_of(the_weights(1)), 1)
    else:
        message = refusal(WeightReceiver(group, the_plan()).receive, 1, load=lambda tensors: None)
    return message, time.monotonic() - started


def in_a_child_if(is_dying: bool, function, *args):
    """What the function returns; a rank that shall die runs it in a child, so that only the child is lost."""
    if not is_dying:
        return function(*args)
    pid = os.fork()
    if not pid:
        try:
            function(*args)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return None


def test_a_trainer_that_dies_in_the_middle_ends_the_push_within_the_limit():
    def run(port):
        return in_a_child_if(os.environ["RANK"] == "1", trainer_dies_in_the_middle, port)

    first, dead, engine = run_ranks(3, run, free_port())
    assert dead is None
    for message, seconds in (first, engine):
        assert "died or does not take part" in message
        assert seconds < TIMEOUT_S + 5


def test_a_group_that_nobody_joins_ends_within_the_limit():
    store = host_store("127.0.0.1", timeout_s=1)
    with pytest.raises(ProtocolError, match="rank 0 could not join the weight group of 2"):
        weight_group("127.0.0.1", store.port, 0, 2, timeout_s=1, store=store)


def test_a_group_may_be_closed_while_another_thread_begins_a_message():
    """As the transfer thread of a receiver does when the thread that loads gives up."""
    begins, goes_on, messages = threading.Event(), threading.Event(), []

    def recv(tensors, rank, tag):
        if tag == 1:
            begins.set()
            assert goes_on.wait(TIMEOUT_S)
        return SimpleNamespace(wait=lambda limit: None)

    group = WeightGroup(SimpleNamespace(recv=recv), 0, 2, torch.device("cpu"), TIMEOUT_S, make=None)
    opened = group.receive(torch.zeros(1), 1, 0)
    thread = threading.Thread(target=lambda: messages.append(refusal(group.receive, torch.zeros(1), 1, 1)), daemon=True)
    thread.start()
    assert begins.wait(TIMEOUT_S)
    group.close()
    goes_on.set()
    thread.join(TIMEOUT_S)
    assert messages == ["the weight group was closed as message 1 from rank 1 began"]
    assert "was closed before message 0" in refusal(opened.wait)
    assert "join a new one" in refusal(group.receive, torch.zeros(1), 1, 2)


def test_the_store_listens_on_the_given_address_alone_and_refuses_a_port_in_use():
    store = host_store("127.0.0.1", timeout_s=1)
    with socket.socket() as other:
        other.bind(("127.0.0.2", store.port))  # free: the store took 127.0.0.1 only
    with pytest.raises(ConfigError, match="Address already in use"):
        host_store("127.0.0.1", port=store.port, timeout_s=1)


@pytest.mark.parametrize(("rank", "backend", "message"), [(2, "gloo", "rank 2"), (0, "mpi", "push.backend = 'mpi'")])
def test_bad_arguments_of_the_group(rank, backend, message):
    with pytest.raises(ConfigError, match=message):
        weight_group("127.0.0.1", 1, rank, 2, backend=backend, timeout_s=1)


# ---- the assembler by itself ------------------------------------------------------------------------------------


def piece(start: int, length: int, value: float = 1.0) -> tuple[WireItem, torch.Tensor]:
    return WireItem("t", "float32", (4, 2), 0, start, length), torch.full((length, 2), value)


def test_slices_in_any_order_make_the_tensor_and_it_keeps_its_values():
    assembler = TensorAssembler({"t": (4, 2)})
    item, buffer = piece(3, 1, 9.0)
    assert assembler.add(item, buffer) is None
    buffer.zero_()  # the buffer is used again for the next bucket
    assert assembler.missing() == ["t"]
    whole = assembler.add(*piece(0, 3, 5.0))
    assert whole.tolist() == [[5, 5]] * 3 + [[9, 9]]
    assert assembler.missing() == []


def test_a_whole_tensor_does_not_alias_the_buffer():
    assembler = TensorAssembler({"t": (4, 2)})
    buffer = torch.ones(4, 2)
    whole = assembler.add(WireItem("t", "float32", (4, 2)), buffer)
    buffer.zero_()
    assert whole.sum() == 8


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (piece(1, 2), r"rows \[1, 3\) arrived twice"),
        ((WireItem("u", "float32", (4, 2)), torch.ones(4, 2)), "unexpected tensor u"),
        ((WireItem("t", "float32", (4, 3), 0, 2, 2), torch.ones(2, 3)), r"\(4, 3\)"),
        ((WireItem("t", "float32", (4, 2), 0, 2, 2), torch.ones(1, 2)), r"arrived as \(1, 2\)"),
    ],
)
def test_what_must_not_arrive_is_an_error(second, message):
    assembler = TensorAssembler({"t": (4, 2)})
    assembler.add(*piece(0, 2))
    with pytest.raises(ProtocolError, match=message):
        assembler.add(*second)


def test_a_complete_tensor_that_comes_again_is_an_error():
    assembler = TensorAssembler({"t": (4, 2)})
    assembler.add(*piece(0, 4))
    with pytest.raises(ProtocolError, match="arrived twice"):
        assembler.add(*piece(0, 4))
