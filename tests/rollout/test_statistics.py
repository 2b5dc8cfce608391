"""Metrics of samples: sums and counts, by closed forms."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.rollout.scoring import Scorer
from megarl.rollout.statistics import (
    component_metrics,
    effort_metrics,
    evaluation_metrics,
    pass_at_k,
    rollout_metrics,
)
from megarl.types import (
    Completion,
    GroupOutcome,
    GroupRequest,
    Max,
    Mean,
    Metric,
    Prompt,
    Sample,
    Sampling,
    Sum,
    VersionSpan,
)
from tests.helpers.samples import random_samples
from tests.rollout.rewards import grading


@pytest.mark.parametrize("samples", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples: int) -> None:
    for correct in range(samples + 1):
        right = [i < correct for i in range(samples)]
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(right, k))
            expected = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(samples, correct, k) == pytest.approx(expected, abs=1e-15)


def test_component_metrics_are_means_and_only_of_several_components() -> None:
    samples = [replace(s, rewards=np.array([0.5, 2], np.float32)) for s in random_samples(1, 3)]
    assert component_metrics(samples, ("a", "b"), "rollout") == [
        Metric("rollout/reward/a", Mean(1.5, 3)),
        Metric("rollout/reward/b", Mean(6.0, 3)),
    ]
    assert component_metrics(samples, ("a",), "rollout") == []
    assert component_metrics([], ("a", "b"), "eval")[0] == Metric("eval/reward/a", Mean(0, 0))


PROMPT = 2


def _whole(sample: Sample) -> Sample:
    """With versions of all that follows the prompt."""
    return replace(sample, version_spans=(VersionSpan(3, 0, len(sample.tokens) - PROMPT),))


def test_metrics_of_collectors_add_up() -> None:
    """Two collectors' sums and counts are those of one that has all of it."""
    samples = [_whole(s) for s in random_samples(3, 4)]
    found = {m.name: m.value for m in rollout_metrics(samples, "rollout")}
    assert found["rollout/reward"] == Mean(sum(s.reward for s in samples), 12)
    assert found["rollout/accuracy"] == Mean(sum(s.correct for s in samples), 12)
    lengths = [len(s.tokens) - PROMPT for s in samples]
    assert found["rollout/response_length"] == Mean(sum(lengths), 12)
    assert found["rollout/response_length_max"] == Max(max(lengths))
    assert found["rollout/tokens"] == Sum(sum(len(s.tokens) for s in samples))
    parts = [rollout_metrics(part, "rollout") for part in (samples[:5], samples[5:], [])]
    for metrics in zip(*parts, strict=True):
        whole = found[metrics[0].name]
        if isinstance(whole, Mean):
            values = [m.value for m in metrics]
            assert sum(v.total for v in values) == pytest.approx(whole.total)  # type: ignore[union-attr]
            assert sum(v.count for v in values) == whole.count  # type: ignore[union-attr]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize(
    "parts", [[(3, 35), (4, 5)], [(3, 1), (5, 39)], [(1, 7), (2, 7), (3, 26)], [(9, 40)]]
)
def test_a_response_is_as_long_as_it_was_sampled_whatever_of_it_is_trained(
    parts: list[tuple[int, int]], finish: Any, masked: bool
) -> None:
    """``parts``: (version, tokens), 40 in all."""
    ends = list(itertools.accumulate(count for _, count in parts))
    spans = [VersionSpan(v, end - n, end) for (v, n), end in zip(parts, ends, strict=True)]
    tokens = np.full(40, 5, np.int32)
    whole = Completion("r", tokens, -np.ones(40, np.float32), finish, tuple(spans))
    asked = GroupRequest(0, 1, Prompt("p", (2, 3, 4), {}), (0,), Sampling(1.0, 40))
    scorer = Scorer(lambda _: "", grading(lambda *_: 1.0), mask_continued=masked)
    (sample,) = scorer.samples(asked, [whole])
    assert sample.trained_tokens == (parts[-1][1] if masked else 40)
    for known in (sample, sample.untrained(), sample.facts, sample.facts.untrained()):
        found = {m.name: m.value for m in rollout_metrics([known], "rollout")}
        assert found["rollout/response_length"] == Mean(40, 1)
        assert found["rollout/response_length_max"] == Max(40)


def test_efforts_are_of_groups_that_failed_too() -> None:
    outcomes = [
        GroupOutcome(0, attempts=1, tokens=40),
        GroupOutcome(1, attempts=3, tokens=90),
        GroupOutcome(2, failed="no answer", attempts=5, tokens=7),
    ]
    assert effort_metrics(outcomes) == [
        Metric("rollout/attempts", Mean(9, 3)),
        Metric("rollout/sampled_tokens", Sum(137)),
    ]


def test_an_evaluation_tells_of_failures_and_averages_what_is_whole() -> None:
    """pass@1 of what is whole is its accuracy."""
    samples = [replace(s, correct=s.index > 0) for s in random_samples(2, 3)]
    outcomes = [
        GroupOutcome(0, tuple(samples[:3])),
        GroupOutcome(1, failed="no answer"),
        GroupOutcome(2, tuple(samples[3:])),
        GroupOutcome(3, failed="refused"),
    ]
    metrics = evaluation_metrics(outcomes, 3, ("reward",), "eval/x", (1, 3))
    found = {m.name: m.value for m in metrics}
    assert found["eval/x/failed"] == Sum(6) and found["eval/x/samples"] == Sum(6)
    assert found["eval/x/accuracy"] == Mean(4, 6)
    passed = found["eval/x/pass@1"]
    assert isinstance(passed, Mean) and passed.count == 2
    assert passed.total == pytest.approx(4 / 3) and found["eval/x/pass@3"] == Mean(2, 2)
    whole = evaluation_metrics(outcomes[:1], 3, ("reward",), "eval/x")
    assert Metric("eval/x/failed", Sum(0)) in whole
