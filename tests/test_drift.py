"""A server whose log-probs leave the trainer's is named; the others are not."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.load import load_config
from megarl.drift import ALONE, Distance, drifting, server_metrics, server_sums
from megarl.experience import make_plan
from megarl.mesh import Mesh
from megarl.types import Mean, PackedBatch, Sample, VersionSpan
from tests.helpers.samples import random_samples


def sampled_by(sample: Sample, *servers: tuple[str, int]) -> Sample:
    """``servers``: (name, response tokens); the last one samples the rest."""
    response = sample.length - int(sample.mask.argmax())
    spans, start = [], 0
    for k, (name, count) in enumerate(servers):
        end = response if k == len(servers) - 1 else min(response, start + count)
        spans.append(VersionSpan(0, start, end, name))
        start = end
    return replace(sample, version_spans=tuple(spans))


def rows_of(samples: list[Sample], shift: dict[str, float]) -> list[PackedBatch]:
    """Rows in which the trainer's log-prob is the rollout's plus ``shift[server]``."""
    config = load_config(
        ["configs/algos/gspo.yaml"],
        [
            *("run.dir=x", "run.mode=train_only", "run.steps=1", "model.hf=x", "data.recorded=x"),
            *("optim.lr=1e-4", "train.row_tokens=64"),
        ],
    )
    plan = make_plan(samples, config, Mesh(), 0)
    rows = [row for step in plan.steps for row in step]
    for row in rows:
        old = row.rollout_logprobs.clone()
        for i, start, _ in row.segments():
            sample = samples[i]
            prompt = sample.length - sample.version_spans[-1].end
            for span in sample.version_spans:
                for t in range(span.start, span.end):  # token prompt + t is the target before it
                    old[start + prompt + t - 1] += shift[span.server]
        row.old_logprobs = old
    return rows


def test_tokens_count_for_the_server_that_sampled_them() -> None:
    rng = np.random.default_rng(0)
    plain = random_samples(6, 4)
    samples = [
        sampled_by(s, ("a", int(rng.integers(0, 5))), ("b", int(rng.integers(0, 5))), ("a", 0))
        for s in plain
    ]
    shift = {"a": 0.25, "b": -0.75}
    rows = rows_of(samples, shift)
    expected = {"a": 0, "b": 0}
    for s in samples:
        prompt = s.length - s.version_spans[-1].end
        for span in s.version_spans:
            expected[span.server] += int(s.mask[prompt + span.start : prompt + span.end].sum())
    found = dict(server_sums(rows, samples))
    assert {name: v[0] for name, v in found.items()} == expected
    for name, (tokens, k3, extreme) in found.items():
        g = shift[name]
        assert k3 / tokens == pytest.approx(math.exp(g) - 1 - g, rel=1e-5)
        assert extreme == (tokens if abs(g) > math.log(2) else 0)


def test_metrics_are_of_all_ranks_and_name_the_servers() -> None:
    samples = [sampled_by(s, ("server 0", 2), ("server 1", 0)) for s in random_samples(4, 4)]
    rows = rows_of(samples, {"server 0": 0.1, "server 1": 0.2})

    def twice(value: Any) -> list[Any]:
        return [value, value]

    found = {m.name: m.value for m in server_metrics(rows, samples, twice)}
    alone = dict(server_sums(rows, samples))
    value = found["servers/server_1/mismatch_k3"]
    assert isinstance(value, Mean)
    assert value.count == 2 * alone["server 1"][0]
    assert value.total / value.count == pytest.approx(math.exp(0.2) - 1.2, rel=1e-5)
    assert "servers/server_0/extreme" in found


def test_numbers_that_are_none_and_samples_of_nobody_are_left_out() -> None:
    samples = [sampled_by(s, ("a", 0)) for s in random_samples(2, 2)]
    rows = rows_of(samples, {"a": 0.5})
    tokens, k3, _ = dict(server_sums(rows, samples))["a"]
    assert rows[0].old_logprobs is not None
    rows[0].old_logprobs[int(rows[0].mask.nonzero()[0])] = torch.nan
    left = dict(server_sums(rows, samples))["a"]
    assert left[0] == tokens - 1
    assert left[1] == pytest.approx(k3 * (tokens - 1) / tokens, rel=1e-5)
    nobody = [replace(s, version_spans=()) for s in samples]
    assert server_metrics(rows, nobody, lambda v: [v]) == []


def of(**k3: float) -> dict[str, Distance]:
    return {name: Distance(1000.0, value, 0.0) for name, value in k3.items()}


@pytest.mark.parametrize(
    "found, named",
    [
        (of(a=0.002, b=0.002, c=0.03), ["c"]),
        (of(a=0.002, b=0.002, c=0.009), []),
        (of(a=0.01, b=0.06), ["b"]),
        (of(a=1e-9, b=9e-4), []),  # far from the other, and both next to nothing
        (of(a=1e-9, b=2e-3), ["b"]),
        (of(a=ALONE * 0.9), []),
        (of(a=ALONE * 1.1), ["a"]),
        (of(a=0.5, b=0.5), []),  # the policy has moved: both are as far
        (of(a=0.01) | {"b": Distance(100.0, 9.0, 0.5)}, []),  # too few tokens to say
    ],
)
def test_one_that_is_much_farther_than_the_others_drifts(
    found: dict[str, Distance], named: list[str]
) -> None:
    assert list(drifting(found)) == named


def test_what_is_said_has_the_numbers() -> None:
    (why,) = drifting(of(a=0.002, b=0.002, c=0.03)).values()
    assert "k3 0.03 over 1000 tokens" in why and "median is 0.002, up to 0.01" in why
