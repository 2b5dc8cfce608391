"""Numbers that are not finite: what ``train.on_nonfinite`` makes of them, on all ranks alike."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist

SAMPLE = "p1/2"  # the one that work_nonfinite.py spoils; it lies on one rank of the two


def step(pool: WorkerPool, hf: Path, spoil: str, on_nonfinite: str) -> list[Any]:
    work = {"hf": hf, "layout": {"dp": 2}, "spoil": spoil, "on_nonfinite": on_nonfinite}
    return pool.run("tests.actor.work_nonfinite:step", world=2, **work)


@pytest.mark.parametrize("spoil", ["sample", "gradient"])
def test_the_optimizer_step_is_skipped_on_every_rank(
    pool: WorkerPool, tiny_model: Path, spoil: str
) -> None:
    results = step(pool, tiny_model, spoil, "skip")
    assert [moved for moved, _ in results] == [0, 0]
    assert sum(metrics["optim/skipped"] for _, metrics in results) == 1
    assert all("optim/grad_norm" not in metrics for _, metrics in results)
    bad = sum(metrics["policy/nonfinite_tokens"] for _, metrics in results)
    assert bad == (1 if spoil == "sample" else 0)


def test_a_spoilt_sample_can_be_left_out(pool: WorkerPool, tiny_model: Path) -> None:
    results = step(pool, tiny_model, "sample", "drop")
    assert all(moved > 0 for moved, _ in results)
    assert sum(metrics["policy/nonfinite_tokens"] for _, metrics in results) == 1


@pytest.mark.parametrize("how", ["raise", "drop"])
def test_a_spoilt_gradient_cannot_be_left_out(pool: WorkerPool, tiny_model: Path, how: str) -> None:
    for text in step(pool, tiny_model, "gradient", how):
        assert "in the gradient" in text and f"train.on_nonfinite={how}" in text


def test_the_error_names_the_sample_on_every_rank(pool: WorkerPool, tiny_model: Path) -> None:
    for text in step(pool, tiny_model, "sample", "raise"):
        assert SAMPLE in text and "train.on_nonfinite=raise" in text


def test_a_step_without_trained_tokens_moves_nothing(pool: WorkerPool, tiny_model: Path) -> None:
    results = step(pool, tiny_model, "mask", "skip")
    assert [moved for moved, _ in results] == [0, 0]
    assert sum(metrics["optim/skipped"] for _, metrics in results) == 1
