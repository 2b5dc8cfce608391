"""The client against servers that misbehave: bounded time, and outcomes that say why."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from megarl.rollout.client import (
    Answer,
    Ask,
    Failure,
    Outcome,
    Refusal,
    RolloutClient,
    new_rids,
)
from megarl.types import Completion, RoutingShape, Sampling
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
        host: str = "127.0.0.1",
        least_version: int = 0,
    ) -> Outcome:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, host, 0).start()
        port = runner.addresses[0][1]
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        client = RolloutClient(f"http://{at}", "key", timeout_s)
        budget = sampling.max_new_tokens
        asks = [Ask(rid, [2, 3], budget, seed) for seed, rid in enumerate(new_rids(n))]
        try:
            return await client.generate(asks, sampling, routing, least_version)
        finally:
            await client.close()
            await runner.cleanup()


def answered(odd: Odd, **options: Any) -> tuple[Completion, ...]:
    """What the client takes from a good answer."""
    outcome = asyncio.run(odd.ask(**options))
    assert isinstance(outcome, Answer) and not outcome.wrong, outcome
    return tuple(part for part in outcome.parts if part is not None)


def answering(change: Change) -> Odd:
    async def generate(odd: Odd, request: web.Request, body: Any) -> Any:
        replies = [good_reply(rid) for rid in body["rid"]]
        replies[-1] = change(replies[-1]) or replies[-1]
        return replies

    return Odd(generate)


def test_a_good_answer_is_taken_over_as_it_is() -> None:
    odd = answering(lambda reply: None)
    first, second = answered(odd)
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
    "a stop for another token": (
        change_meta(finish_reason={"type": "stop", "matched": 4}),
        "a stop for 4; expected: one for the last token, 1",
    ),
    "a stop for words": (change_meta(finish_reason={"type": "stop", "matched": "END"}), "'END'"),
    "an end token in place of one that is none (SGLang)": (
        change_meta(finish_reason={"type": "stop", "matched": "NaN happened"}),
        "a stop for 'NaN happened'",
    ),
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
    "a version span of no integers": (
        change_meta(weight_versions=[{"version": "1", "start": 0.0, "end": 3.0}]),
        "spans over 0..3",
    ),
    "versions that go back": (
        change_meta(weight_versions=[span("1", 0, 2), span("2", 2, 1), span("2", 1, 3)]),
        "spans over 0..3",
    ),
    "a log-prob that fp32 cannot hold": (
        change_meta(output_token_logprobs=[[-1e300, 4, None], [-1, 5, None], [-1, 1, None]]),
        "finite log-probs",
    ),
    "a log-prob that is a text": (
        change_meta(output_token_logprobs=[["-1", 4, None], [-1, 5, None], [-1, 1, None]]),
        "finite log-probs",
    ),
    "a log-prob that is false": (
        change_meta(output_token_logprobs=[[False, 4, None], [-1, 5, None], [-1, 1, None]]),
        "finite log-probs",
    ),
    "a token that is no integer": (lambda r: r.update(output_ids=[4.0, 5, 1]), "integers"),
    "a token below 0": (lambda r: r.update(output_ids=[-4, 5, 1]), "0 or above"),
    "a token beyond 32 bits": (
        lambda r: r.update(
            output_ids=[2**40, 5, 1],
            meta_info=r["meta_info"]
            | {"output_token_logprobs": [[-1, 2**40, None], [-1, 5, None], [-1, 1, None]]},
        ),
        "a response",
    ),
    "log-probs that are no triples": (
        change_meta(output_token_logprobs=[-0.5, -1.5, 0.0]),
        "a response",
    ),
    "no tokens at all": (lambda r: r.update(output_ids=None), "a response"),
    "no meta_info": (lambda r: {"output_ids": [4]}, "meta_info"),
    "no object": (lambda r: "text", "a response"),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_a_wrong_answer_costs_its_own_sequence_and_is_never_repaired(name: str) -> None:
    """The first of the two is right, and kept."""
    change, message = BAD_REPLIES[name]
    odd = answering(change)
    outcome = asyncio.run(odd.ask())
    assert isinstance(outcome, Answer)
    right, wrong = outcome.parts
    assert wrong is None and message in outcome.wrong
    assert odd.bodies[0]["rid"][1] in outcome.wrong
    assert right is not None and right.token_ids.tolist() == [4, 5, 1]
    assert len(odd.bodies) == 1


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

    outcome = asyncio.run(Odd(generate).ask())
    assert isinstance(outcome, Answer) and outcome.parts == (None, None)
    assert message in outcome.wrong


def test_a_server_that_never_answers_costs_the_deadline_and_no_more() -> None:
    async def generate(odd: Odd, request: web.Request, body: Any) -> Any:
        await asyncio.sleep(60)

    odd = Odd(generate)
    start = time.monotonic()
    outcome = asyncio.run(odd.ask(timeout_s=0.5))
    assert outcome == Failure("no answer within 0.5 s", taken=True)
    assert time.monotonic() - start < 4
    assert odd.aborted == odd.bodies[0]["rid"]


@pytest.mark.parametrize("status", [500, 502, 504, 507, 503, 429, 408])
def test_an_error_of_the_server_is_its_failure(status: int) -> None:
    """What it, or a proxy before it, has of the request may run on, and is aborted."""
    busy = status in (503, 429, 408)

    async def generate(odd: Odd, request: web.Request, body: Any) -> Any:
        return web.json_response({"error": "broken"}, status=status)

    odd = Odd(generate)
    outcome = asyncio.run(odd.ask())
    assert outcome == Failure(f'HTTP {status}: {{"error": "broken"}}', taken=not busy, busy=busy)
    assert len(odd.bodies) == 1 and sorted(odd.aborted) == sorted(odd.bodies[0]["rid"])


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 307])
def test_a_refusal_is_final(status: int) -> None:
    async def generate(odd: Odd, request: web.Request, body: Any) -> Any:
        headers = {"Location": "/elsewhere"}
        return web.json_response({"error": "no"}, status=status, headers=headers)

    odd = Odd(generate)
    outcome = asyncio.run(odd.ask())
    assert outcome == Refusal(f'HTTP {status}: {{"error": "no"}}')
    assert len(odd.bodies) == 1
    assert sorted(odd.aborted) == (sorted(odd.bodies[0]["rid"]) if status < 400 else [])


def test_a_server_that_is_not_there() -> None:
    async def ask() -> Outcome:
        client = RolloutClient("http://127.0.0.1:9", "key", 5.0)
        try:
            return await client.generate([Ask("r", [2], 3, 0)], SAMPLING)
        finally:
            await client.close()

    outcome = asyncio.run(ask())
    assert isinstance(outcome, Failure) and not outcome.taken
    assert outcome.reason.startswith("no connection")


def test_a_group_from_the_real_server(server: Server, reference_a: Reference) -> None:
    """Half of it is continued by another request: together they are what one request gives."""
    shape = RoutingShape((True,) * LAYERS, TOP_K, EXPERTS)

    async def ask(asks: list[Ask]) -> list[Completion]:
        client = RolloutClient(server.url, server.key, 20.0)
        try:
            outcome = await client.generate(asks, SAMPLING, shape)
        finally:
            await client.close()
        assert isinstance(outcome, Answer) and not outcome.wrong, outcome
        return [part for part in outcome.parts if part is not None]

    seeds = [7, 8, 9, 7]
    rids = new_rids(8)
    whole = asyncio.run(
        ask([Ask(rid, [3, 9], 12, seed) for rid, seed in zip(rids, seeds, strict=False)])
    )
    assert whole[0].token_ids.tolist() == whole[3].token_ids.tolist()
    for completion in whole:
        tokens = [3, 9, *completion.token_ids.tolist()]
        expected = reference_a.routing(tokens)[:-1].numpy()
        assert completion.routing is not None and (completion.routing == expected).all()
        assert completion.version_spans[-1].end == len(completion.token_ids)
    known = [c.token_ids[:-1].tolist() for c in whole]
    rows = [1 + len(tokens) for tokens in known]  # all that were fed before
    last = asyncio.run(
        ask(
            [
                Ask(rid, [3, 9, *tokens], 12 - len(tokens), seed, row)
                for rid, tokens, seed, row in zip(rids[4:], known, seeds, rows, strict=True)
            ]
        )
    )
    for one, other in zip(last, whole, strict=True):
        assert one.token_ids.tolist() == other.token_ids[-1:].tolist()
        assert one.routing is not None and other.routing is not None
        assert one.routing.tolist() == other.routing[-1:].tolist()
