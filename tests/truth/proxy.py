"""Between a rollout server and whoever asks it: passes every call on, keeps what was said."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp import web


@dataclass(frozen=True)
class Exchange:
    path: str
    body: Any
    status: int
    reply: Any


@dataclass
class Proxy:
    """``after(path)``: called, in a thread, when the server has answered a call with 200, before
    whoever asked hears of it.
    """

    target: str
    after: Callable[[str], None] = lambda path: None
    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)
    asked: threading.Event = field(default_factory=threading.Event)  # to generate something

    def of(self, path: str) -> list[Exchange]:
        return [e for e in self.exchanges if e.path == path]

    @contextlib.contextmanager
    def running(self) -> Iterator["Proxy"]:
        loop, stop, started = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
        thread = threading.Thread(
            target=loop.run_until_complete, args=(self._run(started, stop),), daemon=True
        )
        thread.start()
        assert started.wait(10)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(10)
            loop.close()

    async def _run(self, started: threading.Event, stop: asyncio.Event) -> None:
        app = web.Application(client_max_size=2**30)
        no_limit = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=no_limit) as session:

            async def handle(request: web.Request) -> web.StreamResponse:
                return await self._pass_on(session, request)

            app.router.add_route("*", "/{path:.*}", handle)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            started.set()
            await stop.wait()
            await runner.cleanup()

    async def _pass_on(
        self, session: aiohttp.ClientSession, request: web.Request
    ) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/generate":
            self.asked.set()
        headers = {k: request.headers[k] for k in ("Authorization",) if k in request.headers}
        headers["Content-Type"] = "application/json"
        async with session.request(
            request.method, self.target + request.path, data=body or None, headers=headers
        ) as response:
            status, raw = response.status, await response.read()
        self.exchanges.append(Exchange(request.path, _json(body), status, _json(raw)))
        if status == 200:
            await asyncio.to_thread(self.after, request.path)
        return web.Response(status=status, body=raw, content_type=response.content_type)


def _json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except ValueError:
        return raw
