"""Padding rows to what a recipe of FP8 multiplies (16 or 32 tokens a rank) changes nothing else.

Same samples in the same rows, once padded as the layout needs and once to the multiple: log-probs,
metrics, gradients with those of balancing and z losses, and the tokens of every expert.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.monitor.metrics import merge_metrics, scalar
from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

SAMPLES = random_samples(4, 2, seed=11)
TOLERANCE = {  # of the largest entry: products of other shapes, summed in another order
    "fp32": 2e-5,
    "bf16": 2e-2,  # steps of bf16 are 2^-8; through four layers
}
LAYOUTS = [
    ({}, "fp32"),
    ({}, "bf16"),
    ({"tp": 2}, "fp32"),
    ({"cp": 2}, "fp32"),
    ({"dp": 2, "ep": 2}, "fp32"),
    pytest.param({"pp": 2}, "fp32", marks=pytest.mark.slow),
    pytest.param({"tp": 2, "cp": 2}, "fp32", marks=pytest.mark.slow),
    pytest.param({"tp": 2, "ep": 2, "etp": 1}, "bf16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layout, dtype", LAYOUTS, ids=str)
def test_padding_to_a_multiple_touches_no_statistic(
    pool: WorkerPool, tiny_model: Path, layout: dict[str, int], dtype: str
) -> None:
    aligns = [1, 16, 32]
    ranks = pool.run(
        "tests.actor.work_alignment:step",
        world=mesh_of(layout).world_size,
        **{"hf": tiny_model, "layout": layout, "samples": SAMPLES, "aligns": aligns},
        **{"row_tokens": 384, "dtype": dtype},
    )
    plain, *aligned = ([rank[k] for rank in ranks] for k in range(len(aligns)))
    assert any(rank["share"] % 16 for rank in plain), "nothing is padded further"
    for align, steps in zip(aligns[1:], aligned, strict=True):
        for one, other in zip(plain, steps, strict=True):
            assert [row for row, _ in other["rows"]] == [row for row, _ in one["rows"]]
            assert other["share"] % align == 0
            assert_close(one, other, TOLERANCE[dtype])
        assert tokens(steps) == tokens(plain)
        assert metrics(steps) == pytest.approx(metrics(plain), rel=TOLERANCE[dtype], abs=1e-6)


def assert_close(one: dict[str, Any], other: dict[str, Any], tolerance: float) -> None:
    expected, found = sizes(one), sizes(other)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        largest = float(value.abs().max())
        assert (found[name] - value).abs().max() <= tolerance * largest + 1e-8, name


def sizes(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    values = {f"log-probs {i}": x for i, x in found["logprobs"].items()}
    return values | {f"gradient {n}": g for n, g in found["gradients"].items()}


def tokens(steps: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Layer -> tokens of each expert, of all ranks."""
    total: dict[int, torch.Tensor] = {}
    for rank in steps:
        for layer, counts in rank["routed"].items():
            total[layer] = total.get(layer, torch.zeros_like(counts)) + counts
    return {layer: counts.tolist() for layer, counts in total.items()}


def metrics(steps: list[dict[str, Any]]) -> dict[str, float]:
    return {m.name: scalar(m.value) for m in merge_metrics(s["metrics"] for s in steps)}
