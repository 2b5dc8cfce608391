"""What values explain of the returns, over ranks; samples without a reward teach no value."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algos.control import Controllers
from megarl.algos.value import value_metrics
from megarl.config.schema import Config
from megarl.errors import DataError
from megarl.experience import ONE_RANK, complete_plan, make_plan
from megarl.mesh import Mesh
from megarl.monitor.metrics import scalar
from megarl.types import PackedBatch, Sample, StepMetrics
from tests.helpers.samples import random_samples


def config_of(**critic: float) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": "unused", "mode": "train_only", "steps": 1},
            "model": {"hf": "unused"},
            "optim": {"lr": 1.0},
            "data": {"recorded": "/recorded"},
            "algo": {
                "policy": {"name": "ppo_clip"},
                "advantage": {"name": "gae"},
                "old_logprobs": "rollout",
            },
            "critic": critic,
        }
    )


def with_values(seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        replace(s, values=rng.normal(0.5, 0.3, len(s.tokens)).astype(np.float32))
        for s in random_samples(6, 4, seed=1)
    ]


def completed(samples: Sequence[Sample]) -> tuple[list[PackedBatch], dict[str, Any]]:
    plan = make_plan(samples, config_of(), Mesh(), 0)
    metrics = complete_plan(plan, samples, config_of(), Controllers.of(config_of().algo))
    return plan.steps[0], numbers(metrics)


def numbers(metrics: StepMetrics) -> dict[str, Any]:
    return {m.name: scalar(m.value) for m in metrics}


def test_explained_variance_is_of_all_ranks_together() -> None:
    rows, whole = completed(with_values())
    r = torch.cat([row.returns[row.mask] for row in rows]).double().numpy()
    v = torch.cat([row.values[row.mask] for row in rows]).double().numpy()
    assert whole["value/explained_variance"] == pytest.approx(1 - (r - v).var() / r.var())
    assert whole["value/mean"] == pytest.approx(v.mean())
    assert whole["value/return_mean"] == pytest.approx(r.mean())

    sent: list[Any] = []
    for part in (rows[:1], rows[1:], []):  # the last rank holds nothing
        value_metrics(part, lambda value: [sent.append(value), value][1:])
    for part in (rows[:1], []):
        found = numbers(value_metrics(part, lambda value: sent))
        assert found == pytest.approx({k: whole[k] for k in found})
        assert len(found) == 3


def test_equal_returns_have_no_variance_to_explain() -> None:
    (row, *_), _ = completed(with_values())
    row.returns = torch.ones_like(row.returns)
    assert "value/explained_variance" not in numbers(value_metrics([row], ONE_RANK.share))
    assert numbers(value_metrics([], ONE_RANK.share)) == {
        "value/mean": None,
        "value/return_mean": None,
    }


def test_a_sample_without_a_finite_reward_teaches_no_value() -> None:
    samples = with_values()
    before, _ = completed(samples)
    samples[5] = replace(samples[5], rewards=np.array([np.nan], np.float32))
    after, _ = completed(samples)
    changed = 0
    for row, other in zip(before, after, strict=True):
        for i, start, n in row.segments():
            here = slice(start, start + n)
            if i == 5:
                mask = row.mask[here]
                assert torch.equal(other.returns[here][mask], other.values[here][mask])
                changed += int(mask.sum())
            else:
                assert torch.equal(row.returns[here], other.returns[here])
    assert changed


def test_samples_without_values_are_refused_where_there_is_no_critic() -> None:
    samples = random_samples(2, 2)
    with pytest.raises(DataError, match=r"/recorded: samples without values; .*critic\.lr"):
        make_plan(samples, config_of(), Mesh(), 0)
    assert make_plan(samples, config_of(lr=1e-3), Mesh(), 0).steps[0][0].values is None
