"""From a group's request to whole responses, whatever servers do meanwhile."""

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest

from megarl.rollout.client import RolloutClient
from megarl.rollout.pool import Pool
from megarl.rollout.sampler import Partial, Rules, Sampled, sample_group
from megarl.types import GroupRequest, Member, Prompt, Sampling, VersionSpan
from tests.rollout.scripted import SHAPE, Server, logprob_of, respond, routing_of

PROMPT = Prompt("p", (5, 6, 7), {})
SEEDS = (11, 12, 13, 14)
BUDGET = 10


def request(serial: int = 0, seeds: tuple[int, ...] = SEEDS, budget: int = BUDGET) -> GroupRequest:
    return GroupRequest(serial, 1, PROMPT, seeds, Sampling(1.0, budget))


def rules(partial: Partial = "continue", attempts: int = 5, *, routed: bool = True) -> Rules:
    return Rules(partial, attempts, SHAPE if routed else None)


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


def check_whole(found: Sampled, asked: GroupRequest, *, routed: bool = True) -> None:
    """Token for token what the formula says, whatever happened on the way."""
    assert (found.failed, found.discarded) == ("", False)
    assert len(found.completions) == len(asked.seeds)
    prompt = list(asked.prompt.token_ids)
    for seed, completion in zip(asked.seeds, found.completions, strict=True):
        tokens, finish = respond(len(prompt), seed, asked.sampling.max_new_tokens)
        assert (completion.token_ids.tolist(), completion.finish) == (tokens, finish)
        assert completion.logprobs.tolist() == [logprob_of(t) for t in tokens]
        assert (completion.token_ids.dtype, completion.logprobs.dtype) == (np.int32, np.float32)
        bounds = [s.start for s in completion.version_spans] + [len(tokens)]
        assert bounds[0] == 0 and bounds[1:] == [s.end for s in completion.version_spans]
        if routed:
            assert completion.routing is not None
            np.testing.assert_array_equal(completion.routing, routing_of([*prompt, *tokens]))
            assert completion.routing.dtype == np.uint16
        else:
            assert completion.routing is None


@pytest.mark.parametrize("routed", [True, False])
def test_a_group_is_one_request(routed: bool) -> None:
    server = Server(version=3)
    found = sampled(server, by=rules(routed=routed))
    check_whole(found, request(), routed=routed)
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
