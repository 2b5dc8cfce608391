"""Groups sampled by the real server: recalled, aborted while they run and while they wait, and
continued. In the end every token is what the model says, and its routing too.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megarl.rollout.client import RolloutClient
from megarl.rollout.pool import Pool
from megarl.rollout.sampler import Rules, sample_group
from megarl.types import GroupRequest, Member, Prompt, RoutingShape, Sampling, VersionSpan
from tests.sglang.protocol import PROMPT, ok
from tests.sglang.test_server_contract import LAYERS, TOLERANCE, TOP_K, serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]

SHAPE = RoutingShape((True,) * LAYERS, TOP_K, 8)
NEW = 60


async def recalled(pool: Pool, server: Any) -> None:
    await pool.recall()
    await asyncio.sleep(0.2)
    pool.resume()


async def aborted(pool: Pool, server: Any) -> None:
    """As a push in the mode ``abort`` does."""
    await asyncio.to_thread(ok, server, "/pause_generation", mode="abort")
    await asyncio.to_thread(ok, server, "/continue_generation")


@pytest.mark.parametrize("interrupted", [recalled, aborted])
def test_what_is_interrupted_goes_on_and_is_the_models(
    sglang_server: Any,
    tiny_models: Any,
    reference: Callable[..., dict[str, list[Any]]],
    interrupted: Callable[[Pool, Any], Any],
) -> None:
    """16 sequences where 8 run at a time: half of them are interrupted while they wait."""
    serve(sglang_server, tiny_models.a, "7")
    suspects: list[str] = []
    member = Member("server 0", sglang_server.url, "1")
    requests = [
        GroupRequest(n, 1, Prompt(f"p{n}", tuple(PROMPT), {}), (1, 2, 3, 4), sampling)
        for n, sampling in enumerate([Sampling(1.0, NEW, ignore_eos=True)] * 4)
    ]

    async def run() -> list[Any]:
        def connect(member: Member) -> RolloutClient:
            return RolloutClient(member.url, sglang_server.key, 300.0)

        pool = Pool(connect, lambda m, reason: suspects.append(reason))
        pool.serve_from([member])
        info = await pool.client(member).server_info()
        assert info["version"] == "0.5.23"
        rules = Rules("continue", 1, SHAPE)
        tasks = [asyncio.ensure_future(sample_group(r, pool, rules)) for r in requests]
        for _ in range(2):
            await asyncio.sleep(0.7)
            await interrupted(pool, sglang_server)
        found = await asyncio.gather(*tasks)
        await pool.close()
        return found

    found = asyncio.run(run())
    assert suspects == [] and [s.failed for s in found] == [""] * 4
    for completion in (c for sampled in found for c in sampled.completions):
        assert completion.finish == "length" and len(completion.token_ids) == NEW
        assert completion.version_spans == (VersionSpan(7, 0, NEW, "server 0"),)
        expected = reference(tiny_models.a, [*PROMPT, *completion.token_ids.tolist()])
        logprobs = expected["logprobs"][len(PROMPT) - 1 :]
        assert completion.logprobs.tolist() == pytest.approx(logprobs, abs=TOLERANCE)
        assert completion.routing is not None
        chosen = np.sort(completion.routing, -1)
        assert np.array_equal(chosen, np.sort(np.array(expected["routing"]), -1))
    parts = {c.request_id for sampled in found for c in sampled.completions}
    assert len(parts) == 16


def test_a_broken_connection_leaves_nothing_running(sglang_server: Any, tiny_models: Any) -> None:
    """A caller that goes away: its requests are aborted by their ids."""
    serve(sglang_server, tiny_models.a, "7")

    async def run() -> None:
        client = RolloutClient(sglang_server.url, sglang_server.key, 300.0)
        request = GroupRequest(
            0, 1, Prompt("p", tuple(PROMPT), {}), (1, 2), Sampling(1.0, 400, ignore_eos=True)
        )
        pool = Pool(lambda member: client, lambda *_: None)
        pool.serve_from([Member("server 0", sglang_server.url, "1")])
        task = asyncio.ensure_future(sample_group(request, pool, Rules("continue", 1)))
        await asyncio.sleep(1.0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await pool.close()

    asyncio.run(run())
    deadline = time.monotonic() + 8.0  # 400 tokens take longer
    while sglang_server.post("/flush_cache")[0] != 200:  # 400 while requests run
        assert time.monotonic() < deadline
        time.sleep(0.1)
