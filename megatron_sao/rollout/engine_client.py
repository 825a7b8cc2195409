"""The client of ONE vLLM server: token ids in, token ids and log-probs out, and the calls of a weight push.

Invariants:
- every sampled token comes with exactly one finite log-prob <= 0 that was looked up by its own id; a sample that lacks
  one is refused, nothing is ever filled in;
- every sampled token carries the policy_version that wrote it;
- each call is bounded, by `request_timeout_s` or `push_timeout_s`; a failed call is an EngineError that names the
  engine. One that every engine would refuse is a RequestRefused.
"""

import asyncio
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from megatron_sao.errors import DataError, EngineError
from megatron_sao.records import VersionSpan

# The server runs a float32 log-softmax: a certain token may come out a hair above 0.
LOGP_ROUND_OFF = 1e-5
# vLLM writes this number where a log-prob is NaN, -inf or absent (entrypoints/.../serving.py, vLLM 0.32).
LOGP_ABSENT = -9999.0
# vLLM's label of weights that no push has named yet.
UNNAMED_VERSION = "default"


class RequestRefused(EngineError):
    """An engine that is well refuses a request (HTTP 4xx): it would be no use to ask another one."""


@dataclass(frozen=True)
class Sample:
    """What the sampler wrote in answer to one request."""

    token_ids: list[int]
    logp: list[float]  # at the sampling temperature, one per token
    stop_reason: str  # "stop" | "length"
    version_spans: list[VersionSpan]  # tile [0, len(token_ids))


class EngineClient:
    """Async client of one server. Make it inside the running event loop's program; close() it, or use `async with`.

    Args:
        url: "http://127.0.0.1:8000".
        request_timeout_s: bound of one generation; a push meanwhile counts, as the request waits through it.
        push_timeout_s: bound of each other call, twice as much for those that carry a whole push; None = as above.
        unnamed_version: the policy_version of the weights the server started with, for tokens written before any push.
    """

    def __init__(
        self, url: str, *, request_timeout_s: float = 120.0, push_timeout_s: float | None = None,
        unnamed_version: int = 0,
    ) -> None:
        self.url = url.rstrip("/")
        self.request_timeout_s = request_timeout_s
        self.push_timeout_s = push_timeout_s or request_timeout_s
        self.unnamed_version = unnamed_version
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "EngineClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Effect: closes the connections; requests still running are cancelled."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self,
        token_ids: list[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
    ) -> Sample:
        """Sample one continuation over the full support (no top_p, no top_k).

        Args:
            token_ids: the whole context, at least one token.
            max_tokens: at least 1; with the context it must fit into the server's max_model_len.
            temperature: > 0, or 0 for greedy evaluation.
            stop_token_ids: sampling one of them ends the sample; it stays in `token_ids` with its log-prob.
            seed: makes the sample repeatable for the same weights; None = the server's own.
        Raises:
            EngineError: the server is gone, too slow, or refused the request.
            DataError: its answer breaks the contract above.
        """
        params: dict[str, Any] = {
            "max_tokens": max_tokens, "temperature": temperature, "stop_token_ids": list(stop_token_ids),
            "logprobs": 0, "detokenize": False,
        }
        if seed is not None:
            params["seed"] = seed
        body = {"token_ids": token_ids, "sampling_params": params}
        answer = await self._call("POST", "/inference/v1/generate", body, self.request_timeout_s)
        return parse_sample(answer, self.url, self.unnamed_version)

    async def is_healthy(self) -> bool:
        """True if the server answers and its engine is alive."""
        try:
            await self._call("GET", "/health", timeout_s=min(5.0, self.push_timeout_s))
        except EngineError:
            return False
        return True

    async def world_size(self, timeout_s: float | None = None) -> int:
        """Number of workers of this engine: how many ranks of the weight group it takes."""
        return int((await self._call("GET", "/get_world_size", timeout_s=timeout_s))["world_size"])

    async def weight_version(self, timeout_s: float | None = None) -> int:
        """The policy_version of the weights the server now samples from."""
        label = (await self._call("GET", "/weight_info", timeout_s=timeout_s))["weight_version"]
        return _version_number(label, self.unnamed_version, self.url)

    async def is_paused(self, timeout_s: float | None = None) -> bool:
        """Whether the server holds its requests back."""
        return bool((await self._call("GET", "/is_paused", timeout_s=timeout_s))["is_paused"])

    async def pause(self) -> None:
        """Effect: freezes running requests (nothing is aborted) and clears the caches, until resume()."""
        # clear_cache=true: prefix blocks of the old weights must not serve new requests.
        await self._call("POST", "/pause?mode=keep&clear_cache=true")

    async def resume(self) -> None:
        """Effect: frozen requests go on; their KV is computed again under the weights now loaded."""
        await self._call("POST", "/resume")

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Effect: the engine's workers join the weight group; returns once the whole group has formed."""
        await self._call("POST", "/init_weight_transfer_engine", {"init_info": init_info}, 2 * self.push_timeout_s)

    async def start_weight_update(self) -> None:
        """Effect: the server must be paused; from here on it takes weights."""
        await self._call("POST", "/start_weight_update")

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """Effect: the workers receive the buckets that the trainer ranks and other workers send meanwhile."""
        await self._call("POST", "/update_weights", {"update_info": update_info}, 2 * self.push_timeout_s)

    async def finish_weight_update(self, policy_version: int) -> None:
        """Effect: loads what arrived and publishes it as `policy_version`; the server refuses if a name is missing."""
        await self._call("POST", "/finish_weight_update", {"weight_version": str(policy_version)})

    async def shutdown_weight_transfer(self) -> None:
        """Effect: the workers leave the weight group."""
        await self._call("POST", "/shutdown_weight_transfer_engine")

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        timeout_s = timeout_s or self.push_timeout_s
        what = f"{method} {path.split('?')[0]} of the engine at {self.url}"
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._open_session().request(method, self.url + path, json=body, timeout=timeout) as response:
                if response.status != 200:
                    text = (await response.text())[:2000]
                    kind = RequestRefused if 400 <= response.status < 500 else EngineError
                    raise kind(f"{what} answered {response.status}: {text}")
                if response.content_type != "application/json":
                    return {}
                return await response.json()
        except asyncio.TimeoutError as error:
            raise EngineError(f"{what} did not answer within {timeout_s:g} s "
                              "(engine.request_timeout_s or push.timeout_s)") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineError(f"{what} failed: {type(error).__name__}: {error}; has the engine died? "
                              f"its log is in the run folder") from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # A new connection for each request: the server drops idle ones after 5 s, and a POST sent into a
            # connection that is just being dropped fails with no way to know whether it was served.
            # limit=0: the pool decides how many requests run; queueing here would hide a request from a push.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        return self._session


def parse_sample(answer: dict[str, Any], engine: str, unnamed_version: int) -> Sample:
    """The checked content of an answer of /inference/v1/generate.

    Raises:
        EngineError: the request was aborted.
        RequestRefused: it ended for an unknown reason.
        DataError: tokens, log-probs or version spans are malformed.
    """
    try:
        choice = answer["choices"][0]
        stop_reason = choice["finish_reason"]
        _check_stop_reason(stop_reason, engine)  # first: a request that was aborted may lack all the rest
        token_ids = choice["token_ids"]
        content = choice["logprobs"]["content"]
        candidates = [
            {c["token_id"]: c["logprob"] for c in [*step.get("top_logprobs", []), step]} for step in content
        ]
    except (KeyError, IndexError, TypeError) as error:
        raise DataError(f"the engine at {engine} answered without tokens or log-probs ({error!r}); "
                        "it must be started by this project's launcher") from error
    if not token_ids or any(type(id) is not int or id < 0 for id in token_ids):
        raise DataError(f"the engine at {engine} returned the token ids {token_ids!r}; expected one or more ids >= 0")
    return Sample(
        token_ids=token_ids,
        logp=checked_logp(sampled_logp(token_ids, candidates), len(token_ids)),
        stop_reason=stop_reason,
        version_spans=version_spans(choice.get("weight_versions"), len(token_ids), unnamed_version, engine),
    )


def _check_stop_reason(stop_reason: Any, engine: str) -> None:
    if stop_reason not in ("stop", "length"):
        kind = EngineError if stop_reason in ("abort", "error") else RequestRefused
        raise kind(f"the engine at {engine} ended a request with {stop_reason!r}; expected stop or length")


def sampled_logp(token_ids: list[int], candidates: list[Mapping[Any, Any]]) -> list[Any]:
    """The log-prob of each SAMPLED token out of its step's candidates (id, or id as text -> log-prob).

    Raises:
        DataError: not one mapping per token, or a sampled id is missing from its mapping.
    """
    if len(candidates) != len(token_ids):
        raise DataError(f"a sample of {len(token_ids)} tokens came with log-probs for {len(candidates)}")
    values = []
    for position, (token_id, step) in enumerate(zip(token_ids, candidates)):
        key = token_id if token_id in step else str(token_id)
        if key not in step:
            raise DataError(f"the log-prob of sampled token {token_id} at position {position} is missing; "
                            f"the engine gave only {list(step)}")
        values.append(step[key])
    return values


def checked_logp(values: Sequence[Any], num_tokens: int) -> list[float]:
    """The log-probs of one sample as floats, after checking that they are one finite number <= 0 per token.

    0.0 is legal (a certain token). Values up to 1e-5 above 0 are round-off and become 0.

    Raises:
        DataError: wrong count, not a number (None, bool, text), NaN, infinite, positive, or vLLM's stand-in -9999.
    """
    if len(values) != num_tokens:
        raise DataError(f"a sample of {num_tokens} tokens came with {len(values)} log-probs")
    for position, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise DataError(f"log-prob {position} of a sample is {value!r}; it must be a number")
        if not math.isfinite(value) or value > LOGP_ROUND_OFF or value <= LOGP_ABSENT:
            raise DataError(f"log-prob {position} of a sample is {value!r}; it must lie in ({LOGP_ABSENT:g}, 0]")
    return [min(float(value), 0.0) for value in values]


def version_spans(
    raw: list[dict[str, Any]] | None, num_tokens: int, unnamed_version: int, engine: str = "?"
) -> list[VersionSpan]:
    """Spans of sampled tokens by the policy_version that wrote them, tiling [0, num_tokens).

    Args:
        raw: vLLM's weight_versions: [{"version": "3", "start": 0, "end": 57}, ...]; None = no push has named a version.
    Raises:
        DataError: the spans leave a gap, overlap, or a version falls.
    """
    if raw is None:
        return [VersionSpan(0, num_tokens, unnamed_version)]
    spans = [VersionSpan(s["start"], s["end"], _version_number(s["version"], unnamed_version, engine)) for s in raw]
    ends = [0] + [s.end for s in spans]
    tiles = all(s.start == end and s.end > s.start for s, end in zip(spans, ends)) and ends[-1] == num_tokens
    rises = all(a.policy_version <= b.policy_version for a, b in zip(spans, spans[1:]))
    if not tiles or not rises:
        raise DataError(f"the engine at {engine} gave the weight versions {raw} for {num_tokens} tokens; "
                        "they must tile the tokens and never fall")
    return spans


def _version_number(label: str, unnamed_version: int, engine: str) -> int:
    if label == UNNAMED_VERSION:
        return unnamed_version
    if not (isinstance(label, str) and label.isascii() and label.isdigit()):
        raise DataError(f"the engine at {engine} calls its weights {label!r}; expected a policy_version such as \"3\"")
    return int(label)
