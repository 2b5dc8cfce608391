"""Evaluations go on when servers die and come back, and end in bounded time on every rank."""

from typing import Any

import pytest

from megarl.types import Max
from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist

DONE = [("eval/samples", Max(1))]


def evaluated(pool: WorkerPool, **scenario: Any) -> tuple[Any, Any]:
    """What each of two ranks has got of it, within a minute."""
    given = {"waits_for": "2", "comes": True, "stops": False, "patience_s": 30.0, **scenario}
    ranks = pool.run("tests.work_evaluation:evaluated", world=2, **given)
    assert all(seconds < 20 for _, seconds in ranks)
    return ranks[0][0], ranks[1][0]


def test_a_server_that_dies_in_an_evaluation_comes_back_into_it(pool: WorkerPool) -> None:
    assert evaluated(pool) == (DONE, [])


def test_a_stop_lets_a_short_evaluation_end(pool: WorkerPool) -> None:
    assert evaluated(pool, waits_for="1", stops=True) == (DONE, [])


def test_a_stop_does_not_wait_for_a_long_one(pool: WorkerPool) -> None:
    assert evaluated(pool, waits_for="never", stops=True) == ([], [])


def test_an_evaluation_without_servers_ends_the_run_on_every_rank(pool: WorkerPool) -> None:
    one, two = evaluated(pool, comes=False, patience_s=1.0)
    assert "no rollout server came within 1 s" in one
    assert "no rollout server came within 1 s" in two


def test_a_stop_does_not_wait_for_servers(pool: WorkerPool) -> None:
    assert evaluated(pool, comes=False, stops=True) == ([], [])
