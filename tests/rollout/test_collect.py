"""From prompts to samples, through the real server where it can be."""

import asyncio
import contextlib
import itertools
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megarl.errors import DataError, ServerError
from megarl.rollout.collect import (
    CollectSettings,
    RolloutCollector,
    component_metrics,
    pass_at_k,
    sample_seeds,
)
from megarl.types import Mean, Metric, Prompt, Scored, VersionSpan
from tests.helpers.samples import random_samples
from tests.rollout.conftest import EOS, Reference, Server

PROMPTS = [Prompt(f"p{i}", (3 + i, 5, 7)[: 1 + i % 3], {"answer": i % 2}) for i in range(12)]
SETTINGS = CollectSettings(samples_per_prompt=4, temperature=1.0, seed=5, request_timeout_s=30.0)
NEW = 8  # tokens


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
    rollouts = collector.collect(PROMPTS, 3, NEW)
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
            for s in collector.collect(prompts, step, NEW).samples
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


def test_a_set_of_its_own_is_sampled_as_it_says_and_beside_training(
    collector: RolloutCollector,
) -> None:
    """Four samples of every prompt; mean@4 is their accuracy, pass@k is that of subsets of k."""
    drawn = collector.collect(PROMPTS, 3, NEW).samples
    given: dict[str, Any] = {"area": "eval/own", "samples_per_prompt": 4, "temperature": 1.0}
    metrics = collector.evaluate(PROMPTS, NEW, pass_at=(1, 2, 4), **given)
    assert all(m.name.startswith("eval/own/") for m in metrics)
    assert metrics == collector.evaluate(PROMPTS, NEW, pass_at=(1, 2, 4), **given)
    accuracy, one, two, four = (
        value_of(metrics, f"eval/own/{name}") for name in ("accuracy", "pass@1", "pass@2", "pass@4")
    )
    assert isinstance(accuracy, Mean) and accuracy.count == 4 * len(PROMPTS)
    assert one.total / len(PROMPTS) == pytest.approx(accuracy.total / accuracy.count)
    assert 0 < one.total < two.total < four.total < len(PROMPTS)
    assert four.total == int(four.total)  # prompts with a right sample
    again = collector.collect(PROMPTS, 3, NEW).samples  # a training step is what it was
    assert [s.tokens.tolist() for s in again] == [s.tokens.tolist() for s in drawn]


@pytest.mark.parametrize("samples", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples: int) -> None:
    for correct in range(samples + 1):
        right = [i < correct for i in range(samples)]
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(right, k))
            expected = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(samples, correct, k) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("wrong", [None, math.nan, {}, "1"])
def test_a_reward_that_is_no_number_names_the_sample(server: Server, wrong: Any) -> None:
    made = RolloutCollector(
        [server.url], server.key, SETTINGS, decode=spell, reward=lambda *_: wrong
    )
    with pytest.raises(DataError, match=r"p\d+/\d"):
        made.collect(PROMPTS, 0, NEW)
    made.close()


def in_parts(text: str, payload: Mapping[str, Any], finished: bool) -> Scored:
    """Right, and a bonus a word; a step after every second word, worth its number."""
    words = text.split()
    ends = [len(" ".join(words[: n + 1])) for n in range(1, len(words), 2)]
    return Scored(
        {"right": even_length(text, payload, finished), "words": 0.125 * len(words)},
        correct=len(words) > 2,
        steps=[(end, float(i)) for i, end in enumerate(ends)],
    )


def test_a_reward_in_parts_is_kept_in_parts(server: Server) -> None:
    made = RolloutCollector([server.url], server.key, SETTINGS, decode=spell, reward=in_parts)
    rollouts = made.collect(PROMPTS, 3, NEW)
    assert rollouts.reward_names == ("right", "words")
    for s in rollouts.samples:
        asked = len(PROMPTS[s.group].token_ids)
        words = len(s.tokens) - asked - 1  # without the end token
        if s.truncated:
            assert (s.rewards.tolist(), s.correct) == ([0.0, 0.0], False)
            assert s.step_rewards is None and s.step_ends is None
            continue
        right = float(words % 2 == PROMPTS[s.group].payload["answer"])
        assert (s.rewards.tolist(), s.correct) == ([right, 0.125 * words], words > 2)
        if words > 1:
            assert s.step_ends is not None and s.step_rewards is not None
            assert s.step_ends.tolist() == [asked + n for n in range(1, words, 2)]
            assert s.step_rewards.tolist() == [float(i) for i in range(words // 2)]
            assert (s.step_ends.dtype, s.step_rewards.dtype) == (np.int32, np.float32)
    assert any(s.truncated for s in rollouts.samples)
    assert len({len(s.tokens) for s in rollouts.samples}) > 3
    metrics = {m.name: m.value for m in made.evaluate(PROMPTS, NEW)}
    total = metrics["eval/reward/right"].total + metrics["eval/reward/words"].total
    assert metrics["eval/reward"].total == pytest.approx(total)
    made.close()


def test_components_with_other_names_name_both_samples_and_both_lists(server: Server) -> None:
    def reward(text: str, payload: Mapping[str, Any], finished: bool) -> Scored | float:
        return Scored({"a": 1.0, "b": 0.0}) if payload["answer"] else 1.0

    made = RolloutCollector([server.url], server.key, SETTINGS, decode=spell, reward=reward)
    odd_first = [*PROMPTS[1::2], *PROMPTS[::2]]
    words = (
        r"sample p\d*[02468]/\d has the components reward; "
        r"accepted: those of sample p\d*[13579]/\d, a, b$"
    )
    with pytest.raises(DataError, match=words):
        made.collect(odd_first, 3, NEW)
    made.close()


def test_names_are_remembered_while_nothing_ends(server: Server) -> None:
    """With one token to say, hardly a response ends: 0 in as many components as were seen."""
    made = RolloutCollector([server.url], server.key, SETTINGS, decode=spell, reward=in_parts)
    first = made.collect(PROMPTS[:1], 0, 1)
    assert all(s.truncated for s in first.samples), "choose another step"
    assert first.reward_names == () and {len(s.rewards) for s in first.samples} == {1}
    made.collect(PROMPTS, 3, NEW)
    later = made.collect(PROMPTS[:1], 0, 1)
    assert later.reward_names == ("right", "words")
    assert [s.rewards.tolist() for s in later.samples] == [[0.0, 0.0]] * 4
    made.close()


def test_the_limit_of_new_tokens_is_that_of_the_call(collector: RolloutCollector) -> None:
    for limit in (2, 5):
        samples = collector.collect(PROMPTS, 3, limit).samples
        assert max(s.trained_tokens for s in samples) == limit


def test_component_metrics_are_means_and_only_of_several_components() -> None:
    samples = [replace(s, rewards=np.array([0.5, 2], np.float32)) for s in random_samples(1, 3)]
    assert component_metrics(samples, ("a", "b"), "rollout") == [
        Metric("rollout/reward/a", Mean(1.5, 3)),
        Metric("rollout/reward/b", Mean(6.0, 3)),
    ]
    assert component_metrics(samples, ("a",), "rollout") == []
    assert component_metrics([], ("a", "b"), "eval")[0] == Metric("eval/reward/a", Mean(0, 0))


def test_seeds_never_repeat_in_a_step_whoever_samples_a_prompt_again() -> None:
    """Other collectors' prompts and those of earlier rounds come before; alone, nothing changes."""
    whole = sample_seeds(5, 3, [*PROMPTS, *PROMPTS[:3], PROMPTS[0]], 4)
    assert len({seed for group in whole for seed in group}) == 16 * 4
    parts = [PROMPTS, PROMPTS[:3], PROMPTS[:1]]
    earlier: list[Prompt] = []
    again = []
    for part in parts:
        again += sample_seeds(5, 3, part, 4, earlier)
        earlier += part
    assert again == whole
    assert sample_seeds(5, 3, PROMPTS, 4, []) == whole[:12]
    assert sample_seeds(5, 3, PROMPTS[6:], 4, PROMPTS[:6]) == whole[6:12]


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
            samples = made.collect(PROMPTS[:1], 0, NEW).samples
            assert asked == [asked[0], asked[0][:2]]
            assert [int(s.tokens[-1]) for s in samples] == [seed % 20 for seed in asked[0]]
            assert not any(s.truncated for s in samples)
        else:
            with pytest.raises(ServerError, match="prompt p0: found 4 of 4 responses aborted"):
                made.collect(PROMPTS[:1], 0, NEW)
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
            made.collect(PROMPTS[:3], 0, NEW)
        assert time.monotonic() - start < 5
        made.close()
