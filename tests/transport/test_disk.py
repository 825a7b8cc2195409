"""Pushes through files: the same agreements and proofs as over the network. Forked processes, no engine."""

import resource
import signal

import msgspec
import pytest
import torch

from megatron_sao.transport.disk import file_of, make_receiver, make_sender
from megatron_sao.transport.engine_layout import EngineLayout
from megatron_sao.transport.message import TRAILER_BYTES
from megatron_sao.transport.plan import WireItem, make_plan
from tests.support.ranks import run_ranks
from tests.transport.test_push_over_gloo import NUM_TRAINERS, free_port, join, refusal, the_plan, the_weights, view_of

Q, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"


def through(folder, plan=None):
    return msgspec.structs.replace(plan or the_plan(), folder=str(folder))


def push_twice(port, folder):
    rank, group = join(port, 4)
    if rank < NUM_TRAINERS:
        sender = make_sender(group, through(folder))
        done = []
        for version in (1, 2):
            sender.prepare(view_of(the_weights(version)), version)
            assert file_of(folder, version, rank).exists()  # before the engines stop
            done.append(sender.send(view_of(the_weights(version)), version).num_bytes)
        return done
    receiver, got = make_receiver(group, through(folder)), []
    for version in (1, 2):
        arrived: list[tuple[str, torch.Tensor]] = []
        receiver.receive(version, load=arrived.extend)
        got.append(arrived)
    return got


def test_every_tensor_arrives_whole_once_and_new_each_time_and_no_file_stays(tmp_path):
    results = run_ranks(4, push_twice, free_port(), tmp_path / "push")
    assert results[0] == results[1] == [the_plan().num_bytes] * 2
    for received in results[2:]:
        for version, arrived in zip((1, 2), received, strict=True):
            expected = the_weights(version)
            assert sorted(name for name, _ in arrived) == sorted(expected)
            for name, tensor in arrived:
                cast = expected[name].bfloat16() if name == "layers.2.c" else expected[name]
                assert tensor.dtype == cast.dtype and torch.equal(tensor, cast), name
    assert not list((tmp_path / "push").rglob("*"))


def two_kinds(port, folder):
    rank, group = join(port, 3)
    q, norm = torch.arange(32.0).view(4, 8), torch.ones(4)
    plan = make_plan(
        [[WireItem(Q, "float32", (4, 8)), WireItem(NORM, "float32", (4,))]],
        bucket_bytes=1 << 10, engine=EngineLayout(tensor_parallel=2),
    )  # fmt: skip
    plan = through(folder, plan)
    if rank == 0:
        views = {Q: q, NORM: norm}
        make_sender(group, plan).send(view_of(views), 1)
        return None
    arrived: list[tuple[str, torch.Tensor]] = []
    make_receiver(group, plan).receive(1, load=arrived.extend)
    return dict(arrived)


def test_a_worker_reads_only_the_rows_that_it_loads(tmp_path):
    _, first, second = run_ranks(3, two_kinds, free_port(), tmp_path)
    q = torch.arange(32.0).view(4, 8)
    for found, mine, others in ((first, slice(0, 2), slice(2, 4)), (second, slice(2, 4), slice(0, 2))):
        assert torch.equal(found[Q][mine], q[mine]) and found[Q][others].isnan().all()
        assert torch.equal(found[NORM], torch.ones(4))


def push_what_changed_on_disk(port, folder, how):
    """Rank 0's file is changed after it was written and before anybody reads; then comes a push that nobody touches."""
    rank, group = join(port, 3)
    plan = through(folder)
    if rank < NUM_TRAINERS:
        sender = make_sender(group, plan)
        sender.prepare(view_of(the_weights(1)), 1)
        if rank == 0:
            damage(file_of(folder, 1, 0), how, plan.buckets[0].num_bytes)
        message = refusal(sender.send, view_of(the_weights(1)), 1)
        sender.send(view_of(the_weights(2)), 2)
        return message
    receiver = make_receiver(group, plan)
    message = refusal(receiver.receive, 1, load=lambda tensors: None)
    arrived: list[tuple[str, torch.Tensor]] = []
    receiver.receive(2, load=arrived.extend)
    assert torch.equal(dict(arrived)["layers.0.a"], the_weights(2)["layers.0.a"])
    return message


def damage(path, how, first_bucket_bytes):
    content = bytearray(path.read_bytes())
    if how == "changed":
        content[first_bucket_bytes // 2] ^= 1
    elif how == "buckets swapped":
        size = first_bucket_bytes + TRAILER_BYTES
        content = content[size:] + content[:size]
    elif how == "cut":
        content = content[:-1]
    path.unlink() if how == "gone" else path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("changed", "arrived with other bytes than it was sent with (checksum)"),
        ("buckets swapped", "was expected"),
        ("cut", "1 lack"),
        ("gone", "cannot read"),
    ],
)
def test_a_file_that_is_not_what_was_written_is_refused_by_all_and_the_next_push_works(tmp_path, how, expected):
    first, second, engine = run_ranks(3, push_what_changed_on_disk, free_port(), tmp_path, how)
    assert expected in engine
    assert "engine worker 0 refused" in first and "engine worker 0 refused" in second


def push_into_a_folder_that_is_a_file(port, folder):
    rank, group = join(port, 3)
    if rank < NUM_TRAINERS:
        return refusal(make_sender(group, through(folder)).send, view_of(the_weights(1)), 1)
    return refusal(make_receiver(group, through(folder)).receive, 1, load=lambda tensors: None)


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_read(tmp_path):
    (tmp_path / "file").write_text("")
    first, _, engine = run_ranks(3, push_into_a_folder_that_is_a_file, free_port(), tmp_path / "file")
    assert "cannot write" in first and "(push.folder)" in first and "trainer rank 0 refused" in engine


def push_onto_a_full_disk(port, folder):
    rank, group = join(port, 3)
    if rank == 2:
        receiver = make_receiver(group, through(folder))
        return refusal(receiver.receive, 1, load=lambda tensors: None)
    sender = make_sender(group, through(folder))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))
    fault = sender.prepare(view_of(the_weights(1)), 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    left = [path.name for path in folder.rglob("rank-00000*")]
    refusal(sender.send, view_of(the_weights(1)), 1)
    return fault, left


def test_nothing_stays_of_a_push_that_did_not_fit_on_the_disk(tmp_path):
    first, second, engine = run_ranks(3, push_onto_a_full_disk, free_port(), tmp_path)
    assert "cannot write" in first[0] and "File too large" in first[0] and first[1] == []
    assert second[0] is None and "trainer rank 0 refused" in engine
    assert not list(tmp_path.rglob("*"))
