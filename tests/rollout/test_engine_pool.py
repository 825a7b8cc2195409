"""Several engines: choice, fencing, and pushes that fail in part (WSY-14 and its kind)."""

import asyncio

import pytest

from megatron_sao.errors import EngineError, ProtocolError
from megatron_sao.records import VersionSpan
from megatron_sao.rollout import engine_pool
from megatron_sao.rollout.engine_client import RequestRefused, Sample
from megatron_sao.rollout.engine_pool import EnginePool


class FakeEngine:
    """An engine of `num_chunks` chunks of weights that can be told to fail."""

    def __init__(self, url: str, num_chunks: int = 3) -> None:
        self.url = url
        self.unnamed_version = 0
        self.chunks = [0] * num_chunks
        self.version = 0
        self.is_open = self.is_frozen = False
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

    async def weight_version(self, timeout_s=None):
        return self.version

    async def world_size(self, timeout_s=None):
        self._call("world_size")
        return 1

    async def is_paused(self, timeout_s=None):
        self._call("is_paused")
        return self.is_frozen

    async def pause(self):
        self._call("pause")
        self.is_frozen = True

    async def resume(self):
        self._call("resume")
        self.is_frozen = False

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
    await pool.survey(policy_version)
    await pool.join(pool.lacking(policy_version), 2, {})
    try:
        await pool.pause()  # inside the try: where one engine fails to pause, the others must resume
        await pool.start_weight_update()
        await pool.update_weights({"policy_version": policy_version})
        await pool.finish_weight_update(policy_version)
    finally:
        await pool.resume()


async def make_pool(number: int = 3, **settings) -> tuple[EnginePool, list[FakeEngine]]:
    """A pool whose engines all serve version 0."""
    engines = [FakeEngine(f"http://e{i}") for i in range(number)]
    pool = EnginePool(engines, **settings)
    await pool.survey(0)
    return pool, engines


def test_a_version_is_published_only_when_every_engine_has_all_of_it():  # WSY-14
    async def run():
        pool, engines = await make_pool(wait_timeout_s=0.05)
        engines[1].fail_at = "chunk 2"
        with pytest.raises(EngineError, match="1 of 3 engines failed to receive weights.*e1"):
            await push(pool, 1)
        assert [e.version for e in engines] == [0, 0, 0]
        assert not any("finish" in e.calls or "resume" in e.calls for e in engines)
        with pytest.raises(ProtocolError, match="e1.*whole push"):
            await pool.finish_weight_update(1)
        assert [e.version for e in engines] == [0, 0, 0]
        with pytest.raises(EngineError, match="no engine took a request"):
            await pool.generate([1])
        engines[1].fail_at = ""
        await push(pool, 2)
        assert [e.version for e in engines] == [2, 2, 2]
        assert all(e.chunks == [2, 2, 2] for e in engines)
        assert pool.fenced == {}
        await pool.generate([1])

    asyncio.run(run())


@pytest.mark.parametrize("step", ["start", "chunk 1", "chunk 3"])
def test_no_step_of_a_failed_push_publishes_or_serves(step):
    async def run():
        pool, engines = await make_pool(wait_timeout_s=0.05)
        engines[2].fail_at = step
        with pytest.raises(EngineError, match="e2"):
            await push(pool, 1)
        assert [e.version for e in engines] == [0, 0, 0]
        assert set(pool.fenced) == {"http://e0", "http://e1", "http://e2"}
        with pytest.raises(EngineError):
            await pool.generate([1])
        assert not any("generate" in e.calls for e in engines)

    asyncio.run(run())


def test_an_engine_that_fails_to_finish_stays_out_until_a_whole_push():
    async def run():
        pool, engines = await make_pool()
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
        assert pool.fenced == {} and [e.version for e in engines] == [2, 2, 2]

    asyncio.run(run())


def test_an_engine_that_fails_to_pause_is_out_and_the_others_resume():
    async def run():
        pool, engines = await make_pool()
        engines[0].fail_at = "pause"
        with pytest.raises(EngineError, match="pause"):
            await push(pool, 1)
        assert set(pool.fenced) == {"http://e0"} and pool.num_taken_out == 1
        assert ["resume" in e.calls for e in engines] == [False, True, True]
        assert not any("start" in e.calls for e in engines)

    asyncio.run(run())


def test_requests_wait_for_the_end_of_a_push_and_none_is_lost():
    async def run():
        pool, engines = await make_pool(number=1)
        engines[0].gate.clear()
        before = asyncio.create_task(pool.generate([1]))
        await asyncio.sleep(0)
        await pool.join(pool.present, 2, {})
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
        pool, engines = await make_pool()
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


def test_a_request_whose_engine_fails_is_asked_of_another():
    async def run():
        pool, engines = await make_pool()
        engines[0].fail_at = "generate"
        samples = await asyncio.gather(*(pool.generate([1]) for _ in range(6)))
        assert len(samples) == 6 and pool.num_running == 0
        assert set(pool.fenced) == {"http://e0"} and "fails at generate" in pool.fenced["http://e0"]
        assert pool.num_taken_out == 1 and 1 <= pool.num_reissued <= 2
        await pool.generate([1])
        assert engines[0].calls.count("generate") <= 2

    asyncio.run(run())


def test_a_request_at_which_every_engine_fails_ends_and_does_not_go_round_for_ever():
    async def run():
        pool, engines = await make_pool(wait_timeout_s=5.0)
        for engine in engines:
            engine.fail_at = "generate"

        async def come_back():  # as engines do that answer: the next survey takes them in again
            while True:
                await pool.survey(0)
                await asyncio.sleep(0.001)

        returning = asyncio.create_task(come_back())
        with pytest.raises(EngineError, match="5 engines failed .* at the same request of 1 tokens.*fails at generate"):
            await pool.generate([1])
        returning.cancel()
        assert sum(engine.calls.count("generate") for engine in engines) == 5 and pool.num_running == 0

    asyncio.run(run())


def test_what_runs_on_an_engine_that_is_taken_out_goes_elsewhere_and_a_caller_that_gives_up_is_heard():
    async def run():
        pool, engines = await make_pool(number=2)
        for engine in engines:
            engine.gate.clear()
        asked = [asyncio.create_task(pool.generate([1])) for _ in range(4)]
        await asyncio.sleep(0.01)
        asked[3].cancel()
        engines[0].fail_at = "is_paused"
        await pool.survey(0)
        engines[1].gate.set()
        assert [sample.token_ids for sample in await asyncio.gather(*asked[:3])] == [[1]] * 3
        assert asked[3].cancelled()
        assert pool.num_reissued == 2 and pool.num_running == 0

    asyncio.run(run())


def test_a_request_that_is_refused_takes_no_engine_out():
    async def run():
        pool, engines = await make_pool()

        async def refuse(token_ids):
            raise RequestRefused("too long")

        for engine in engines:
            engine.generate = refuse
        with pytest.raises(RequestRefused):
            await pool.generate([1])
        assert pool.fenced == {} and pool.num_running == 0

    asyncio.run(run())


def test_when_no_engine_serves_a_request_fails_after_its_bound():
    async def run():
        pool, engines = await make_pool(number=1, wait_timeout_s=0.05)
        engines[0].fail_at = "generate"
        with pytest.raises(EngineError, match="no engine took a request.*e0 fails at generate"):
            await pool.generate([1])
        assert pool.num_running == 0

    asyncio.run(run())


def test_tokens_of_older_weights_than_the_engine_was_given_are_thrown_away():
    async def run():
        pool, engines = await make_pool(number=2)
        await push(pool, 3)
        engines[0].version = 0  # started again between two requests
        samples = await asyncio.gather(*(pool.generate([1]) for _ in range(4)))
        assert [sample.version_spans for sample in samples] == [[VersionSpan(0, 1, 3)]] * 4
        assert "started again" in pool.fenced["http://e0"]

    asyncio.run(run())


def test_who_serves_follows_from_what_engines_say():
    async def run():
        engines = [FakeEngine(f"http://e{i}") for i in range(4)]
        engines[1].version = 4  # of an earlier run
        engines[2].is_frozen = True  # in the middle of an update, as far as anybody knows
        engines[3].fail_at = "is_paused"
        pool = EnginePool(engines)
        assert pool.num_serving == 0
        await pool.survey(0)
        assert [url[-1] for url in pool.fenced] == ["1", "2", "3"]
        assert pool.present == engines[:3] and pool.lacking(0) == engines[1:3]
        assert pool.lacking(4) == [engines[0], engines[1], engines[2]]
        await pool.survey(4)  # the number is right, but nobody knows whose weights those are
        assert pool.lacking(4) == engines[:3] and not pool.serves(4)
        assert pool.fenced["http://e1"] == "its version 4 was pushed before this run began"
        engines[3].fail_at = ""
        await pool.survey(0)
        assert pool.lacking(0) == [engines[1], engines[2]] and pool.serves(0)
        assert pool.num_taken_out == 0  # none ceased to serve

    asyncio.run(run())


def test_an_engine_that_this_pool_has_pushed_to_comes_back_by_its_version():
    async def run():
        pool, engines = await make_pool(number=2)
        await push(pool, 3)
        engines[1].fail_at = "is_paused"
        await pool.survey(3)
        assert list(pool.fenced) == ["http://e1"]
        engines[1].fail_at = ""
        await pool.survey(3)
        assert pool.fenced == {} and pool.lacking(3) == []

    asyncio.run(run())


def test_a_survey_waits_for_the_first_that_answers_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(engine_pool, "PROBE_INTERVAL_S", 0.02)

    async def run():
        pool, engines = await make_pool(number=2, return_timeout_s=0.1)
        for engine in engines:
            engine.fail_at = "is_paused"
        with pytest.raises(EngineError, match="none came back within.*e0.*e1"):
            await pool.survey(0)
        pool._return_timeout_s = 5.0
        surveying = asyncio.create_task(pool.survey(0))
        await asyncio.sleep(0.05)
        assert not surveying.done()
        engines[1].fail_at = ""
        await surveying
        assert pool.present == [engines[1]] and pool.num_serving == 1

    asyncio.run(run())


def test_the_weight_group_and_the_end():
    async def run():
        pool, engines = await make_pool(number=3)
        await pool.join([engines[0], engines[2]], 2, {})
        assert [e.calls[-1] for e in engines] == ["init 2", "world_size", "init 3"]
        assert pool.is_group([engines[0], engines[2]]) and not pool.is_group(engines)
        engines[1].fail_at = "init 3"
        with pytest.raises(EngineError, match="e1 fails at init"):
            await pool.join(engines, 2, {})
        assert not pool.is_group(engines)
        assert await pool.answering() == [e.url for e in engines]
        await pool.close()

    asyncio.run(run())
