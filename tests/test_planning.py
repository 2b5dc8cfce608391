"""Rows made of what was delivered are those of a rank that has every sample."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.data.packing import Payload
from megarl.errors import DataError
from megarl.experience import make_plan
from megarl.mesh import Mesh
from megarl.planning import build_plan, dp_ranks, plan_steps, routing_here, stage_layers
from megarl.types import Sample
from tests.helpers.plans import config_of
from tests.helpers.samples import random_samples

SAMPLES = [
    replace(s, truncated=i % 5 == 2, values=np.arange(len(s.tokens), dtype=np.float32))
    for i, s in enumerate(random_samples(7, 3, seed=4))
]
CONFIGS: dict[str, dict[str, Any]] = {
    "one step": {"algo": {"policy": {"name": "gspo"}}},
    "steps": {"algo": {"policy": {"name": "gspo"}, "minibatches": 3}},
    "filtered": {"algo": {"policy": {"name": "gspo"}, "overlong_filter": True}},
    "rollout": {"algo": {"policy": {"name": "gspo"}, "old_logprobs": "rollout"}},
}


def delivered(samples: list[Sample], owners: list[int], dp_rank: int) -> Mapping[int, Payload]:
    names = ("tokens", "mask", "rollout_logprobs", "values")
    return {
        i: Payload(s.length, **{name: getattr(s, name) for name in names})
        for i, (s, owner) in enumerate(zip(samples, owners, strict=True))
        if owner == dp_rank
    }


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=3), Mesh(cp=2, dp=2)], ids=str)
def test_rows_of_payloads_are_rows_of_samples_bit_for_bit(name: str, mesh: Mesh) -> None:
    config = config_of(**CONFIGS[name], train={"row_tokens": 64, "row_buckets": 2})
    facts = [s.facts for s in SAMPLES]
    steps = plan_steps(facts, config, mesh)
    owners = dp_ranks(steps, len(SAMPLES))
    assert set(owners) == set(range(mesh.dp))
    for rank in range(mesh.dp):
        payloads = delivered(SAMPLES, owners, rank)
        found = build_plan(steps, facts, payloads, config, mesh, rank)
        expected = make_plan(SAMPLES, config, mesh, rank)
        assert (found.trained_tokens, found.names) == (expected.trained_tokens, expected.names)
        for one, two in zip(found.steps, expected.steps, strict=True):
            for a, b in zip(one, two, strict=True):
                for field in fields(a):
                    x, y = getattr(a, field.name), getattr(b, field.name)
                    assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
    if name == "filtered":
        kept = sum(s.trained_tokens for s in SAMPLES if not s.truncated)
        assert sum(step.trained_tokens for step in steps) == kept


D, E = False, True  # a dense layer, one with experts


@pytest.mark.parametrize(
    ("moe", "mesh", "expected"),
    [
        ([D, E, E, D, E, E], Mesh(), [[0, 1, 2, 3]]),
        ([D, E, E, D, E, E], Mesh(pp=2), [[0, 1], [2, 3]]),
        ([D, E, E, D, E, E], Mesh(pp=3), [[0], [1], [2, 3]]),
        ([D, D, E, E], Mesh(pp=2), [[], [0, 1]]),
        ([D, E, E, D, E, E, E, E], Mesh(pp=2, vpp=2), [[0, 2, 3], [1, 4, 5]]),
        ([E] * 8, Mesh(pp=2, vpp=4), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ([D] * 4, Mesh(pp=4), [[], [], [], []]),
    ],
)
def test_a_stage_has_the_routing_of_its_own_moe_layers(
    moe: list[bool], mesh: Mesh, expected: list[list[int]]
) -> None:
    found = stage_layers(moe, mesh)
    assert found == expected
    if count := sum(moe):
        routed = replace(SAMPLES[0], routing=np.zeros((SAMPLES[0].length - 1, count, 4), np.uint8))
        for stage, layers in enumerate(expected):
            shape = (len(layers), 4, "uint8") if layers else None
            assert routing_here([routed.facts], found, stage, 4) == shape


@pytest.mark.parametrize(("has", "model"), [(3, [E, E]), (1, [D, E, E, E]), (4, [D, D])])
def test_routing_of_another_model_is_refused_with_both_numbers(has: int, model: list[bool]) -> None:
    sample = replace(SAMPLES[0], routing=np.zeros((SAMPLES[0].length - 1, has, 2), np.uint8))
    with pytest.raises(DataError, match=rf"p0/0 has the routing of {has} MoE .*: {sum(model)}"):
        routing_here([sample.facts], stage_layers(model, Mesh()), 0, 2)


def test_routing_that_is_not_there_or_of_other_top_k_is_refused() -> None:
    layers = stage_layers([E, E, D], Mesh())
    with pytest.raises(DataError, match=r"p0/0 has no routing; accepted: that of 2 MoE layers"):
        routing_here([SAMPLES[0].facts], layers, 0, 2)
    sample = replace(SAMPLES[0], routing=np.zeros((SAMPLES[0].length - 1, 2, 3), np.uint8))
    for topk in (2, 4, 8):
        match = rf"p0/0 has the routing of 3 experts a token; accepted: {topk}"
        with pytest.raises(DataError, match=match):
            routing_here([sample.facts], layers, 0, topk)
