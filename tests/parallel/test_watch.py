"""What ranks learn about each other's ends; a host that falls silent is in tests/system/test_two_hosts.py."""

import json
import os
import queue
import socket
import threading
import time

import pytest
from torch.distributed import PrefixStore, TCPStore

from megatron_sao.parallel.watch import PeerWatch
from tests.support.ranks import RankFailure, run_ranks

HOST = socket.gethostname()
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def store(monkeypatch):
    """As torchrun does: a process above the ranks holds the store. -> its port"""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def start_watch(port: int, losses: queue.Queue, join_timeout_s: float = WAIT_S) -> PeerWatch:
    os.environ["MASTER_PORT"] = str(port)
    return PeerWatch("127.0.0.1", join_timeout_s=join_timeout_s, lost_after_s=6.0, on_loss=losses.put)


def leave(port, order, rank_of_fault, rank_that_dies):
    """Ranks end one after the other in `order`, in the given manner. -> what each of them hears"""
    losses = queue.Queue()
    watch = start_watch(port, losses)
    rank = int(os.environ["RANK"])
    time.sleep(0.3 * order.index(rank))
    if rank == rank_that_dies:
        watch._peers[0].connection.shutdown(socket.SHUT_RDWR)  # what the kernel does when the process ends
        return None
    if rank == rank_of_fault:
        watch.close("tensor x has shape [1], not [2]")
        return None
    if rank_of_fault is rank_that_dies is None:
        watch.close()
        for thread in threading.enumerate():
            if thread.name == "peer-watch":
                thread.join(WAIT_S)
        return losses.qsize()
    return losses.get(timeout=WAIT_S)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2, 1, 0)])
def test_farewells_are_no_loss_in_any_order(store, order):
    assert run_ranks(3, leave, store.port, order, None, None) == [0, 0, 0]


def test_a_rank_that_ends_too_early_is_named_on_every_rank(store):
    told = f"rank 1 of the trainer (host {HOST}) ended before the run was over; its own log says why"
    assert run_ranks(3, leave, store.port, (0, 1, 2), None, 1) == [told, None, told]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_says_why_it_ends(store, rank):
    told = f"rank {rank} of the trainer (host {HOST}) failed: tensor x has shape [1], not [2]"
    heard = run_ranks(3, leave, store.port, (0, 1, 2), rank, None)
    assert heard == [None if other == rank else told for other in range(3)]


def test_a_fault_that_arrives_together_with_the_greeting_is_heard(store, monkeypatch):
    place = dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    said = b'{"rank": 0, "host": "h0"}\n{"loss": "rank 0 of the trainer (host h0) failed: no such file"}\n'
    losses, connections = queue.Queue(), []

    def be_rank_0():
        connections.append(server.accept()[0])
        connections[0].sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as server:
        PrefixStore("peer-watch", store).set("address", json.dumps(server.getsockname()))
        rank_0 = threading.Thread(target=be_rank_0, daemon=True)
        rank_0.start()
        PeerWatch("127.0.0.1", join_timeout_s=WAIT_S, lost_after_s=6.0, on_loss=losses.put)
        assert losses.get(timeout=WAIT_S) == "rank 0 of the trainer (host h0) failed: no such file"
        rank_0.join(WAIT_S)
        connections[0].close()


def stay_away(port, rank_that_stays_away):
    if int(os.environ["RANK"]) != rank_that_stays_away:
        start_watch(port, queue.Queue(), join_timeout_s=1.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_is_named(store, rank):
    with pytest.raises(RankFailure, match=rf"rank {rank} of the trainer .* within parallel\.join_timeout_s = 1 s"):
        run_ranks(3, stay_away, store.port, rank)


def test_one_rank_alone_watches_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    PeerWatch("127.0.0.1", join_timeout_s=WAIT_S, lost_after_s=6.0, on_loss=pytest.fail).close()
