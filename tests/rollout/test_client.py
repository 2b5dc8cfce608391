"""The client against servers that misbehave: bounded time, and an error that says what happened."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from megarl.errors import ServerError
from megarl.rollout.client import RolloutClient, Sampling
from megarl.rollout.control import OPERATIONS, ServerControl
from megarl.types import RoutingShape
from tests.rollout.conftest import EXPERTS, LAYERS, TOP_K, Reference, Server

SAMPLING = Sampling(temperature=1.0, max_new_tokens=3)
Change = Callable[[dict[str, Any]], Any]


def good_reply(rid: str) -> dict[str, Any]:
    return {
        "output_ids": [4, 5, 1],
        "meta_info": {
            "id": rid,
            "finish_reason": {"type": "stop", "matched": 1},
            "weight_version": "3",
            "weight_versions": [
                {"version": "2", "start": 0, "end": 1},
                {"version": "3", "start": 1, "end": 3},
            ],
            "output_token_logprobs": [[-0.5, 4, None], [-1.5, 5, None], [0.0, 1, None]],
        },
    }


class Odd:
    """A server in this process that answers as told, and remembers what it was asked."""

    def __init__(self, generate: Callable[["Odd", web.Request, Any], Awaitable[Any]]) -> None:
        self._generate = generate
        self.bodies: list[Any] = []
        self.aborted: list[str] = []
        self.keys: set[str | None] = set()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.keys.add(request.headers.get("Authorization"))
        if request.path == "/abort_request":
            self.aborted.append(body["rid"])
            return web.Response()
        self.bodies.append(body)
        answer = await self._generate(self, request, body)
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)

    async def ask(
        self,
        timeout_s: float = 5.0,
        n: int = 2,
        sampling: Sampling = SAMPLING,
        routing: RoutingShape | None = None,
    ) -> Any:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        client = RolloutClient(f"http://{host}:{port}", "key", timeout_s)
        try:
            seeds = list(range(n))
            return await client.generate_group([2, 3], n, sampling, seeds, routing=routing)
        finally:
            await client.close()
            await runner.cleanup()


def answering(change: Change) -> Odd:
    async def generate(odd: Odd, request: web.Request, body: Any) -> Any:
        replies = [good_reply(rid) for rid in body["rid"]]
        replies[-1] = change(replies[-1]) or replies[-1]
        return replies

    return Odd(generate)


def test_a_good_answer_is_taken_over_as_it_is() -> None:
    odd = answering(lambda reply: None)
    first, second = asyncio.run(odd.ask())
    assert first.token_ids.tolist() == [4, 5, 1]
    assert first.logprobs.tolist() == [-0.5, -1.5, 0.0]
    assert [(s.version, s.start, s.end) for s in second.version_spans] == [(2, 0, 1), (3, 1, 3)]
    assert [p["sampling_seed"] for p in odd.bodies[0]["sampling_params"]] == [0, 1]
    assert [first.request_id, second.request_id] == odd.bodies[0]["rid"]
    assert odd.keys == {"Bearer key"}


def change_meta(**changes: Any) -> Change:
    return lambda reply: reply["meta_info"].update(changes)


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


BAD_REPLIES: dict[str, tuple[Change, str]] = {
    "one log-prob short": (
        lambda r: r["meta_info"]["output_token_logprobs"].pop() and None,
        "found 2 log-probs; expected: 3",
    ),
    "no log-probs": (
        lambda r: r["meta_info"].pop("output_token_logprobs") and None,
        "no output_token_logprobs",
    ),
    "a log-prob that is null": (
        change_meta(output_token_logprobs=[[None, 4, None], [-1, 5, None], [-1, 1, None]]),
        "finite log-probs",
    ),
    "a positive log-prob": (
        change_meta(output_token_logprobs=[[0.5, 4, None], [-1, 5, None], [-1, 1, None]]),
        "finite log-probs",
    ),
    "log-probs of other tokens": (
        change_meta(output_token_logprobs=[[-1, 9, None], [-1, 5, None], [-1, 1, None]]),
        "log-probs of other tokens",
    ),
    "an unknown finish": (change_meta(finish_reason={"type": "tired"}), "'tired'"),
    "no finish": (change_meta(finish_reason=None), "NoneType"),
    "length, too early": (
        lambda r: r.update(
            output_ids=[4],
            meta_info=r["meta_info"]
            | {
                "finish_reason": {"type": "length"},
                "output_token_logprobs": [[-1.0, 4, None]],
                "weight_versions": [span("1", 0, 1)],
            },
        ),
        "a stop for length after 1 tokens; expected: one after 3",
    ),
    "too many tokens": (
        lambda r: r.update(
            output_ids=[4] * 4,
            meta_info=r["meta_info"] | {"output_token_logprobs": [[-1.0, 4, None]] * 4},
        ),
        "4 tokens; expected: at most 3",
    ),
    "another id": (change_meta(id="else"), "'else'"),
    "a gap in the versions": (
        change_meta(weight_versions=[span("1", 0, 1), span("2", 2, 3)]),
        "spans over 0..3",
    ),
    "versions that end early": (change_meta(weight_versions=[span("1", 0, 2)]), "spans over 0..3"),
    "a version that is no number": (
        change_meta(weight_versions=[span("default", 0, 3)]),
        "'default'",
    ),
    "no meta_info": (lambda r: {"output_ids": [4]}, "meta_info"),
    "no object": (lambda r: "text", "a response"),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_a_wrong_answer_is_an_error_and_never_repaired(name: str) -> None:
    change, message = BAD_REPLIES[name]
    odd = answering(change)
    with pytest.raises(ServerError) as caught:
        asyncio.run(odd.ask())
    assert message in str(caught.value)
    assert odd.bodies[0]["rid"][1] in str(caught.value)
    assert "http://127.0.0.1:" in str(caught.value)
    assert len(odd.bodies) == 1


def test_a_version_alone_stands_for_the_whole_response() -> None:
    odd = answering(lambda r: r["meta_info"].pop("weight_versions") and None)
    completion = asyncio.run(odd.ask())[1]
    assert [(s.version, s.start, s.end) for s in completion.version_spans] == [(3, 0, 3)]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ([], "0 responses; expected: 2 responses"),
        ({}, "1 responses; expected: 2 responses"),
        (web.Response(text="<html>"), "'<html>'; expected: JSON"),
    ],
)
def test_answers_of_another_shape(reply: Any, message: str) -> None:
    async def generate(odd: Odd, request: web.Request, body: Any) -> Any:
        return reply

    with pytest.raises(ServerError, match=message):
        asyncio.run(Odd(generate).ask())


def test_a_server_that_never_answers_costs_the_deadline_and_no_more() -> None:
    async def generate(odd: Odd, request: web.Request, body: Any) -> Any:
        await asyncio.sleep(60)

    odd = Odd(generate)
    start = time.monotonic()
    with pytest.raises(ServerError, match=r"no answer within 0\.5 s"):
        asyncio.run(odd.ask(timeout_s=0.5))
    assert time.monotonic() - start < 4
    assert odd.aborted == odd.bodies[0]["rid"]


def test_an_error_of_the_server_is_tried_three_times() -> None:
    async def generate(odd: Odd, request: web.Request, body: Any) -> Any:
        return web.json_response({"error": "broken"}, status=500)

    odd = Odd(generate)
    with pytest.raises(ServerError, match=r"HTTP 500: .*broken.*, 3 times"):
        asyncio.run(odd.ask())
    assert len(odd.bodies) == 3


def test_a_refusal_is_final() -> None:
    async def generate(odd: Odd, request: web.Request, body: Any) -> Any:
        return web.json_response({"error": "no"}, status=400)

    odd = Odd(generate)
    with pytest.raises(ServerError, match="HTTP 400"):
        asyncio.run(odd.ask())
    assert len(odd.bodies) == 1


def test_a_dropped_connection_aborts_the_orphans_and_asks_again_under_new_ids() -> None:
    async def generate(odd: Odd, request: web.Request, body: Any) -> Any:
        if len(odd.bodies) == 1:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(1)
        return [good_reply(rid) for rid in body["rid"]]

    odd = Odd(generate)
    completions = asyncio.run(odd.ask())
    first, second = (body["rid"] for body in odd.bodies)
    assert set(first).isdisjoint(second)
    assert sorted(odd.aborted) == sorted(first)
    assert [c.request_id for c in completions] == second


def test_a_server_that_is_not_there() -> None:
    async def ask() -> None:
        client = RolloutClient("http://127.0.0.1:9", "key", 5.0)
        try:
            await client.generate_group([2], 1, SAMPLING, [0])
        finally:
            await client.close()

    with pytest.raises(ServerError, match="no connection"):
        asyncio.run(ask())


def test_proxies_of_the_environment_are_not_used(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert ServerControl(server.url, server.key).control("digest", {}, 10)["digests"]


def test_a_group_from_the_real_server(server: Server, reference_a: Reference) -> None:
    async def ask() -> Any:
        client = RolloutClient(server.url, server.key, 20.0)
        try:
            await client.health()
            sampling = Sampling(temperature=1.0, max_new_tokens=12)
            return await client.generate_group(
                [3, 9],
                4,
                sampling,
                [7, 8, 9, 7],
                routing=RoutingShape((True,) * LAYERS, TOP_K, EXPERTS),
            )
        finally:
            await client.close()

    group = asyncio.run(ask())
    assert group[0].token_ids.tolist() == group[3].token_ids.tolist()
    for completion in group:
        tokens = [3, 9, *completion.token_ids.tolist()]
        expected = reference_a.routing(tokens)[:-1].numpy()
        assert completion.routing is not None and (completion.routing == expected).all()
        assert completion.version_spans[-1].end == len(completion.token_ids)


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
        app.router.add_post("/{path:.*}", handle)
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
