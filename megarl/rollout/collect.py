"""Prompts in, scored samples out: one step's rollouts of one collector (`protocols.Collector`).

1. Every prompt becomes one request for its whole group; groups run at once, dealt out over the
   servers in turn, and come back in the order of the prompts, whatever finishes first.
2. The seed of a sample is a hash of (run seed, step, prompt id, index): nothing else decides its
   draws. A prompt that occurs twice in a step, here or with another collector, goes on counting,
   so no two samples share a seed.
3. Every group is complete. An aborted response is asked for again with its own seed; if that fails
   too, collecting fails: a group that is silently short would bend its own advantages.
"""

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from megarl.data.rewards import pad_rewards, score, step_tokens
from megarl.errors import DataError, ServerError
from megarl.protocols import Reward
from megarl.rollout.client import RolloutClient, Sampling
from megarl.types import (
    Completion,
    Known,
    Max,
    Mean,
    Metric,
    Prompt,
    Rollouts,
    RoutingShape,
    Sample,
    Scored,
    StepMetrics,
    Sum,
)

T = TypeVar("T")
Decode = Callable[[Sequence[int]], str]

_ABORT_TRIES = 3


@dataclass(frozen=True)
class CollectSettings:
    """What a run's settings say about sampling."""

    samples_per_prompt: int
    temperature: float
    seed: int
    request_timeout_s: float
    routing: RoutingShape | None = None  # what servers are asked for beside tokens


class RolloutCollector:
    """Implements `protocols.Collector`. Calls block; one at a time."""

    def __init__(
        self,
        urls: Sequence[str],
        key: str,
        settings: CollectSettings,
        *,
        decode: Decode,
        reward: Reward,
    ) -> None:
        """`decode` turns token ids into text; the end token of a response is left out."""
        self._settings, self._decode, self._reward = settings, decode, reward
        self._clients = [RolloutClient(url, key, settings.request_timeout_s) for url in urls]
        self._runner = asyncio.Runner()
        self._reward_names: tuple[str, ...] = ()  # of the first response that was scored
        self._named_by = ""  # that response

    def collect(
        self,
        prompts: Sequence[Prompt],
        step: int,
        max_new_tokens: int,
        *,
        earlier: Sequence[Prompt] = (),
    ) -> Rollouts:
        """Groups of scored samples, prompt by prompt. Raises ServerError, or DataError for a reward
        that is no finite number or has other components than those before it.

        `earlier`: prompts that come before these in the same step, whoever samples them.
        """
        settings = self._settings
        sampling = Sampling(settings.temperature, max_new_tokens)
        per_prompt = settings.samples_per_prompt
        seeds = sample_seeds(settings.seed, step, prompts, per_prompt, earlier)
        start = time.monotonic()
        groups = self._ask(prompts, seeds, sampling, settings.routing)
        seconds = time.monotonic() - start
        samples = self._samples(prompts, groups)
        metrics = rollout_metrics(samples, "rollout")
        return Rollouts(samples, metrics, self._reward_names, seconds)

    def probe_routing(self, tokens: Sequence[int]) -> None:
        """One token from every server, with the experts it was routed to. Raises ServerError."""
        routing = self._settings.routing
        one = Sampling(0.0, 1)
        calls = [c.generate_group(tokens, 1, one, [0], routing=routing) for c in self._clients]
        try:
            self._runner.run(_all(calls))
        except ServerError as error:
            raise ServerError(
                f"moe.routing_replay=rollout: {error} (SGLang: --enable-return-routed-experts)"
            ) from error

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        *,
        area: str = "eval",
        samples_per_prompt: int = 1,
        temperature: float = 0.0,
        pass_at: Sequence[int] = (),
    ) -> StepMetrics:
        """By default one greedy response to every prompt. Metrics are ``{area}/*``; accuracy is
        mean@n. Seeds are the same in every evaluation, and of no training step.
        """
        seeds = sample_seeds(self._settings.seed, 0, prompts, samples_per_prompt)
        groups = self._ask(prompts, seeds, Sampling(temperature, max_new_tokens), None)
        samples = self._samples(prompts, groups)
        metrics = rollout_metrics(samples, area)
        metrics += component_metrics(samples, self._reward_names, area)
        counts = [0] * len(prompts)
        for sample in samples:
            counts[sample.group] += sample.correct
        for k in pass_at:
            passed = sum(pass_at_k(samples_per_prompt, count, k) for count in counts)
            metrics.append(Metric(f"{area}/pass@{k}", Mean(passed, len(prompts))))
        return metrics

    def close(self) -> None:
        async def close_clients() -> None:
            await asyncio.gather(*(client.close() for client in self._clients))

        self._runner.run(close_clients())
        self._runner.close()

    def _ask(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        routing: RoutingShape | None,
    ) -> list[list[Completion]]:
        calls = [
            _complete_group(
                self._clients[i % len(self._clients)], prompt, sampling, group_seeds, routing
            )
            for i, (prompt, group_seeds) in enumerate(zip(prompts, seeds, strict=True))
        ]
        return self._runner.run(_all(calls))

    def _samples(
        self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]
    ) -> list[Sample]:
        samples = [
            self._sample(prompt, completion, group, index)
            for group, (prompt, completions) in enumerate(zip(prompts, groups, strict=True))
            for index, completion in enumerate(completions)
        ]
        return pad_rewards(samples, len(self._reward_names) or 1)

    def _sample(self, prompt: Prompt, completion: Completion, group: int, index: int) -> Sample:
        response = [int(t) for t in completion.token_ids]
        finished = completion.finish == "stop"
        spoken = response[:-1] if finished else response
        text = self._decode(spoken)
        name = f"{prompt.id}/{index}"
        scored = score(self._reward, text, prompt.payload, finished=finished, sample=name)
        if finished:
            self._compare_names(scored, name)
        asked = np.array(prompt.token_ids, np.int32)
        zeros = np.zeros(len(asked), np.float32)
        ends = step_tokens(spoken, [end for end, _ in scored.steps], self._decode)
        steps = bool(scored.steps)
        return Sample(
            prompt_id=prompt.id,
            group=group,
            index=index,
            tokens=np.concatenate([asked, completion.token_ids]),
            mask=np.arange(len(asked) + len(response)) >= len(asked),
            rollout_logprobs=np.concatenate([zeros, completion.logprobs]),
            rewards=np.array(list(scored.components.values()), np.float32),
            correct=bool(scored.correct),
            truncated=not finished,
            version_spans=completion.version_spans,
            routing=completion.routing,
            step_rewards=np.array([r for _, r in scored.steps], np.float32) if steps else None,
            step_ends=np.array(ends, np.int32) + np.int32(len(asked)) if steps else None,
        )

    def _compare_names(self, scored: Scored, sample: str) -> None:
        names = tuple(scored.components)
        if not self._reward_names:
            self._reward_names, self._named_by = names, sample
        elif names != self._reward_names:
            raise DataError(
                f"the reward of sample {sample} has the components {', '.join(names)}; accepted: "
                f"those of sample {self._named_by}, {', '.join(self._reward_names)}"
            )


def sample_seeds(
    run_seed: int,
    step: int,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    earlier: Sequence[Prompt] = (),
) -> list[list[int]]:
    """63-bit seeds of every prompt's samples; none that a prompt in ``earlier`` has."""
    seen = Counter(prompt.id for prompt in earlier)
    seeds = []
    for prompt in prompts:
        first = seen[prompt.id] * samples_per_prompt
        seen[prompt.id] += 1
        indices = range(first, first + samples_per_prompt)
        seeds.append([sample_seed(run_seed, step, prompt.id, index) for index in indices])
    return seeds


def sample_seed(run_seed: int, step: int, prompt_id: str, index: int) -> int:
    """The first 63 bits of sha256 over the four, as one JSON-like line."""
    line = f"{run_seed},{step},{index},{prompt_id}"
    return int.from_bytes(hashlib.sha256(line.encode()).digest()[:8], "big") >> 1


def rollout_metrics(samples: Sequence[Known], area: str) -> StepMetrics:
    """Sums and counts over samples, so that collectors' metrics add up."""
    count = len(samples)
    lengths = [sample.trained_tokens for sample in samples]
    return [
        Metric(f"{area}/reward", Mean(sum(s.reward for s in samples), count)),
        Metric(f"{area}/accuracy", Mean(sum(s.correct for s in samples), count)),
        Metric(f"{area}/truncated", Mean(sum(s.truncated for s in samples), count)),
        Metric(f"{area}/response_length", Mean(sum(lengths), count)),
        Metric(f"{area}/response_length_max", Max(max(lengths, default=0))),
        Metric(f"{area}/tokens", Sum(sum(s.length for s in samples))),
        Metric(f"{area}/samples", Sum(count)),
    ]


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that one of k of the samples is right, drawn without replacement: 1 - C(n - c, k)
    / C(n, k) (arXiv:2107.03374, equation 1).
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def component_metrics(samples: Sequence[Known], names: Sequence[str], area: str) -> StepMetrics:
    """Means of the reward's components; of a reward that has only one, nothing beyond the whole."""
    count = len(samples)
    if len(names) < 2:
        return []
    return [
        Metric(f"{area}/reward/{name}", Mean(sum(float(s.rewards[i]) for s in samples), count))
        for i, name in enumerate(names)
    ]


async def _complete_group(
    client: RolloutClient,
    prompt: Prompt,
    sampling: Sampling,
    seeds: Sequence[int],
    routing: RoutingShape | None,
) -> list[Completion]:
    """A response for every seed; aborted ones are asked for again."""
    group: dict[int, Completion] = {}
    for _ in range(_ABORT_TRIES):
        missing = [seed for seed in seeds if seed not in group]
        answers = await client.generate_group(
            prompt.token_ids, len(missing), sampling, missing, routing=routing
        )
        for seed, answer in zip(missing, answers, strict=True):
            if answer.finish != "abort":
                group[seed] = answer
        if len(group) == len(seeds):
            return [group[seed] for seed in seeds]
    raise ServerError(
        f"{client.url}: prompt {prompt.id}: found {len(seeds) - len(group)} of {len(seeds)} "
        f"responses aborted, {_ABORT_TRIES} times; expected: none"
    )


async def _all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. The first failure ends the others, and is the one raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
