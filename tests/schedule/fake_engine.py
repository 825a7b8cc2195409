"""An HTTP server with the routes of a vLLM server that the scheduler uses, for faults no real one can be asked for.

It "samples" one token per tick, freezes while paused, and stamps each token with its version, as vLLM does. With
`faults` a route answers 500, hangs, or the whole server dies; "refuse once" and the like do so the first time only.
`start` after `stop` is a server started again on its address: with its first weights, in no group.
"""

import asyncio

from aiohttp import web

TICK_S = 0.002


class FakeEngine:
    """One server. `faults`: route name -> "refuse" | "hang" | "die"."""

    def __init__(
        self,
        *,
        num_tokens: int = 4,
        faults: dict[str, str] | None = None,
        num_free: int | None = None,
        hold_at: int = 0,
    ) -> None:
        """Requests after the first `num_free` stop when they have `hold_at` tokens, until `num_free` is None."""
        self.num_tokens = num_tokens
        self.faults = faults or {}
        self.calls: list[str] = []
        self.version = "default"
        self.num_free = num_free
        self.hold_at = hold_at
        self.num_held = 0
        self._num_requests = 0
        self.is_updating = False
        self.num_tokens_during_update = 0
        self.hold = False  # True = requests do not go on, as if their answers were very long
        self._running = asyncio.Event()
        self._running.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: set[asyncio.Transport] = set()
        self.is_joined = False
        self.port = 0
        self.url = ""

    def _make_server(self) -> None:
        app = web.Application(middlewares=[self._remember_connection])
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_get("/get_world_size", self._world_size)
        app.router.add_get("/health", self._plain("health"))
        app.router.add_get("/is_paused", self._is_paused)
        app.router.add_post("/init_weight_transfer_engine", self._init)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_post("/start_weight_update", self._start)
        app.router.add_post("/update_weights", self._plain("update"))
        app.router.add_post("/finish_weight_update", self._finish)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)

    async def start(self) -> None:
        """Effect: listens on a free port, later always on the same, see `url`."""
        self._loop = asyncio.get_running_loop()
        self.version, self.is_updating = "default", False
        self._running.set()
        self._make_server()
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        host, self.port = self._runner.addresses[0]
        self.url = f"http://{host}:{self.port}"

    async def stop(self) -> None:
        """Effect: connections break at once and none is accepted any more, as if the process was killed."""
        for connection in self._connections:
            connection.abort()
        await self._runner.cleanup()
        self.is_joined = False

    def kill(self) -> None:
        """`stop`, from any thread."""
        asyncio.run_coroutine_threadsafe(self.stop(), self._loop)

    def revive(self) -> None:
        """`start` after `stop`, from another thread. Returns when it listens."""
        asyncio.run_coroutine_threadsafe(self.start(), self._loop).result(10)

    @web.middleware
    async def _remember_connection(self, request: web.Request, handler) -> web.StreamResponse:
        self._connections.add(request.transport)
        return await handler(request)

    async def _fault(self, name: str) -> None:
        self.calls.append(name)
        fault = self.faults.get(name, "")
        if fault.endswith(" once"):
            del self.faults[name]
        match fault.removesuffix(" once"):
            case "refuse":
                raise web.HTTPInternalServerError(text=f"{name} failed inside the engine")
            case "hang":
                await asyncio.sleep(3600)
            case "die":
                self.kill()
                await asyncio.sleep(3600)

    def _plain(self, name: str):
        async def handler(request: web.Request) -> web.Response:
            await self._fault(name)
            return web.json_response({})

        return handler

    async def _generate(self, request: web.Request) -> web.Response:
        if "generate" in self.faults:
            await self._fault("generate")
        number, self._num_requests = self._num_requests, self._num_requests + 1
        spans: list[dict] = []
        for position in range(self.num_tokens):
            await asyncio.sleep(TICK_S)
            if position == self.hold_at and self._holds(number):
                self.num_held += 1
                while self._holds(number):
                    await asyncio.sleep(TICK_S)
            while self.hold or not self._running.is_set():
                await asyncio.sleep(TICK_S)
            self.num_tokens_during_update += self.is_updating
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": position, "end": position})
            spans[-1]["end"] = position + 1
        content = [{"token_id": 5, "logprob": -0.5} for _ in range(self.num_tokens)]
        choice = {
            "token_ids": [5] * self.num_tokens,
            "finish_reason": "stop",
            "logprobs": {"content": content},
            "weight_versions": spans,
        }
        return web.json_response({"choices": [choice]})

    def _holds(self, number: int) -> bool:
        return self.num_free is not None and number >= self.num_free

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _is_paused(self, request: web.Request) -> web.Response:
        if "is_paused" in self.faults:
            await self._fault("is_paused")
        return web.json_response({"is_paused": not self._running.is_set()})

    async def _init(self, request: web.Request) -> web.Response:
        await self._fault("init")
        self.joined_as = (await request.json())["init_info"]
        self.is_joined = True
        return web.json_response({})

    async def _pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "keep"
        self._running.clear()
        await self._fault("pause")
        return web.json_response({})

    async def _resume(self, request: web.Request) -> web.Response:
        await self._fault("resume")
        self._running.set()
        return web.json_response({})

    async def _start(self, request: web.Request) -> web.Response:
        await self._fault("start")
        if not self.is_joined:
            raise web.HTTPInternalServerError(text="start_weight_update came before init_weight_transfer_engine")
        self.is_updating = True
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.Response:
        forgets = "forget" in self.faults.get("finish", "")
        await self._fault("finish")
        if not forgets:
            self.version = (await request.json())["weight_version"]
        self.is_updating = False
        return web.json_response({})
