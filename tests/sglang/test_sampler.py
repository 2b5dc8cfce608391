"""Groups sampled by the real server: recalled, aborted while they run and while they wait, and
continued. In the end every token is what the model says, and its routing too.
"""

import ast
import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.rollout.client import Answer, Ask, RolloutClient, new_rids, request_body
from megarl.rollout.pool import Pool
from megarl.rollout.sampler import Rules, sample_group
from megarl.types import GroupRequest, Member, Prompt, RoutingShape, Sampling, VersionSpan
from tests.sglang.contract import LAYERS, TOLERANCE, TOP_K
from tests.sglang.protocol import PROMPT, ok
from tests.sglang.server import SGLangServer, require_sglang
from tests.sglang.test_server_contract import serve

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


def test_sglang_knows_no_parameter_that_requests_leave_out() -> None:
    """But for how often it streams, and a watermark, which older ones do not know."""
    found = require_sglang().glob("lib/*/site-packages/sglang/srt/sampling/sampling_params.py")
    (source,) = (path.read_text() for path in found)
    (known,) = (
        [field.target.id for field in node.body if isinstance(field, ast.AnnAssign)]
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"
    )
    internal = known[known.index("stop_strs") :]
    assert internal[-1] == "ebnf_full_assistant" and len(internal) == 6, "look at the new ones"
    (asked,) = request_body([Ask("r", [2], 3, 4)], Sampling(1.0, 3), False)["sampling_params"]
    left_out = {"stream_interval", "watermark"}
    assert set(known) - set(internal) - left_out == set(asked)


@pytest.mark.slow
def test_no_default_of_a_server_reaches_what_is_sampled(tiny_models: Any, tmp_path: Path) -> None:
    """A bias of 8 would make nearly every token 7, and what is left would end at a 9. (Words and a
    least length it could have a default of only with a tokenizer.)
    """
    preferred = {
        **{"logit_bias": {"7": 8.0}, "stop_token_ids": [9], "n": 2, "ignore_eos": True},
        **{"min_p": 0.9, "top_k": 1, "top_p": 0.1, "frequency_penalty": 2.0},
    }
    extra = ("--preferred-sampling-params", json.dumps(preferred))
    log = tmp_path / "server.log"
    require_sglang()
    with SGLangServer(tiny_models.a, log_path=log, extra_args=extra) as server:
        serve(server, tiny_models.a, "7")

        async def run() -> Any:
            client = RolloutClient(server.url, server.key, 300.0)
            asks = [Ask(rid, PROMPT, 12, seed) for seed, rid in enumerate(new_rids(32))]
            outcome = await client.generate(asks, Sampling(1.0, 12))
            await client.close()
            return outcome

        outcome = asyncio.run(run())
        assert isinstance(outcome, Answer) and not outcome.wrong, outcome
    responses = [part.token_ids.tolist() for part in outcome.parts if part is not None]
    tokens = [token for response in responses for token in response]
    assert len(responses) == 32 and len(set(tokens)) > 20 and tokens.count(7) < 0.2 * len(tokens)
    assert any(9 in response[:-1] for response in responses)  # and it went on


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
