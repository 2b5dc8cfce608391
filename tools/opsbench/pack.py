"""Packing: how long it takes, how much of the rows is padding, and how even the ranks are.

Beside two usual ways, which have the same rows to fill and pad all to the longest:
``kk``         Karmarkar-Karp's differencing by FLOPs over the ranks, then by tokens over the rows
               of each, with more rows until all fit (verl, slime)
``first fit``  longest first into the first row with room; rows are dealt to the ranks in turn

A note reads ``efficiency / imbalance / slowest``: tokens over the rows' lengths; the costliest
rank's FLOPs over the mean's; and the sum over microbatches of the slowest rank's FLOPs, padding
included, over the mean rank's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from megarl.ops import RowPlan, pack_rows, pack_rows_ref
from opsbench.measure import Row, best_times

ROW_TOKENS = 16_384
LINEAR, QUADRATIC = 15_472, 1  # models/flops.py of a model of 30 billion parameters, 3 active


def rows(quick: bool) -> Iterator[Row]:
    count = 1000 if quick else 100_000
    for name, sizes in distributions(count):
        for dp in (8, 64):
            yield timed(name, sizes, dp)
    for name, sizes in distributions(500 if quick else 2000):
        for dp in (8, 32):
            yield from compared(name, sizes, dp)


def distributions(count: int) -> Iterator[tuple[str, list[int]]]:
    """Lengths of samples in tokens."""
    rng = np.random.default_rng(0)
    lognormal = np.exp(rng.normal(np.log(ROW_TOKENS / 6), 0.8, count))
    yield "log-normal", np.clip(lognormal, 64, ROW_TOKENS).astype(int).tolist()
    yield "uniform", rng.integers(1, ROW_TOKENS + 1, count).tolist()
    short, long = rng.integers(200, 800, count), rng.integers(8192, ROW_TOKENS + 1, count)
    yield "bimodal", np.where(rng.random(count) < 0.8, short, long).tolist()
    yield "equal", [ROW_TOKENS // 3] * count
    yield "one giant", [ROW_TOKENS, *rng.integers(100, 300, count - 1).tolist()]


def ours(sizes: Sequence[int], dp: int, buckets: int) -> RowPlan:
    return pack_rows(
        sizes,
        row_tokens=ROW_TOKENS,
        dp=dp,
        linear=LINEAR,
        quadratic=QUADRATIC,
        buckets=buckets,
    )


def timed(name: str, sizes: list[int], dp: int) -> Row:
    given = {"row_tokens": ROW_TOKENS, "dp": dp, "linear": LINEAR, "quadratic": QUADRATIC}
    few = sizes[:5000]  # the reference is Python
    calls = {
        "ours": lambda: pack_rows(sizes, **given),
        "ours, few": lambda: pack_rows(few, **given),
        "reference, few": lambda: pack_rows_ref(few, **given),
    }
    seconds = best_times(calls, 5, budget_s=1.0)
    return Row(
        "pack_rows",
        f"{len(sizes)} {name}, dp {dp}",
        sum(sizes),
        1,
        vs_reference=seconds["reference, few"] / seconds["ours, few"],
        seconds=seconds["ours"],
        note=quality(ours(sizes, dp, 1), sizes).text(),
    )


def compared(name: str, sizes: list[int], dp: int) -> Iterator[Row]:
    plans = {
        "ours": ours(sizes, dp, 1),
        "ours, 4 buckets": ours(sizes, dp, 4),
        "kk": differencing(sizes, dp),
        "first fit": first_fit(sizes, dp),
    }
    for way, plan in plans.items():
        case = f"{name}, dp {dp}: {way}"
        yield Row("pack_rows", case, sum(sizes), 1, note=quality(plan, sizes).text())


@dataclass(frozen=True)
class Quality:
    """Of the module docstring."""

    efficiency: float
    imbalance: float
    slowest: float
    microbatches: int

    def text(self) -> str:
        numbers = f"{self.efficiency:.4f} / {self.imbalance:.6f} / {self.slowest:.4f}"
        return f"{numbers} in {self.microbatches} microbatches"


def quality(plan: RowPlan, sizes: Sequence[int]) -> Quality:
    squares = np.array(
        [[sum(sizes[i] ** 2 for i in row) for row in rank] for rank in plan.rows], dtype=float
    )
    tokens = np.array([[sum(sizes[i] for i in row) for row in rank] for rank in plan.rows])
    totals = (LINEAR * tokens + QUADRATIC * squares).sum(1)
    lengths = np.array(plan.lengths)
    efficiency = tokens.sum() / (len(plan.rows) * lengths.sum())
    slowest = (LINEAR * lengths + QUADRATIC * squares.max(0)).sum() / totals.mean()
    return Quality(efficiency, totals.max() / totals.mean(), slowest, len(lengths))


# --- the usual ways ------------------------------------------------------------------------------


def differencing(sizes: Sequence[int], dp: int) -> RowPlan:
    """Karmarkar-Karp, rank by rank."""
    costs = [LINEAR * n + QUADRATIC * n * n for n in sizes]
    ranks = karmarkar_karp(costs, dp)
    count = max(1, *(-(-sum(sizes[i] for i in rank) // ROW_TOKENS) for rank in ranks))
    while True:
        rows = [
            [[rank[k] for k in part] for part in karmarkar_karp([sizes[i] for i in rank], count)]
            for rank in ranks
        ]
        if max(sum(sizes[i] for i in row) for rank in rows for row in rank) <= ROW_TOKENS:
            break
        count += 1
    return padded_to_longest(
        [sorted(rank, key=lambda row: -sum(costs[i] for i in row)) for rank in rows], sizes
    )


def karmarkar_karp(weights: Sequence[int], parts: int) -> list[list[int]]:
    """The two most uneven partial partitions are joined, heaviest part to lightest."""
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = [
        (-weight, i, [(weight, [i]), *((0, []) for _ in range(parts - 1))])
        for i, weight in enumerate(weights)
    ]
    if not heap:
        return [[] for _ in range(parts)]
    heapify(heap)
    while len(heap) > 1:
        (_, number, one), (_, _, two) = heappop(heap), heappop(heap)
        joined = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(two), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
    return [members for _, members in heap[0][2]]


def first_fit(sizes: Sequence[int], dp: int) -> RowPlan:
    rows: list[list[int]] = []
    loads: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        k = next((k for k, load in enumerate(loads) if load + sizes[i] <= ROW_TOKENS), len(rows))
        if k == len(rows):
            rows.append([])
            loads.append(0)
        rows[k].append(i)
        loads[k] += sizes[i]
    rows += [[] for _ in range(-len(rows) % dp)]
    return padded_to_longest([rows[rank::dp] for rank in range(dp)], sizes)


def padded_to_longest(rows: list[list[list[int]]], sizes: Sequence[int]) -> RowPlan:
    longest = max(sum(sizes[i] for i in row) for rank in rows for row in rank)
    return RowPlan(rows, [longest] * len(rows[0]))
