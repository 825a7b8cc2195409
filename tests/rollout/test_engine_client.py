"""The client of one engine against a server that answers wrongly (DIS-06, DIS-07, WSY-12 and their kind)."""

import asyncio
import socket

import pytest
from aiohttp import web

from megatron_sao.errors import DataError, EngineError
from megatron_sao.records import VersionSpan
from megatron_sao.rollout.engine_client import (
    EngineClient, Sample, checked_logp, parse_sample, sampled_logp, version_spans)


def entry(token_id, logp, *others):
    return {"token_id": token_id, "logprob": logp, "top_logprobs": [{"token_id": i, "logprob": v} for i, v in others]}


def answer(token_ids=(5, 77), content=None, finish_reason="stop", weight_versions=None):
    content = [entry(5, -0.1), entry(77, -3.1)] if content is None else content
    return {"choices": [{"token_ids": list(token_ids), "logprobs": {"content": content},
                         "finish_reason": finish_reason, "weight_versions": weight_versions}]}


def test_the_log_prob_is_that_of_the_sampled_token():  # DIS-06
    assert sampled_logp([5, 77], [{"5": -0.1}, {"12": -0.35, "77": -3.1}]) == [-0.1, -3.1]
    assert sampled_logp([5, 77], [{5: -0.1}, {12: -0.35, 77: -3.1}]) == [-0.1, -3.1]
    # also where the engine puts the likeliest token first
    likeliest_first = [entry(5, -0.1), entry(12, -0.35, (12, -0.35), (77, -3.1))]
    assert parse_sample(answer(content=likeliest_first), "e", 0).logp == [-0.1, -3.1]


def test_a_sampled_token_without_its_log_prob_is_refused():  # DIS-06
    with pytest.raises(DataError, match="token 77 at position 1"):
        sampled_logp([5, 77], [{"5": -0.1}, {"12": -0.35}])
    with pytest.raises(DataError, match="token 77"):
        parse_sample(answer(content=[entry(5, -0.1), entry(12, -0.35, (13, -1.0))]), "e", 0)


@pytest.mark.parametrize("values", [
    [-0.1, -0.2], [-0.1, -0.2, -0.3, -0.4], [-0.1, None, -0.3], [-0.1, "nan", -0.3], [-0.1, 0.02, -0.3],
    [-0.1, True, -0.3], [], [-0.1, float("nan"), -0.3], [-0.1, float("-inf"), -0.3], [-0.1, float("inf"), -0.3],
    [-0.1, False, -0.3], [-0.1, "-0.2", -0.3], [-0.1, [-0.2], -0.3], [-0.1, -9999.0, -0.3], [-0.1, -1e10, -0.3],
    [-0.1, 2e-5, -0.3],
])
def test_anything_but_one_number_per_token_is_refused(values):  # DIS-07
    with pytest.raises(DataError, match="log-prob"):
        checked_logp(values, 3)
    content = [entry(id, value) for id, value in zip([5, 6, 7, 8], values)]
    with pytest.raises(DataError):
        parse_sample(answer(token_ids=[5, 6, 7], content=content), "e", 0)


def test_zero_and_round_off_are_legal():  # DIS-07
    assert checked_logp([-0.1, 0.0, -0.3], 3) == [-0.1, 0.0, -0.3]
    assert checked_logp([-0.1, 3e-7, -50, -0.0], 4) == [-0.1, 0.0, -50.0, 0.0]


def test_weight_versions_become_spans():  # WSY-12
    raw = [{"version": "7", "start": 0, "end": 57}, {"version": "8", "start": 57, "end": 128}]
    assert version_spans(raw, 128, 0) == [VersionSpan(0, 57, 7), VersionSpan(57, 128, 8)]
    raw[0]["version"] = "default"
    assert version_spans(raw, 128, 4)[0] == VersionSpan(0, 57, 4)
    assert version_spans(None, 3, 4) == [VersionSpan(0, 3, 4)]


@pytest.mark.parametrize("raw", [
    [],
    [{"version": "7", "start": 0, "end": 2}],
    [{"version": "7", "start": 1, "end": 3}],
    [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 1, "end": 3}],
    [{"version": "7", "start": 0, "end": 0}, {"version": "8", "start": 0, "end": 3}],
    [{"version": "8", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": 3}],
    [{"version": "v7", "start": 0, "end": 3}],
    [{"version": "-1", "start": 0, "end": 3}],
    [{"version": "", "start": 0, "end": 3}],
    [{"version": 7, "start": 0, "end": 3}],
])
def test_spans_with_gaps_or_falling_or_odd_versions_are_refused(raw):
    with pytest.raises(DataError):
        version_spans(raw, 3, 0)


@pytest.mark.parametrize("broken", [
    {}, {"choices": []}, {"choices": [{}]}, {"choices": None}, [],
    answer(token_ids=[]), answer(token_ids=[5, -1]), answer(token_ids=[5, True]),
    {"choices": [{"token_ids": [5], "finish_reason": "stop", "logprobs": None}]},
    {"choices": [{"token_ids": [5], "finish_reason": "stop", "logprobs": {"content": None}}]},
    {"choices": [{"token_ids": [5], "finish_reason": "stop", "logprobs": {"content": [{"token_id": 5}]}}]},
])
def test_answers_without_their_parts_are_refused(broken):
    with pytest.raises(DataError):
        parse_sample(broken, "e", 0)


@pytest.mark.parametrize("reason", ["abort", "error", "repetition", None])
def test_a_request_that_did_not_end_by_itself_is_an_error(reason):
    with pytest.raises(EngineError, match="ended a request"):
        parse_sample(answer(finish_reason=reason), "e", 0)
    # Aborted before its first token, as by an engine that is told to end.
    with pytest.raises(EngineError, match="ended a request"):
        parse_sample({"choices": [{"token_ids": [], "finish_reason": reason, "logprobs": None}]}, "e", 0)


def talk(handler, use, **settings):
    """Runs `use(client)` against a server that answers every request with `handler`."""

    async def run():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        try:
            async with EngineClient(f"http://127.0.0.1:{port}/", **settings) as client:
                return await use(client)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_generate_sends_ids_and_full_support_settings():
    seen = {}

    async def handler(request):
        seen.update(await request.json(), path=request.path)
        return web.json_response(answer(weight_versions=[{"version": "3", "start": 0, "end": 2}]))

    got = talk(handler, lambda c: c.generate([1, 2], max_tokens=9, temperature=0.7, stop_token_ids=[4], seed=11))
    assert got == Sample([5, 77], [-0.1, -3.1], "stop", [VersionSpan(0, 2, 3)])
    params = seen.pop("sampling_params")
    assert seen == {"token_ids": [1, 2], "path": "/inference/v1/generate"}
    assert params == {"max_tokens": 9, "temperature": 0.7, "stop_token_ids": [4], "seed": 11, "logprobs": 0,
                      "detokenize": False}


def test_tokens_written_before_any_push_carry_the_callers_version():
    async def handler(_):
        return web.json_response(answer(weight_versions=[{"version": "default", "start": 0, "end": 2}]))

    got = talk(handler, lambda c: c.generate([1], max_tokens=1), unnamed_version=25)
    assert got.version_spans == [VersionSpan(0, 2, 25)]


def test_the_servers_own_words_reach_the_user():
    async def handler(_):
        return web.json_response({"error": {"message": "prompt is too long"}}, status=400)

    with pytest.raises(EngineError, match="/inference/v1/generate.*400.*prompt is too long"):
        talk(handler, lambda c: c.generate([1], max_tokens=1))


def test_a_silent_server_is_an_error_within_the_bound():
    async def handler(_):
        await asyncio.sleep(30)

    with pytest.raises(EngineError, match="request_timeout_s"):
        talk(handler, lambda c: c.pause(), request_timeout_s=0.2)
    assert talk(handler, lambda c: c.is_healthy(), request_timeout_s=0.2) is False


def test_a_server_that_drops_the_connection_is_an_error():
    async def handler(request):
        request.transport.close()

    with pytest.raises(EngineError, match="has the engine died"):
        talk(handler, lambda c: c.generate([1], max_tokens=1))


def test_no_server_is_an_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

    async def use():
        async with EngineClient(url) as client:
            assert await client.is_healthy() is False
            await client.start_weight_update()

    with pytest.raises(EngineError, match=url):
        asyncio.run(use())


def test_an_answer_that_is_no_json_is_an_error():
    async def handler(_):
        return web.Response(text="{broken", content_type="application/json")

    with pytest.raises(EngineError):
        talk(handler, lambda c: c.weight_version())


def test_the_calls_of_a_push():
    calls = []

    async def handler(request):
        body = await request.json() if request.can_read_body else None
        calls.append((request.method, request.path_qs, body))
        return web.json_response({"world_size": 2, "weight_version": "4", "is_paused": True})

    async def use(client):
        assert (await client.world_size(), await client.weight_version(), await client.is_paused()) == (2, 4, True)
        await client.init_weight_transfer({"rank_offset": 2})
        await client.pause()
        await client.start_weight_update()
        await client.update_weights({"policy_version": 5})
        await client.finish_weight_update(5)
        await client.resume()

    talk(handler, use)
    assert calls[3:] == [
        ("POST", "/init_weight_transfer_engine", {"init_info": {"rank_offset": 2}}),
        ("POST", "/pause?mode=keep&clear_cache=true", None),
        ("POST", "/start_weight_update", None),
        ("POST", "/update_weights", {"update_info": {"policy_version": 5}}),
        ("POST", "/finish_weight_update", {"weight_version": "5"}),
        ("POST", "/resume", None),
    ]
