"""From a group's request to whole responses, whatever servers do meanwhile."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megarl.rollout.client import RolloutClient
from megarl.rollout.pool import Pool
from megarl.rollout.sampler import Partial, Rules, Sampled, sample_group
from megarl.types import GroupRequest, Member, Prompt, Sampling, VersionSpan
from tests.rollout.scripted import (
    EOS,
    SHAPE,
    Server,
    logprob_of,
    respond,
    routing_of,
    versions_of_rows,
)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rollout.sampler._BACK_OFF_S", 0.005)
    monkeypatch.setattr("megarl.rollout.pool._PAUSE_S", 0.01)


PROMPT = Prompt("p", (5, 6, 7), {})
SEEDS = (11, 12, 13, 14)
BUDGET = 10


def request(serial: int = 0, seeds: tuple[int, ...] = SEEDS, budget: int = BUDGET) -> GroupRequest:
    return GroupRequest(serial, 1, PROMPT, seeds, Sampling(1.0, budget))


def rules(partial: Partial = "continue", attempts: int = 5, *, routed: bool = True) -> Rules:
    return Rules(partial, attempts, SHAPE if routed else None, eos_ids=frozenset({EOS, 99}))


@contextlib.asynccontextmanager
async def pool_of(*servers: Server, timeout_s: float = 5.0, **options: Any) -> Any:
    """A pool of running servers; ``pool.suspects`` is what it says of them."""
    suspects: list[tuple[Member, str]] = []

    def connect(member: Member) -> RolloutClient:
        return RolloutClient(member.url, "key", timeout_s)

    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server.running())
        pool = Pool(connect, lambda m, reason: suspects.append((m, reason)), **options)
        pool.suspects = suspects  # type: ignore[attr-defined]
        pool.serve_from([server.member for server in servers])
        yield pool
        await pool.close()


def sampled(
    *servers: Server,
    asked: GroupRequest | None = None,
    by: Rules | None = None,
    **options: Any,
) -> Sampled:
    async def run() -> Sampled:
        async with pool_of(*servers, **options) as pool:
            return await sample_group(asked or request(), pool, by or rules())

    return asyncio.run(run())


def check_whole(
    found: Sampled,
    asked: GroupRequest,
    *,
    routed: bool = True,
    version: int = 0,
    versions: Sequence[int] = (),
    rows: Sequence[int] = (),
) -> None:
    """Token for token what the formula says, whatever happened on the way. ``versions``: of the
    weights that sampled each token, as many as the longest response has (default: ``version``);
    ``rows``: of those that routed each token, prompt included, where they are others.
    """
    versions = versions or [version] * asked.sampling.max_new_tokens
    assert (found.failed, found.discarded) == ("", False)
    assert len(found.completions) == len(asked.seeds)
    prompt = list(asked.prompt.token_ids)
    for seed, completion in zip(asked.seeds, found.completions, strict=True):
        tokens, finish = respond(len(prompt), seed, asked.sampling.max_new_tokens)
        assert (completion.token_ids.tolist(), completion.finish) == (tokens, finish)
        sampled_by = versions[: len(tokens)]
        expected = [logprob_of(t, v) for t, v in zip(tokens, sampled_by, strict=True)]
        assert completion.logprobs.tolist() == expected
        assert (completion.token_ids.dtype, completion.logprobs.dtype) == (np.int32, np.float32)
        bounds = [s.start for s in completion.version_spans] + [len(tokens)]
        assert bounds[0] == 0 and bounds[1:] == [s.end for s in completion.version_spans]
        told = [s.version for s in completion.version_spans for _ in range(s.start, s.end)]
        assert told == list(sampled_by)
        if routed:
            assert completion.routing is not None
            fed_to = rows[: len(prompt) + len(tokens) - 1] or versions_of_rows(
                len(prompt), sampled_by
            )
            np.testing.assert_array_equal(
                completion.routing, routing_of([*prompt, *tokens], fed_to)
            )
            assert completion.routing.dtype == np.uint16
        else:
            assert completion.routing is None


@pytest.mark.parametrize("routed", [True, False])
def test_a_group_is_one_request(routed: bool) -> None:
    server = Server(version=3)
    found = sampled(server, by=rules(routed=routed))
    check_whole(found, request(), routed=routed, version=3)
    (body,) = server.bodies
    assert body["input_ids"] == [[5, 6, 7]] * 4
    assert [p["sampling_seed"] for p in body["sampling_params"]] == list(SEEDS)
    assert {p["max_new_tokens"] for p in body["sampling_params"]} == {BUDGET}
    assert ("return_routed_experts" in body) == routed
    assert found.attempts == 1 and server.keys == {"Bearer key"}
    assert found.tokens == sum(len(c.token_ids) for c in found.completions)
    for completion in found.completions:
        count = len(completion.token_ids)
        assert completion.version_spans == (VersionSpan(3, 0, count, "server 0"),)


# --- continued, restarted, discarded --------------------------------------------------------------


def interrupting(*limits: int) -> Server:
    """Aborts every response of its first requests after so many tokens."""
    left = list(limits)

    async def script(server: Server, request: web.Request, body: Any) -> Any:
        return server.replies(body, left.pop(0) if left else None)

    return Server(script=script)


PARTS = [(7,), (4,), (1, 1, 1), (0, 3), (3, 0, 0, 2), (9,), (5, 4)]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_a_continued_response_is_the_one_that_was_never_interrupted(parts: tuple[int, ...]) -> None:
    """Tokens, log-probs, and rows of routing: one for every token but the last."""
    server = interrupting(*parts)
    found = sampled(server)
    check_whole(found, request())
    assert found.attempts == 1
    assert found.tokens == sum(len(c.token_ids) for c in found.completions)
    for body in server.bodies:
        for ids, params in zip(body["input_ids"], body["sampling_params"], strict=True):
            assert params["max_new_tokens"] == BUDGET - (len(ids) - 3)
    rids = [rid for body in server.bodies for rid in body["rid"]]
    assert len(set(rids)) == len(rids)
    assert not any(a != b and b.startswith(a) for a in rids for b in rids)


LONG = tuple(s for s in range(200) if len(respond(3, s, 20)[0]) == 20)[:3]  # do not end by 20


@pytest.mark.parametrize(("parts", "budgets"), [((7,), [10, 3]), ((10,), [10]), ((3, 7), [10, 7])])
def test_b8_a_budget_is_of_the_whole_response(parts: tuple[int, ...], budgets: list[int]) -> None:
    """After 7 of 10 the request asks for 3; at 10 there is none, and the response is truncated."""
    server = interrupting(*parts)
    asked = request(seeds=LONG)
    found = sampled(server, asked=asked)
    check_whole(found, asked)
    assert {c.finish for c in found.completions} == {"length"}
    assert [b["sampling_params"][0]["max_new_tokens"] for b in server.bodies] == budgets


@pytest.mark.parametrize("parts", [(7,), (9, 0), (0, 0, 0)])
def test_b8_what_is_restarted_has_its_whole_budget_again(parts: tuple[int, ...]) -> None:
    server = interrupting(*parts)
    asked = request(seeds=LONG)
    found = sampled(server, asked=asked, by=rules("restart"))
    check_whole(found, asked)
    assert {tuple(b["input_ids"][0]) for b in server.bodies} == {(5, 6, 7)}
    assert {b["sampling_params"][0]["max_new_tokens"] for b in server.bodies} == {10}
    assert found.tokens == len(LONG) * (sum(parts) + 10)


@pytest.mark.parametrize("partial", ["continue", "restart", "discard"])
def test_b8_what_is_aborted_at_the_end_of_its_budget_is_whole(partial: Partial) -> None:
    server = interrupting(10)
    asked = request(seeds=LONG)
    check_whole(sampled(server, asked=asked, by=rules(partial)), asked)
    assert len(server.bodies) == 1


def test_what_had_ended_is_kept_whatever_happens_to_the_others() -> None:
    server = interrupting(4)
    short = [i for i, seed in enumerate(SEEDS) if len(respond(3, seed, BUDGET)[0]) <= 4]
    others = len(SEEDS) - len(short)
    assert short and others, "choose other seeds"
    for partial in ("continue", "restart"):
        server = interrupting(4)
        check_whole(sampled(server, by=rules(partial)), request())
        assert [len(body["rid"]) for body in server.bodies] == [len(SEEDS), others]


def test_a_group_that_was_stopped_half_way_is_discarded_where_that_is_asked_for() -> None:
    found = sampled(interrupting(4), by=rules("discard"))
    assert found.discarded and found.completions == () and found.failed == ""
    assert found.tokens == sum(min(4, len(respond(3, s, BUDGET)[0])) for s in SEEDS)
    check_whole(sampled(interrupting(0), by=rules("discard")), request())  # it had not begun


def test_rows_that_never_came_are_asked_for_with_the_next_part() -> None:
    """A waiting response is aborted without routing; a running one with."""

    async def script(server: Server, request: web.Request, body: Any) -> Any:
        if len(server.bodies) > 2:
            return None
        replies = server.replies(body, 3)
        if len(server.bodies) == 1:
            for reply in replies[::2]:
                reply["meta_info"]["routed_experts"] = None
        return replies

    server = Server(script=script)
    asked = request(seeds=LONG)
    check_whole(sampled(server, asked=asked), asked)
    assert [b.get("routed_experts_start_len", 0) for b in server.bodies] == [0, 0, 8]


def test_without_rows_for_its_last_tokens_a_response_starts_anew() -> None:
    async def script(server: Server, request: web.Request, body: Any) -> Any:
        replies = server.replies(body)
        if len(server.bodies) == 1:
            for reply in replies:
                reply["meta_info"] |= {"routed_experts": None, "finish_reason": {"type": "abort"}}
        return replies

    server = Server(script=script)
    asked = request(seeds=LONG)
    check_whole(sampled(server, asked=asked), asked)
    assert [b["sampling_params"][0]["max_new_tokens"] for b in server.bodies] == [10, 10]


def ends_in(low: int, high: int) -> tuple[int, ...]:
    """Seeds of responses that end by themselves after so many tokens."""
    seeds = [s for s in range(300) if low <= len(respond(3, s, BUDGET)[0]) <= high]
    return tuple(s for s in seeds if respond(3, s, BUDGET)[1] == "stop")[:3]


def aborting_at_the_end(first: int | None, *, with_rows: bool = True) -> Server:
    """Aborts after ``first`` tokens, if given, and then in the step that samples the end token."""

    async def script(server: Server, request: web.Request, body: Any) -> Any:
        if first is not None and len(server.bodies) == 1:
            return server.replies(body, first)
        replies = server.replies(body)
        if len(server.bodies) == 1 + (first is not None):
            for reply in replies:
                reply["meta_info"]["finish_reason"] = {"type": "abort"}
                if not with_rows:
                    reply["meta_info"]["routed_experts"] = None
        return replies

    return Server(script=script)


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize(
    ("partial", "first", "low"),
    [("continue", None, 2), ("continue", 3, 5), ("restart", None, 2), ("discard", None, 2)],
)
def test_nothing_is_sampled_after_an_end_token(
    partial: Partial, first: int | None, low: int, routed: bool
) -> None:
    """A server that is told to abort in the step of the end token says "abort" (SGLang)."""
    server = aborting_at_the_end(first)
    asked = request(seeds=ends_in(low, BUDGET))
    found = sampled(server, asked=asked, by=rules(partial, routed=routed))
    check_whole(found, asked, routed=routed)
    assert {c.finish for c in found.completions} == {"stop"}
    assert len(server.bodies) == 1 + (first is not None)


@pytest.mark.parametrize("first", [None, 2])
def test_without_rows_for_its_end_token_a_response_starts_anew(first: int | None) -> None:
    server = aborting_at_the_end(first, with_rows=False)
    asked = request(seeds=ends_in(4, BUDGET))
    check_whole(sampled(server, asked=asked), asked)
    assert server.bodies[-1]["input_ids"] == [[5, 6, 7]] * 3
    assert {p["max_new_tokens"] for p in server.bodies[-1]["sampling_params"]} == {BUDGET}


def test_where_end_tokens_are_ignored_a_response_goes_on_after_them() -> None:
    seeds = ends_in(2, BUDGET - 2)
    server = aborting_at_the_end(None)
    asked = GroupRequest(0, 1, PROMPT, seeds, Sampling(1.0, BUDGET, ignore_eos=True))
    found = sampled(server, asked=asked)
    for seed, completion in zip(seeds, found.completions, strict=True):
        first = respond(3, seed, BUDGET)[0]
        assert first[-1] == EOS and len(first) < BUDGET
        rest = respond(3 + len(first), seed, BUDGET - len(first))[0]
        assert completion.token_ids.tolist() == first + rest


@pytest.mark.parametrize(
    ("parts", "versions", "expected", "rows"),
    [
        ((4,), (1, 2), [(1, 0, 4), (2, 4, 10)], "111111222222"),
        ((4,), (3, 3), [(3, 0, 10)], "333333333333"),
        ((2, 3), (1, 1, 2), [(1, 0, 5), (2, 5, 10)], "111111122222"),
        (
            (0, 3),
            (1, 2, 2),
            [(2, 0, 10)],
            "112222222222",
        ),  # the prompt had been fed but for a token
        ((3, 3, 3), (1, 2, 3, 4), [(1, 0, 3), (2, 3, 6), (3, 6, 9), (4, 9, 10)], "111112223334"),
    ],
)
def test_versions_are_told_token_by_token(
    parts: tuple[int, ...],
    versions: tuple[int, ...],
    expected: list[tuple[int, int, int]],
    rows: str,
) -> None:
    """Log-probs are of the weights that sampled a token, rows of those that first had it fed."""
    server = interrupting(*parts)
    inner = server.script
    assert inner is not None

    async def script(of: Server, request: web.Request, body: Any) -> Any:
        of.version = versions[len(of.bodies) - 1]
        return await inner(of, request, body)

    server.script = script
    asked = request(seeds=LONG)
    found = sampled(server, asked=asked)
    by_token = [version for version, start, end in expected for _ in range(start, end)]
    check_whole(found, asked, versions=by_token, rows=[int(row) for row in rows])
    for completion in found.completions:
        spans = [(s.version, s.start, s.end) for s in completion.version_spans]
        assert spans == expected
        assert {s.server for s in completion.version_spans} == {"server 0"}


def test_rows_that_came_late_are_of_the_weights_that_gave_them() -> None:
    """Of 4 tokens of version 1 nothing is known but tokens and log-probs; version 2 feeds all."""

    async def script(server: Server, request: web.Request, body: Any) -> Any:
        server.version = len(server.bodies)
        replies = server.replies(body, 4 if server.version == 1 else None)
        for reply in replies if server.version == 1 else ():
            reply["meta_info"]["routed_experts"] = None
        return replies

    asked = request(seeds=LONG)
    found = sampled(Server(script=script), asked=asked)
    check_whole(found, asked, versions=[1] * 4 + [2] * 6, rows=[2] * 12)


def test_spans_of_one_reply_are_shifted_too_and_servers_are_told_apart() -> None:
    """4 tokens of version 1 at one server; then 2 of version 1 and 4 of version 2 at another."""

    async def run() -> Sampled:
        first, other = interrupting(4), Server(name="server 1", version=1, moves={2: 2})
        first.version = 1
        async with pool_of(first) as pool, other.running():
            inner = first.script
            assert inner is not None

            async def then_it_goes(server: Server, request: web.Request, body: Any) -> Any:
                asyncio.get_running_loop().call_later(0.05, lambda: pool.serve_from([other.member]))
                pool._paused = True  # nothing is asked before the servers change
                asyncio.get_running_loop().call_later(0.1, pool.resume)
                return await inner(server, request, body)

            first.script = then_it_goes
            return await sample_group(request(seeds=LONG), pool, rules())

    found = asyncio.run(run())
    check_whole(found, request(seeds=LONG), versions=[1] * 6 + [2] * 4)
    for completion in found.completions:
        assert completion.version_spans == (
            VersionSpan(1, 0, 4, "server 0"),
            VersionSpan(1, 4, 6, "server 1"),
            VersionSpan(2, 6, 10, "server 1"),
        )
