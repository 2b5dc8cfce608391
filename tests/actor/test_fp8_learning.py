"""The loss of the demo's warm-up, as FP8 computes it."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_tiny_model
from tests.helpers.dist import WorkerPool

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(3600)]

STEPS, WINDOW = 200, 5
RECIPES: list[dict[str, Any]] = [
    {},
    {"scales": "power_of_two"},
    {"recipe": "tensorwise", "format": "hybrid"},
    {"recipe": "mxfp8"},
]


def smoothed(curve: list[float]) -> list[float]:
    """Means of the last WINDOW steps."""
    ends = range(1, len(curve) + 1)
    return [sum(curve[max(0, e - WINDOW) : e]) / (e - max(0, e - WINDOW)) for e in ends]


def test_fp8_costs_less_than_two_percent_of_the_loss_at_every_step(
    pool: WorkerPool, demo_data: Path, tmp_path: Path
) -> None:
    """On the weights that bf16 has then. A run of its own ends elsewhere (docs/fp8-emulation.md):
    it learns by leaps, and when they come depends on the last bit.
    """
    hf = make_tiny_model(tmp_path / "model")
    work = {"hf": hf, "demonstrations": demo_data / "warmup.jsonl", "steps": STEPS}
    (found,) = pool.run(
        "tests.actor.work_fp8_learning:losses", world=1, timeout_s=3600, **work, recipes=RECIPES
    )
    bf16, *by_recipe = [list(curve) for curve in zip(*found, strict=True)]
    assert bf16[-1] < 0.6 * bf16[0]  # it has learnt
    for recipe, curve in zip(RECIPES, by_recipe, strict=True):
        assert curve != bf16, recipe
        gaps = [abs(a / b - 1) for a, b in zip(smoothed(curve), smoothed(bf16), strict=True)]
        print(recipe, "largest gap", max(gaps), "mean", sum(gaps) / STEPS)
        assert max(gaps) < 0.02, (recipe, max(gaps))
