"""Several engines: choice, fencing, and pushes that fail in part (WSY-14 and its kind)."""

import asyncio

import pytest

from megatron_sao.errors import EngineError, ProtocolError
from megatron_sao.records import VersionSpan
from megatron_sao.rollout.engine_client import Sample
from megatron_sao.rollout.engine_pool import EnginePool


class FakeEngine:
    """An engine of `num_chunks` chunks of weights that can be told to fail."""

    def __init__(self, url: str, num_chunks: int = 3) -> None:
        self.url = url
        self.unnamed_version = 0
        self.chunks = [0] * num_chunks
        self.version = 0
        self.is_open = False
        self.calls: list[str] = []
        self.fail_at = ""  # the name of a call, or "chunk 2"
        self.gate = asyncio.Event()
        self.gate.set()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fail_at == name:
            raise EngineError(f"{self.url} fails at {name}")

    async def generate(self, token_ids, **_):
        self._call("generate")
        assert not self.is_open, "a request in the middle of an update"
        await self.gate.wait()
        return Sample([1], [-0.1], "stop", [VersionSpan(0, 1, self.version)])

    async def is_healthy(self):
        return self.fail_at != "is_healthy"

    async def weight_version(self):
        return self.version

    async def world_size(self):
        return 1

    async def pause(self):
        self._call("pause")

    async def resume(self):
        self._call("resume")

    async def init_weight_transfer(self, info):
        self._call(f"init {info['rank_offset']}")

    async def start_weight_update(self):
        self._call("start")
        self.is_open = True

    async def update_weights(self, info):
        for number in range(len(self.chunks)):
            self._call(f"chunk {number + 1}")
            self.chunks[number] = info["policy_version"]

    async def finish_weight_update(self, policy_version):
        self._call("finish")
        assert set(self.chunks) == {policy_version}
        self.version, self.is_open = policy_version, False

    async def close(self):
        self._call("close")


async def push(pool: EnginePool, policy_version: int) -> None:
    try:
        await pool.pause()  # inside the try: where one engine fails to pause, the others must resume
        await pool.start_weight_update()
        await pool.update_weights({"policy_version": policy_version})
        await pool.finish_weight_update(policy_version)
    finally:
        await pool.resume()


def make_pool(number: int = 3, **settings) -> tuple[EnginePool, list[FakeEngine]]:
    engines = [FakeEngine(f"http://e{i}") for i in range(number)]
    return EnginePool(engines, **settings), engines


def test_a_version_is_published_only_when_every_engine_has_all_of_it():  # WSY-14
    async def run():
        pool, engines = make_pool(wait_timeout_s=0.05)
        engines[1].fail_at = "chunk 2"
        with pytest.raises(EngineError, match="1 of 3 engines failed to receive weights.*e1"):
            await push(pool, 1)
        assert await pool.weight_versions() == [0, 0, 0]
        assert not any("finish" in e.calls or "resume" in e.calls for e in engines)
        with pytest.raises(ProtocolError, match="e1.*whole push"):
            await pool.finish_weight_update(1)
        assert await pool.weight_versions() == [0, 0, 0]
        with pytest.raises(EngineError, match="no engine took a request"):
            await pool.generate([1])
        engines[1].fail_at = ""
        await push(pool, 2)
        assert await pool.weight_versions() == [2, 2, 2]
        assert all(e.chunks == [2, 2, 2] for e in engines)
        assert pool.fenced == {}
        await pool.generate([1])

    asyncio.run(run())


@pytest.mark.parametrize("step", ["start", "chunk 1", "chunk 3"])
def test_no_step_of_a_failed_push_publishes_or_serves(step):
    async def run():
        pool, engines = make_pool(wait_timeout_s=0.05)
        engines[2].fail_at = step
        with pytest.raises(EngineError, match="e2"):
            await push(pool, 1)
        assert await pool.weight_versions() == [0, 0, 0]
        assert set(pool.fenced) == {"http://e0", "http://e1", "http://e2"}
        with pytest.raises(EngineError):
            await pool.generate([1])
        assert not any("generate" in e.calls for e in engines)

    asyncio.run(run())


def test_an_engine_that_fails_to_finish_stays_out_until_a_whole_push():
    async def run():
        pool, engines = make_pool()
        engines[1].fail_at = "finish"
        with pytest.raises(EngineError, match="publish policy_version 1"):
            await push(pool, 1)
        assert list(pool.fenced) == ["http://e1"]
        assert "resume" not in engines[1].calls and "resume" in engines[0].calls
        for _ in range(6):
            await pool.generate([1])
        assert "generate" not in engines[1].calls
        with pytest.raises(ProtocolError):  # finishing again without sending again
            await pool.finish_weight_update(1)
        engines[1].fail_at = ""
        await push(pool, 2)
        assert pool.fenced == {} and await pool.weight_versions() == [2, 2, 2]

    asyncio.run(run())


def test_a_failed_pause_fences_nobody_and_all_resume():
    async def run():
        pool, engines = make_pool()
        engines[0].fail_at = "pause"
        with pytest.raises(EngineError, match="pause"):
            await push(pool, 1)
        assert pool.fenced == {}
        assert all("resume" in e.calls and "start" not in e.calls for e in engines)

    asyncio.run(run())


def test_requests_wait_for_the_end_of_a_push_and_none_is_lost():
    async def run():
        pool, engines = make_pool(number=1)
        engines[0].gate.clear()
        before = asyncio.create_task(pool.generate([1]))
        await asyncio.sleep(0)
        await pool.pause()
        # The fake holds its running request as a real engine does when paused.
        await pool.start_weight_update()
        during = asyncio.create_task(pool.generate([1]))
        await asyncio.sleep(0.02)
        assert engines[0].calls.count("generate") == 1 and pool.num_running == 1
        await pool.update_weights({"policy_version": 1})
        await pool.finish_weight_update(1)
        await pool.resume()
        engines[0].gate.set()
        assert (await before).token_ids == [1]
        assert (await during).version_spans == [VersionSpan(0, 1, 1)]
        assert pool.num_running == 0

    asyncio.run(run())


def test_requests_go_where_fewest_run():
    async def run():
        pool, engines = make_pool()
        for engine in engines:
            engine.gate.clear()
        tasks = [asyncio.create_task(pool.generate([1])) for _ in range(7)]
        await asyncio.sleep(0.02)
        assert [e.calls.count("generate") for e in engines] == [3, 2, 2]
        tasks[0].cancel()
        engines[0].fail_at = ""
        for engine in engines:
            engine.gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert pool.num_running == 0

    asyncio.run(run())


def test_a_failing_request_is_not_counted_for_ever():
    async def run():
        pool, engines = make_pool(number=1)
        engines[0].fail_at = "generate"
        with pytest.raises(EngineError, match="e0 fails"):
            await pool.generate([1])
        assert pool.num_running == 0

    asyncio.run(run())


def test_health_world_and_set_up():
    async def run():
        pool, engines = make_pool(number=2)
        await pool.check_health()
        assert await pool.world_sizes() == [1, 1]
        await pool.init_weight_transfer([{"rank_offset": 2}, {"rank_offset": 3}])
        assert [e.calls for e in engines] == [["init 2"], ["init 3"]]
        with pytest.raises(ValueError):
            await pool.init_weight_transfer([{"rank_offset": 2}])
        pool.set_unnamed_version(9)
        assert [e.unnamed_version for e in engines] == [9, 9]
        engines[1].fail_at = "is_healthy"
        with pytest.raises(EngineError, match="http://e1"):
            await pool.check_health()
        await pool.close()
        with pytest.raises(EngineError, match="engine.count"):
            EnginePool([])

    asyncio.run(run())
