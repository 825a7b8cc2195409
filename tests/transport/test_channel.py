"""Both ends of the record channel, with peers that die, stop, talk nonsense or answer twice."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zmq

from megatron_sao.errors import ConfigError, ProtocolError
from megatron_sao.records import Abort, Ack, Batch, Goodbye, Hello, NeedBatch, decode, encode
from megatron_sao.transport import channel as channel_module
from megatron_sao.transport.channel import SchedulerChannel, TrainerChannel, tcp_address
from tests.schedule.support import make_trajectory

ROOT = Path(__file__).parents[2]
HELLO = Hello(policy_version=0, num_trainer_ranks=1, plan=b"", plan_hash="")
NEED = NeedBatch(step=3, phase="train", num_trajectories=1, policy_version=0)

# Faster heartbeats in both processes: what takes ten seconds in a run takes two here.
FAST = "import megatron_sao.transport.channel as c; c.HEARTBEAT_INTERVAL_S, c.HEARTBEAT_TIMEOUT_S = 0.3, 2.0\n"

TRAINER = FAST + """
import sys, time
from megatron_sao.records import Hello
channel = c.TrainerChannel(sys.argv[1], timeout_s=20)
channel.request(Hello(policy_version=0, num_trainer_ranks=1, plan=b"", plan_hash=""))
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    pass  # holds the interpreter, as a computation would
channel.request(Hello(policy_version=1, num_trainer_ranks=1, plan=b"", plan_hash=""))
"""

SCHEDULER = FAST + """
import asyncio, time
from megatron_sao.records import Ack
async def main():
    channel = c.SchedulerChannel("127.0.0.1", 0)
    print(channel.address, flush=True)
    await channel.receive()
    await channel.answer(Ack())
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.fixture
def fast_heartbeats(monkeypatch):
    monkeypatch.setattr(channel_module, "HEARTBEAT_INTERVAL_S", 0.3)
    monkeypatch.setattr(channel_module, "HEARTBEAT_TIMEOUT_S", 2.0)


@pytest.fixture
def spawn():
    children = []

    def start(code: str, *arguments: str) -> subprocess.Popen:
        child = subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def talk(serve, trainer):
    """Run `serve(scheduler_channel)` and `trainer(trainer_channel)` (in a thread) together. Returns both results."""

    async def run():
        scheduler = SchedulerChannel("127.0.0.1", 0)

        def in_thread():
            channel = TrainerChannel(scheduler.address, timeout_s=10.0)
            try:
                return trainer(channel)
            finally:
                channel.close()

        try:
            return await asyncio.wait_for(asyncio.gather(serve(scheduler), asyncio.to_thread(in_thread)), 20)
        finally:
            await scheduler.close()

    return asyncio.run(run())


def test_records_with_arrays_arrive_unchanged():
    trajectory = make_trajectory("p", versions=(3, 4, 4), reward=0.25)

    async def serve(channel):
        assert await channel.receive() == HELLO
        await channel.answer(Ack())
        assert await channel.receive() == NEED
        await channel.answer(Batch(step=3, trajectories=[trajectory], metrics={"lag/max": 1.0}))

    def trainer(channel):
        assert channel.request(HELLO) == Ack()
        return channel.request(NEED)

    _, batch = talk(serve, trainer)
    (got,) = batch.trajectories
    assert (got.prompt, got.reward, batch.metrics) == (trajectory.prompt, 0.25, {"lag/max": 1.0})
    for name in ("token_ids", "action_mask", "logp_sampler", "reward_t", "version_t", "turn_t"):
        assert np.array_equal(getattr(got, name), getattr(trajectory, name))
        assert getattr(got, name).dtype == getattr(trajectory, name).dtype


def test_abort_raises_its_reason():
    async def serve(channel):
        await channel.receive()
        await channel.answer(Abort(reason="engine 1 died: out of memory"))

    def trainer(channel):
        with pytest.raises(ProtocolError, match="engine 1 died: out of memory"):
            channel.request(HELLO)

    talk(serve, trainer)


def test_a_scheduler_that_does_not_answer_in_time():
    async def serve(channel):
        await channel.receive()

    def trainer(channel):
        with pytest.raises(ProtocolError, match="alive but did not answer Hello"):
            channel.request(HELLO, timeout_s=0.3)

    talk(serve, trainer)


def test_a_scheduler_that_was_never_there():
    channel = TrainerChannel("tcp://127.0.0.1:9", timeout_s=60.0, connect_timeout_s=0.5)
    with pytest.raises(ProtocolError, match="no scheduler answers at tcp://127.0.0.1:9"):
        channel.request(HELLO)
    channel.close()


def test_a_scheduler_that_starts_after_the_trainer():
    async def run():
        early = SchedulerChannel("127.0.0.1", 0)  # only to learn a free port
        address, port = early.address, int(early.address.rpartition(":")[2])
        await early.close()
        trainer = TrainerChannel(address, timeout_s=10.0)
        asking = asyncio.create_task(asyncio.to_thread(trainer.request, HELLO))
        await asyncio.sleep(0.5)
        scheduler = SchedulerChannel("127.0.0.1", port)
        await scheduler.receive()
        await scheduler.answer(Ack())
        assert await asking == Ack()
        trainer.close()
        await scheduler.close()

    asyncio.run(run())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_scheduler_that_is_killed_or_stopped(spawn, how, fast_heartbeats):
    child = spawn(SCHEDULER)
    channel = TrainerChannel(child.stdout.readline().strip(), timeout_s=60.0)  # far above what noticing takes
    channel.request(HELLO)
    os.kill(child.pid, how)
    with pytest.raises(ProtocolError, match="went away before it answered NeedBatch|is gone"):
        channel.request(NEED)
    with pytest.raises(ProtocolError, match="is gone"):
        channel.request(NEED)
    channel.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_that_is_killed_or_stopped(spawn, how, fast_heartbeats):
    async def run():
        scheduler = SchedulerChannel("127.0.0.1", 0)
        child = spawn(TRAINER, scheduler.address, "60")
        await asyncio.wait_for(scheduler.receive(), 20)
        await scheduler.answer(Ack())
        os.kill(child.pid, how)
        with pytest.raises(ProtocolError, match="the trainer went away"):
            await asyncio.wait_for(scheduler.lost, 10)
        await scheduler.close()

    asyncio.run(run())


def test_a_trainer_that_computes_longer_than_the_heartbeat_is_alive(spawn, fast_heartbeats):
    async def run():
        scheduler = SchedulerChannel("127.0.0.1", 0)
        spawn(TRAINER, scheduler.address, "4")
        await asyncio.wait_for(scheduler.receive(), 20)
        await scheduler.answer(Ack())
        assert (await asyncio.wait_for(scheduler.receive(), 20)).policy_version == 1
        assert not scheduler.lost.done()
        await scheduler.close()

    asyncio.run(run())


def test_a_second_trainer_is_turned_away_and_the_first_goes_on():
    async def serve(channel):
        for _ in range(2):
            await channel.receive()
            await channel.answer(Ack())
        assert not channel.lost.done()

    def trainer(channel):
        channel.request(HELLO)
        other = TrainerChannel(channel._address, timeout_s=5.0)
        with pytest.raises(ProtocolError, match="already serves another trainer"):
            other.request(HELLO)
        other.close()
        assert channel.request(NEED) == Ack()

    talk(serve, trainer)


def test_the_first_message_must_be_hello():
    async def serve(channel):
        assert await channel.receive() == HELLO
        await channel.answer(Ack())

    def trainer(channel):
        with pytest.raises(ProtocolError, match="NeedBatch came before Hello"):
            channel.request(NEED)
        assert channel.request(HELLO) == Ack()

    talk(serve, trainer)


@pytest.mark.parametrize(
    "frames", [[b"x"], [b"1", b"2", b"3"], [b"1", b"no msgpack"], [b"1", encode(Ack())], [b"", b""]]
)
def test_nonsense_from_a_stranger_does_not_disturb(frames):
    async def serve(channel):
        assert await channel.receive() == HELLO
        await channel.answer(Ack())
        assert not channel.lost.done()

    def trainer(channel):
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(channel._address)
        stranger.send_multipart(frames)
        assert stranger.poll(5000)
        assert isinstance(decode(stranger.recv_multipart()[1], Ack | Abort), Abort)
        stranger.close(linger=0)
        context.term()
        assert channel.request(HELLO) == Ack()

    talk(serve, trainer)


def test_nonsense_from_the_trainer_is_an_error_at_both_ends():
    async def serve(channel):
        await channel.receive()
        await channel.answer(Ack())
        with pytest.raises(ProtocolError, match="does not fit the records"):
            await channel.receive()

    def trainer(channel):
        channel.request(HELLO)
        with pytest.raises(ProtocolError, match="does not fit the records"):
            channel.request(Ack())

    talk(serve, trainer)


def test_an_answer_that_comes_twice_is_noticed():
    async def serve(channel):
        await channel.receive()
        await channel.answer(Ack())
        with pytest.raises(ProtocolError, match="answers nothing"):
            await channel.answer(Ack())
        await channel._socket.send_multipart([channel._trainer, b"1", encode(Ack())])  # as a faulty scheduler would
        await channel.receive()

    def trainer(channel):
        channel.request(HELLO)
        with pytest.raises(ProtocolError, match="answered message 1 while message 2"):
            channel.request(NEED)

    talk(serve, trainer)


def test_goodbye_may_be_the_first_message():
    """A trainer that fails while it builds its models says so instead of Hello."""

    async def serve(channel):
        message = await channel.receive()
        await channel.answer(Ack())
        return message

    message, _ = talk(serve, lambda channel: channel.request(Goodbye(reason="no such model")))
    assert message.reason == "no such model"


def test_a_port_in_use():
    async def run():
        first = SchedulerChannel("127.0.0.1", 0)
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"{port}.*schedule.port"):
            SchedulerChannel("127.0.0.1", port)
        await first.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [
        ("fd00::5", 2345, "tcp://[fd00::5]:2345"),
        ("[fd00::5]", 2345, "tcp://[fd00::5]:2345"),
        ("10.0.0.7", 1, "tcp://10.0.0.7:1"),
        ("node01", 1, "tcp://node01:1"),
    ],
)
def test_addresses(host, port, address):
    assert tcp_address(host, port) == address
