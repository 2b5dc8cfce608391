"""From prompts to samples, through the real server where it can be."""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megarl.errors import DataError, ServerError
from megarl.rollout.collect import CollectSettings, RolloutCollector, sample_seeds
from megarl.types import Mean, Metric, Prompt, VersionSpan
from tests.rollout.conftest import EOS, Reference, Server

PROMPTS = [Prompt(f"p{i}", (3 + i, 5, 7)[: 1 + i % 3], {"answer": i % 2}) for i in range(12)]
SETTINGS = CollectSettings(
    samples_per_prompt=4, temperature=1.0, max_new_tokens=8, seed=5, request_timeout_s=30.0
)


def spell(ids: Any) -> str:
    return " ".join(map(str, ids))


def even_length(text: str, payload: Mapping[str, Any], finished: bool) -> float:
    assert finished
    return float(len(text.split()) % 2 == payload["answer"])


@pytest.fixture
def collector(server: Server) -> Iterator[RolloutCollector]:
    urls = [server.url, server.url.replace("127.0.0.1", "localhost")]
    made = RolloutCollector(urls, server.key, SETTINGS, decode=spell, reward=even_length)
    yield made
    made.close()


def value_of(metrics: list[Metric], name: str) -> Any:
    return next(metric.value for metric in metrics if metric.name == name)


def test_samples_are_what_the_server_sampled(
    collector: RolloutCollector, reference_a: Reference
) -> None:
    rollouts = collector.collect(PROMPTS, step=3)
    samples = rollouts.samples
    assert [(s.prompt_id, s.group, s.index) for s in samples] == [
        (f"p{g}", g, i) for g in range(12) for i in range(4)
    ]
    for s in samples:
        asked = len(PROMPTS[s.group].token_ids)
        tokens = s.tokens.tolist()
        assert tuple(tokens[:asked]) == PROMPTS[s.group].token_ids
        assert s.mask.tolist() == [False] * asked + [True] * (len(tokens) - asked)
        expected = reference_a.logprobs(tokens).numpy()[asked - 1 :]
        np.testing.assert_allclose(s.rollout_logprobs[asked:], expected, atol=1e-5, rtol=0)
        assert not s.rollout_logprobs[:asked].any()
        assert s.truncated == (tokens[-1] != EOS)
        response = len(tokens) - asked - 1
        right = not s.truncated and response % 2 == PROMPTS[s.group].payload["answer"]
        assert (s.reward, s.correct) == (float(right), right)
        assert s.version_spans == (VersionSpan(0, 0, len(tokens) - asked),)
    assert any(s.truncated for s in samples) and not all(s.truncated for s in samples)
    rewards = [s.reward for s in samples]
    assert value_of(rollouts.metrics, "rollout/reward") == Mean(sum(rewards), 48)
    lengths = sum(s.trained_tokens for s in samples)
    assert value_of(rollouts.metrics, "rollout/response_length") == Mean(lengths, 48)


def test_the_same_step_gives_the_same_bits_and_another_step_others(
    collector: RolloutCollector,
) -> None:
    def draw(step: int, prompts: list[Prompt]) -> dict[tuple[str, int], tuple[bytes, bytes]]:
        return {
            (s.prompt_id, s.index): (s.tokens.tobytes(), s.rollout_logprobs.tobytes())
            for s in collector.collect(prompts, step).samples
        }

    once = draw(3, PROMPTS)
    assert draw(3, PROMPTS[::-1]) == once
    assert draw(4, PROMPTS) != once


def test_evaluation_is_greedy(collector: RolloutCollector, reference_a: Reference) -> None:
    metrics = collector.evaluate(PROMPTS, max_new_tokens=10)
    answers = [reference_a.greedy(list(p.token_ids), 10) for p in PROMPTS]
    right = sum(
        a[-1] == EOS and (len(a) - 1) % 2 == p.payload["answer"]
        for a, p in zip(answers, PROMPTS, strict=True)
    )
    assert value_of(metrics, "eval/accuracy") == Mean(right, 12)
    assert value_of(metrics, "eval/response_length") == Mean(sum(map(len, answers)), 12)


@pytest.mark.parametrize("wrong", [None, math.nan, {}, "1"])
def test_a_reward_that_is_no_number_names_the_sample(server: Server, wrong: Any) -> None:
    made = RolloutCollector(
        [server.url], server.key, SETTINGS, decode=spell, reward=lambda *_: wrong
    )
    with pytest.raises(DataError, match=r"p\d+/\d"):
        made.collect(PROMPTS, 0)
    made.close()


def test_seeds_never_repeat_in_a_step_even_for_a_prompt_that_does() -> None:
    twice = [*PROMPTS, PROMPTS[0]]
    seeds = [seed for group in sample_seeds(5, 3, twice, 4) for seed in group]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seeds(5, 3, PROMPTS[:1], 4) == sample_seeds(5, 3, twice, 4)[:1]
    assert sample_seeds(5, 4, PROMPTS, 4) != sample_seeds(5, 3, PROMPTS, 4)


@contextlib.contextmanager
def serving(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Iterator[str]:
    """A server of this test's own, in a thread, for as long as the block."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def start() -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.router.add_post("/generate", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, "http://{}:{}".format(*runner.addresses[0][:2])

    runner, url = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield url
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)


@pytest.mark.parametrize("failures", [2, 99])
def test_an_aborted_response_is_asked_for_again_and_never_kept(failures: int) -> None:
    asked: list[list[int]] = []
    left = failures

    async def generate(request: web.Request) -> web.Response:
        nonlocal left
        body = await request.json()
        seeds = [params["sampling_seed"] for params in body["sampling_params"]]
        asked.append(seeds)
        replies = []
        for rid, seed in zip(body["rid"], seeds, strict=True):
            token, aborted = seed % 20, left > 0
            left -= 1
            meta = {
                "id": rid,
                "finish_reason": {"type": "abort" if aborted else "stop"},
                "weight_version": "0",
                "output_token_logprobs": [[-1.0, token, None]],
            }
            replies.append({"output_ids": [token], "meta_info": meta})
        return web.json_response(replies)

    with serving(generate) as url:
        made = RolloutCollector([url], "key", SETTINGS, decode=spell, reward=lambda *_: 1.0)
        if failures == 2:
            samples = made.collect(PROMPTS[:1], 0).samples
            assert asked == [asked[0], asked[0][:2]]
            assert [int(s.tokens[-1]) for s in samples] == [seed % 20 for seed in asked[0]]
            assert not any(s.truncated for s in samples)
        else:
            with pytest.raises(ServerError, match="prompt p0: found 4 of 4 responses aborted"):
                made.collect(PROMPTS[:1], 0)
        made.close()


def test_one_group_that_fails_fails_the_step_at_once() -> None:
    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        if body["input_ids"][0][0] == PROMPTS[1].token_ids[0]:
            return web.json_response({"error": "no"}, status=400)
        await asyncio.sleep(20)
        return web.Response()

    with serving(generate) as url:
        made = RolloutCollector([url], "key", SETTINGS, decode=spell, reward=lambda *_: 1.0)
        start = time.monotonic()
        with pytest.raises(ServerError, match="HTTP 400"):
            made.collect(PROMPTS[:3], 0)
        assert time.monotonic() - start < 5
        made.close()
