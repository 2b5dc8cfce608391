"""Control operations against servers that misbehave."""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from megarl.errors import ServerError
from megarl.rollout.control import ServerControl
from megarl.rollout.operations import OPERATIONS
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
            if request.path == "/server_info" and op in ("begin", "commit"):  # who it is
                return web.json_response({"boot": "1"})
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
        payload = {"version": 1}
        path = next(call.path for call in OPERATIONS[op] if call.wanted(payload))
        for message in ("half written", "half written", "not JSON", "did not end within 0.6 s"):
            start = time.monotonic()
            with pytest.raises(ServerError) as caught:
                await asyncio.to_thread(control.control, op, payload, 0.6)
            assert message in str(caught.value) and path in str(caught.value)
            assert "server 5" in str(caught.value) and time.monotonic() - start < 3
        await runner.cleanup()

    asyncio.run(check())


def ranks(
    *digests: dict[str, str],
    dropped: Sequence[list[str]] = ((), ()),
    seconds: Sequence[float] = (0.0, 0.0),
) -> dict[str, Any]:
    """An SGLang's reply, as the plugin's documentation has it."""
    more = [
        {"megarl:dropped": json.dumps(list(d)), "megarl:seconds": str(s)}
        for d, s in zip(dropped, seconds, strict=False)
    ]
    return {"ranks": [{"checksums": {**d, **m}} for d, m in zip(digests, more, strict=False)]}


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ({"digests": {"a": "1"}}, {"a": "1"}),
        (ranks({"a": "1"}, {"a": "1"}, seconds=(1.5, 2.5)), {"a": "1"}),
        (ranks({"a": "1"}, {"a": "2"}), "different weights"),
        (ranks({"a": "1", "b": "2"}, dropped=[["b"]]), r"no place for 1 of 2 .*\['b'\]"),
        (ranks({"a": "1"}, {"a": "1"}, dropped=[["a"], []]), {"a": "1"}),  # an expert of one rank
        ({"ranks": [{"checksums": {"megarl:error": "torn"}}]}, "rank 0: torn"),
        ({"ranks": [{"checksums": {"a": "1"}}]}, "no weight digests.*plugin"),  # an older one
        ({"ranks": [{"checksums": {}}]}, "no weight digests"),
        ({"success": True}, "tells of no rank"),
    ],
)
def test_digests_of_either_kind_of_server(reply: dict[str, Any], expected: Any) -> None:
    if isinstance(expected, dict):
        longest = 2.5 if "ranks" in reply and "2.5" in str(reply) else 0.0
        assert answered("digest", reply) == {"digests": expected, "digest_seconds": longest}
    else:
        with pytest.raises(ServerError, match=expected):
            answered("digest", reply)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ({"digests": {"a": "1"}}, {"a": "1"}),
        (ranks({"a": "1", "b": "2"}), {"a": "1", "b": "2"}),
        (ranks({}, {}), {}),
        (ranks({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "3"}), {"a": "1"}),
        (ranks({"a": "1"}, {"a": "1", "b": "2"}), {"a": "1"}),
        (
            ranks({"a": "1", "b": "2"}, {"a": "1", "b": "2"}, dropped=[["a", "b"], ["b"]]),
            {"a": "1"},
        ),
        ({"ranks": [{"checksums": {"megarl:error": "torn"}}]}, "rank 0: torn"),
        ({"ranks": [{"checksums": {"a": "1"}}]}, "no weight digests.*plugin"),
        ({"success": True}, "tells of no rank"),
    ],
)
def test_a_server_holds_what_all_its_ranks_hold_alike_and_not_all_have_dropped(
    reply: dict[str, Any], expected: Any
) -> None:
    if isinstance(expected, dict):
        assert answered("held", reply)["digests"] == expected
    else:
        with pytest.raises(ServerError, match=expected):
            answered("held", reply)


@pytest.mark.parametrize(("told", "of"), [(1, 2), (3, 2), (7, 8), (12, 8)])
def test_a_digest_that_not_all_ranks_tell_proves_nothing(told: int, of: int) -> None:
    none: list[list[str]] = [[]] * told
    reply = ranks(*[{"a": "1"}] * told, dropped=none, seconds=[0.0] * told)
    for op in ("digest", "held"):
        with pytest.raises(ServerError, match=f"{told} of its {of} ranks tell"):
            answered(op, reply, ranks=of)


@pytest.mark.parametrize(("told", "of"), [(2, 2), (8, 2), (8, 8), (16, 8)])
def test_replicas_of_a_server_tell_once_more(told: int, of: int) -> None:
    none: list[list[str]] = [[]] * told
    reply = ranks(*[{"a": "1"}] * told, dropped=none, seconds=[0.0] * told)
    assert answered("digest", reply, ranks=of)["digests"] == {"a": "1"}


def answered(op: str, reply: dict[str, Any], ranks: int = 1) -> dict[str, Any]:
    """What an operation makes of a server's reply to /weights_checker."""

    async def check() -> dict[str, Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            assert await request.json() == {"action": op, "selector": "target"}
            return web.json_response(reply)

        app = web.Application()
        app.router.add_post("/weights_checker", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            control = ServerControl(
                "http://{}:{}".format(*runner.addresses[0][:2]), "key", ranks=ranks
            )
            return await asyncio.to_thread(control.control, op, {}, 5)
        finally:
            await runner.cleanup()

    return asyncio.run(check())


def unwritten(*names: list[str]) -> dict[str, Any]:
    return {"ranks": [{"checksums": {"megarl:unwritten": json.dumps(n)}} for n in names]}


@pytest.mark.parametrize(
    ("reply", "wrong"),
    [
        (unwritten([]), ""),
        (unwritten(["a"]), r"nothing to 1 parameters .*\['a'\]"),
        (unwritten(["a"], []), ""),  # where it is nothing but padding
        (unwritten(["a", "b"], ["c", "b"]), r"nothing to 1 parameters .*\['b'\]"),
        ({"ranks": [{"checksums": {}}, {"checksums": {"megarl:error": "torn"}}]}, "rank 1: torn"),
        ({"success": True}, "tells of no rank"),
        ({"ranks": []}, "tells of no rank"),
    ],
)
def test_a_snapshot_tells_of_parameters_that_no_rank_has_written(
    reply: dict[str, Any], wrong: str
) -> None:
    call = next(c for c in OPERATIONS["snapshot"] if c.path == "/weights_checker")
    found = call.wrong(reply)
    assert re.search(wrong, found) if wrong else found == ""


@pytest.mark.parametrize(
    "steps, asked",
    [
        (
            [("begin", {}), ("snapshot", {}), ("compare", {}), ("commit", {"version": 1})],
            "begin | end digest_snapshot begin | end digest_compare | ",
        ),
        ([("begin", {}), ("commit", {"version": 1})], "begin | end"),
        ([("commit", {"version": 1})], "end"),  # who knows what is open
        (
            [
                ("begin", {"session": False}),
                ("snapshot", {}),
                ("compare", {}),
                ("commit", {"version": 1, "session": False}),
            ],
            "end | digest_snapshot | digest_compare | ",  # another trainer's
        ),
        (
            [("begin", {}), ("snapshot", {}), ("begin", {}), ("commit", {"version": 1})],
            "begin | end digest_snapshot begin | begin | end",
        ),
    ],
)
def test_a_proof_is_of_weights_as_they_are_served(steps: list[Any], asked: str) -> None:
    """An update is ended before, opened again for the same push, and ended once."""

    async def check() -> None:
        calls: list[str] = []

        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.json() if request.can_read_body else {}
            name = body.get("action") or request.path.removeprefix("/").partition("_weight_up")[0]
            calls.append(name)
            return web.json_response({"success": True, "ranks": [{}]})

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        control = ServerControl("http://{}:{}".format(*runner.addresses[0][:2]), "key")
        found = []
        for op, payload in steps:
            calls.clear()
            await asyncio.to_thread(control.control, op, payload, 5)
            of_proof = ("begin", "end", "digest_snapshot", "digest_compare")
            found.append(" ".join(call for call in calls if call in of_proof))
        assert " | ".join(found) == asked
        await runner.cleanup()

    asyncio.run(check())
