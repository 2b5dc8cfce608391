"""How near the least sum over microbatches of the slowest rank plans come, padding included."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.ops import RowPlan, pack_rows, pack_rows_ref

ROOT = Path(__file__).resolve().parents[2]
COSTS = [(1, 0), (0, 1), (10, 1), (100, 1)]  # of a token and of a pair


def slowest(plan: RowPlan, sizes: Sequence[int], linear: int, quadratic: int) -> int:
    """Sum over microbatches of the costliest rank's row, padded to the microbatch's length."""
    total = 0
    for m, length in enumerate(plan.lengths):
        squares = [sum(sizes[i] ** 2 for i in rank[m]) for rank in plan.rows]
        total += linear * length + quadratic * max(squares)
    return total


class Search:
    """Every way to put samples into ``count`` microbatches of ``dp`` rows, but for those that are
    another one with rows or microbatches renamed, and those that are dearer already.
    """

    def __init__(
        self, sizes: Sequence[int], row_tokens: int, shape: tuple[int, int], cost: tuple[int, int]
    ) -> None:
        self.sizes, self.row_tokens, self.cost = sorted(sizes, reverse=True), row_tokens, cost
        self.one_length = True
        self.rows = [[[0, 0] for _ in range(shape[0])] for _ in range(shape[1])]  # load, squares

    def least(self, *, one_length: bool) -> int:
        self.one_length, self.best = one_length, 1 << 62
        self._place(0)
        return self.best

    def _place(self, k: int) -> None:
        if (now := self._cost()) >= self.best:
            return
        if k == len(self.sizes):
            self.best = now
            return
        seen, size = set(), self.sizes[k]
        for group in self.rows:
            for row in group:
                place = (tuple(sorted(map(tuple, group))), tuple(row))
                if place in seen or row[0] + size > self.row_tokens:
                    continue
                seen.add(place)
                row[0], row[1] = row[0] + size, row[1] + size**2
                self._place(k + 1)
                row[0], row[1] = row[0] - size, row[1] - size**2

    def _cost(self) -> int:
        lengths = [max(1, *(load for load, _ in group)) for group in self.rows]
        if self.one_length:
            lengths = [max(lengths)] * len(lengths)
        squares = sum(max(s for _, s in group) for group in self.rows)
        return self.cost[0] * sum(lengths) + self.cost[1] * squares


def small_problems(count: int) -> list[tuple[list[int], int, int]]:
    """(sizes, tokens of a row, ranks): up to 8 samples, long and short ones for their rows."""
    rng = np.random.default_rng(3)
    found = []
    for _ in range(count):
        row_tokens = int(rng.choice([12, 20, 100]))
        longest = int(rng.choice([row_tokens, row_tokens // 2, row_tokens // 3]))
        sizes = rng.integers(1, longest + 1, int(rng.integers(1, 9))).tolist()
        found.append((sizes, row_tokens, int(rng.integers(1, 5))))
    return found


@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_small_plans_are_within_a_quarter_of_the_optimum_and_mostly_are_it(
    cost: tuple[int, int],
) -> None:
    """Of as many microbatches or one more."""
    ratios = []
    for sizes, row_tokens, dp in small_problems(300):
        for buckets in (1, 8):
            given: dict[str, Any] = {"row_tokens": row_tokens, "dp": dp, "buckets": buckets}
            plan = pack_rows(sizes, linear=cost[0], quadratic=cost[1], **given)
            counts = [n for n in (len(plan.lengths), len(plan.lengths) + 1) if n * dp <= 8]
            if not counts:
                continue
            least = min(
                Search(sizes, row_tokens, (dp, n), cost).least(one_length=buckets == 1)
                for n in counts
            )
            ratios.append(slowest(plan, sizes, *cost) / least)
    assert len(ratios) > 300 and min(ratios) >= 1  # the search is one
    assert max(ratios) <= 1.25
    assert float(np.mean(ratios)) < 1.01 and sum(r == 1 for r in ratios) > 0.85 * len(ratios)


def lengths_of(kind: int, count: int, longest: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    if kind == 0:
        drawn = np.exp(rng.normal(np.log(longest / 6), 0.8, count))
        return np.clip(drawn, 64, longest).astype(int).tolist()
    if kind == 1:
        return rng.integers(1, longest + 1, count).tolist()
    if kind == 2:
        short, long = rng.integers(200, 800, count), rng.integers(longest // 2, longest + 1, count)
        return np.where(rng.random(count) < 0.8, short, long).tolist()
    return rng.integers(100, longest // 8, count).tolist()


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("pack", [pack_rows, pack_rows_ref])
def test_no_plan_of_few_samples_is_worse_than_either_usual_way(
    pack: Any, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Karmarkar-Karp and first fit as the benchmark has them, independently of ours."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    bench = importlib.import_module("opsbench.pack")
    cost, better = (bench.LINEAR, bench.QUADRATIC), []
    for seed, count in enumerate([1, 3, 8, 16, 16, 40, 40, 120, 206, 249]):
        for dp in (2, 4, 8):
            sizes = lengths_of(kind, count, bench.ROW_TOKENS, seed)
            usual = min(
                slowest(way(sizes, dp), sizes, *cost)
                for way in (bench.differencing, bench.first_fit)
            )
            for buckets in (1, 4):
                plan = pack(
                    sizes,
                    row_tokens=bench.ROW_TOKENS,
                    dp=dp,
                    linear=cost[0],
                    quadratic=cost[1],
                    buckets=buckets,
                )
                found = slowest(plan, sizes, *cost)
                assert found <= usual, (count, dp, buckets)
                better.append(found < usual)
    assert sum(better) > 0.3 * len(better)
