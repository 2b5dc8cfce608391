"""Servers that fail a group: what that costs, how often it is borne, and what is said then."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from megarl.rollout.pool import Wish
from megarl.rollout.sampler import sample_group
from megarl.types import GroupRequest, Member, Prompt, Sampling
from tests.rollout.scripted import Server
from tests.rollout.test_sampler import (
    check_whole,
    interrupting,
    pool_of,
    request,
    rules,
    sampled,
)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rollout.sampler._BACK_OFF_S", 0.005)
    monkeypatch.setattr("megarl.rollout.pool._PAUSE_S", 0.01)


def breaks(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


def failing(times: int, how: Callable[[Server, web.Request, Any], Any], **fields: Any) -> Server:
    """A server whose first requests end like ``how``."""

    async def script(server: Server, request: web.Request, body: Any) -> Any:
        if len(server.bodies) > times:
            return None
        return how(server, request, body)

    return Server(script=script, **fields)


def no_logprobs(server: Server, request: web.Request, body: Any) -> Any:
    replies = server.replies(body)
    for reply in replies[1:]:
        del reply["meta_info"]["output_token_logprobs"]
    return replies


def one_logprob_short(server: Server, request: web.Request, body: Any) -> Any:
    replies = server.replies(body)
    replies[-1]["meta_info"]["output_token_logprobs"].pop()
    return replies


FAILURES: dict[str, Callable[[Server, web.Request, Any], Any]] = {
    "a broken connection": lambda s, request, body: breaks(request),
    "500": lambda s, r, b: web.json_response({"error": "out of memory"}, status=500),
    "no JSON": lambda s, r, b: web.Response(text="<html>"),
    "half a JSON": lambda s, r, b: web.Response(text='[{"output_ids": [4, 5'),
    "too few answers": lambda s, r, b: s.replies(b)[:-1],
    "an answer without log-probs": no_logprobs,
    "a log-prob too few": one_logprob_short,
    "answers in another order": lambda s, r, b: s.replies(b)[::-1],
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_costs_what_was_not_known_and_nothing_else(name: str) -> None:
    server = failing(2, FAILURES[name])
    found = sampled(server)
    check_whole(found, request())
    assert found.attempts == 3 and len(server.bodies) == 3


@pytest.mark.parametrize("name", ["an answer without log-probs", "a log-prob too few"])
def test_f5_right_answers_beside_a_wrong_one_are_kept(name: str) -> None:
    server = failing(1, FAILURES[name])
    check_whole(sampled(server), request())
    wrong = 3 if name == "an answer without log-probs" else 1
    assert [len(body["rid"]) for body in server.bodies] == [4, wrong]


@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_bounded_and_said(name: str) -> None:
    server = failing(99, FAILURES[name])
    found = sampled(server, by=rules(attempts=2))
    assert found.completions == () and found.attempts == 2 and len(server.bodies) == 2
    assert found.failed.startswith(f"failed 2 times, the last time at server 0 ({server.url}): ")


def test_a_refusal_ends_the_group_at_once() -> None:
    server = failing(1, lambda s, r, b: web.json_response({"error": "too long"}, status=400))
    found = sampled(server)
    assert len(server.bodies) == 1 and found.completions == ()
    expected = f'server 0 ({server.url}) refused it: HTTP 400: {{"error": "too long"}}'
    assert found.failed == expected


def test_f1_orphans_are_aborted_before_their_successors_are_asked_for() -> None:
    order: list[str] = []

    async def script(server: Server, request: web.Request, body: Any) -> Any:
        order.append("asked")
        if len(server.bodies) == 1:
            breaks(request)
            await asyncio.sleep(30)
        return None

    class Watched(Server):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            if request.path == "/abort_request":
                order.append("aborted")
            return await super().handle(request)

    server = Watched(script=script)
    found = sampled(server)
    check_whole(found, request())
    first, second = (body["rid"] for body in server.bodies)
    assert sorted(server.aborted) == sorted(first) and set(first).isdisjoint(second)
    assert order == ["asked", *["aborted"] * 4, "asked"]
    assert [c.request_id for c in found.completions] == second


def test_an_abort_without_tokens_is_no_failure_but_bounded() -> None:
    """F5: the response waited in a queue; what it had before is kept."""
    server = interrupting(4, 0, 0, 0)
    check_whole(sampled(server, by=rules(attempts=1)), request())


def test_aborts_without_end_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rollout.sampler._LONGEST_BACK_OFF_S", 0.01)
    server = interrupting(*[0] * 99)
    found = sampled(server)
    words = f"server 0 ({server.url}): found 4 of 4 responses aborted, 20 times in a row"
    assert found.failed.startswith(words) and len(server.bodies) == 20


def test_a_server_that_is_busy_or_not_there_costs_no_attempt() -> None:
    async def script(server: Server, request: web.Request, body: Any) -> Any:
        if len(server.bodies) <= 3:
            return web.Response(status=(503, 429, 408)[len(server.bodies) - 1])
        return None

    found = sampled(Server(script=script), by=rules(attempts=1))
    check_whole(found, request())
    assert found.attempts == 1


@pytest.mark.parametrize("busy", [True, False])
def test_a_group_that_no_server_ever_takes_fails_in_bounded_time(busy: bool) -> None:
    """The fleet may see a server well that a collector cannot reach."""
    full = failing(10**6, lambda s, r, b: web.Response(status=503))
    elsewhere = Member("server 1", "http://127.0.0.1:9", "boot")

    async def run() -> None:
        async with pool_of(full) as pool:
            if not busy:
                pool.serve_from([elsewhere])
            by = replace(rules(), patience_s=0.2)
            found = await asyncio.wait_for(sample_group(request(), pool, by), 10)
            assert "no server has taken it for " in found.failed
            assert ("HTTP 503" if busy else "server 1 (http://127.0.0.1:9)") in found.failed
            assert found.completions == ()

    asyncio.run(run())


@pytest.mark.parametrize("status", [503, 429, 408])
def test_a_group_of_its_own_that_no_server_takes_fails_while_others_are_sampled(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is too large for a proxy, say. Others are asked of the same servers all the while."""
    monkeypatch.setattr("megarl.rollout.pool._LONGEST_PAUSE_S", 0.05)
    refused = GroupRequest(0, 1, Prompt("p", (9, 6, 7), {}), (1, 2), Sampling(1.0, 8))
    asked = 0

    async def script(server: Server, request: web.Request, body: Any) -> Any:
        nonlocal asked
        if body["input_ids"][0][0] != 9:
            return None
        asked += 1
        return web.Response(status=status)

    async def run() -> None:
        async with pool_of(Server(script=script), Server(script=script, name="server 1")) as pool:
            by = replace(rules(), patience_s=0.3)
            task = asyncio.ensure_future(sample_group(refused, pool, by))
            others = 0
            async with asyncio.timeout(20):
                while not task.done():
                    check_whole(await sample_group(request(others + 1), pool, by), request())
                    others += 1
                    await asyncio.sleep(0.01)
            found = await task
            assert f": HTTP {status}: " in found.failed and found.attempts == 1
            assert found.failed.startswith("no server has taken it for ")
            assert pool.suspects == [] and others > 3
            assert 5 <= asked < 20  # the pauses between them double

    asyncio.run(run())


def test_who_waits_for_room_is_not_out_of_patience() -> None:
    """Between two offers it waited for longer than patience_s: other groups had the server."""

    async def script(server: Server, request: web.Request, body: Any) -> Any:
        return web.Response(status=503) if len(server.bodies) <= 2 else None

    async def run() -> None:
        server = Server(script=script)
        async with pool_of(server, max_in_flight=4) as pool:
            by = replace(rules(), patience_s=0.1)
            task = asyncio.ensure_future(sample_group(request(2), pool, by))
            while not server.bodies:
                await asyncio.sleep(0.001)
            async with pool.lease(Wish(1, 4, 10)):
                await asyncio.sleep(0.3)
            check_whole(await task, request())

    asyncio.run(run())


def test_one_server_that_takes_requests_is_enough() -> None:
    full = failing(10**6, lambda s, r, b: web.Response(status=503))

    async def run() -> None:
        async with pool_of(full, Server(name="server 1")) as pool:
            by = replace(rules(), patience_s=0.0)
            for n in range(8):
                check_whole(await sample_group(request(n), pool, by), request(n))
            assert full.bodies

    asyncio.run(run())
