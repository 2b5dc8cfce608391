"""Control operations against servers that misbehave."""

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web

from megarl.errors import ServerError
from megarl.rollout.control import OPERATIONS, ServerControl
from tests.rollout.conftest import Server


def test_proxies_of_the_environment_are_not_used(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert ServerControl(server.url, server.key).control("digest", {}, 10)["digests"]


@pytest.mark.parametrize("op", OPERATIONS)
def test_control_takes_nothing_but_success(op: str) -> None:
    """200 with success false, an error status, silence and rubbish: an error naming server and
    call."""

    async def check() -> None:
        answers: list[Any] = [
            web.json_response({"success": False, "message": "half written"}),
            web.json_response({"success": False, "message": "half written"}, status=400),
            web.Response(text="rubbish"),
        ]

        async def handle(request: web.Request) -> web.StreamResponse:
            await request.read()
            if not answers:
                await asyncio.sleep(30)
            return answers.pop(0)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        control = ServerControl(f"http://{host}:{port}", "key", name="server 5")
        path = OPERATIONS[op][0].path
        for message in ("half written", "half written", "not JSON", "did not end within 0.3 s"):
            start = time.monotonic()
            with pytest.raises(ServerError) as caught:
                await asyncio.to_thread(control.control, op, {"version": 1}, 0.3)
            assert message in str(caught.value) and path in str(caught.value)
            assert "server 5" in str(caught.value) and time.monotonic() - start < 3
        await runner.cleanup()

    asyncio.run(check())


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ({"digests": {"a": "1"}}, {"a": "1"}),
        ({"ranks": [{"checksums": {"a": "1"}}, {"checksums": {"a": "1"}}]}, {"a": "1"}),
        ({"ranks": [{"checksums": {"a": "1"}}, {"checksums": {"a": "2"}}]}, "different weights"),
        ({"ranks": [{"checksums": {}}]}, "no weight digests"),
        ({"success": True}, "no weight digests"),
    ],
)
def test_digests_of_either_kind_of_server(reply: dict[str, Any], expected: Any) -> None:
    async def check() -> None:
        async def handle(request: web.Request) -> web.StreamResponse:
            assert await request.json() == {"action": "digest", "selector": "target"}
            return web.json_response(reply)

        app = web.Application()
        app.router.add_post("/weights_checker", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        control = ServerControl("http://{}:{}".format(*runner.addresses[0][:2]), "key")
        if isinstance(expected, dict):
            got = await asyncio.to_thread(control.control, "digest", {}, 5)
            assert got == {"digests": expected}
        else:
            with pytest.raises(ServerError, match=expected):
                await asyncio.to_thread(control.control, "digest", {}, 5)
        await runner.cleanup()

    asyncio.run(check())
