"""Samples are packed into rows that rank for rank and microbatch for microbatch cost alike."""

import importlib
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.ops import RowPlan, pack_rows, pack_rows_ref
from megarl.ops._pack_ref import bucket_lengths

ROOT = Path(__file__).resolve().parents[2]


def assert_kept(plan: RowPlan, sizes: Sequence[int], **given: int) -> None:
    """What is promised of every plan."""
    dp, unit = given["dp"], given.get("row_multiple", 1)
    assert len(plan.rows) == dp
    assert {len(rank) for rank in plan.rows} == {len(plan.lengths)}
    assert len(plan.lengths) % given.get("rows_multiple", 1) == 0 and plan.lengths
    assert Counter(i for rank in plan.rows for row in rank for i in row) == Counter(
        range(len(sizes))
    )
    assert len(set(plan.lengths)) <= given.get("buckets", 1)
    for m, length in enumerate(plan.lengths):
        assert length > 0 and length % unit == 0
        for rank in plan.rows:
            load = sum(sizes[i] for i in rank[m])
            assert load <= min(length, given["row_tokens"])
            assert rank[m] == sorted(rank[m])
    loads = [
        max(sum(sizes[i] for i in rank[m]) for rank in plan.rows) for m in range(len(plan.lengths))
    ]
    assert max(plan.lengths) < max(*loads, 1) + unit


def costs(plan: RowPlan, sizes: Sequence[int], linear: int, quadratic: int) -> np.ndarray[Any, Any]:
    """[rank, microbatch]"""
    return np.array(
        [
            [sum(linear * sizes[i] + quadratic * sizes[i] ** 2 for i in row) for row in rank]
            for rank in plan.rows
        ]
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], dict[str, int]]:
    row_tokens = draw(st.sampled_from([1, 7, 64, 1000, 16384]))
    longest = draw(st.sampled_from([row_tokens, max(1, row_tokens // 8)]))
    sizes = draw(st.lists(st.integers(1, longest), max_size=50))
    linear, quadratic = draw(st.sampled_from([(1, 0), (0, 1), (15472, 1), (3, 2)]))
    return sizes, {
        "row_tokens": row_tokens,
        "dp": draw(st.integers(1, 9)),
        "rows_multiple": draw(st.integers(1, 3)),
        "row_multiple": draw(st.integers(1, 8)),
        "linear": linear,
        "quadratic": quadratic,
        "buckets": draw(st.integers(1, 6)),
    }


@settings(max_examples=400, deadline=None)
@given(problems())
def test_kernel_and_reference_give_one_plan_that_keeps_the_promises(
    problem: tuple[list[int], dict[str, int]],
) -> None:
    sizes, given = problem
    plan = pack_rows(sizes, **given)
    assert plan == pack_rows_ref(sizes, **given)
    assert_kept(plan, sizes, **given)


def test_they_agree_on_many_samples() -> None:
    """Where there are more needed lengths than candidates for buckets, and every limit is met."""
    rng = np.random.default_rng(0)
    for sizes in (rng.integers(1, 5000, 1500), rng.integers(2500, 5000, 1500)):
        for dp, buckets in ((2, 5), (48, 3)):
            given = {"row_tokens": 5000, "dp": dp, "linear": 9000, "quadratic": 1}
            plan = pack_rows(sizes.tolist(), buckets=buckets, **given)
            assert plan == pack_rows_ref(sizes.tolist(), buckets=buckets, **given)
            assert_kept(plan, sizes.tolist(), buckets=buckets, **given)


@settings(max_examples=60, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_samples_decides_among_equals_only(
    problem: tuple[list[int], dict[str, int]], random: Any
) -> None:
    sizes, given = problem
    order = list(range(len(sizes)))
    random.shuffle(order)
    one, two = pack_rows(sizes, **given), pack_rows([sizes[i] for i in order], **given)
    assert one.lengths == two.lengths

    def sized(plan: RowPlan, of: Sequence[int]) -> list[list[list[int]]]:
        return [[sorted(of[i] for i in row) for row in rank] for rank in plan.rows]

    assert sized(one, sizes) == sized(two, [sizes[i] for i in order])


@pytest.mark.parametrize(
    ("sizes", "dp", "loads"),
    [
        ([3, 3, 2, 2, 2], 2, [6, 6]),  # which longest first alone leaves at 7 and 5
        ([5, 4, 3, 3, 3], 2, [9, 9]),
        ([8, 7, 6, 5, 4, 3, 2, 1], 3, [12, 12, 12]),
    ],
)
def test_rows_of_known_problems_are_exactly_even(
    sizes: list[int], dp: int, loads: list[int]
) -> None:
    plan = pack_rows(sizes, row_tokens=16, dp=dp)
    assert [sum(sizes[i] for i in rank[0]) for rank in plan.rows] == loads
    assert plan.lengths == [max(loads)]


@pytest.mark.parametrize(
    ("sizes", "dp"),
    [
        ([10] * 8 + [1] * 80, 4),
        ([16] * 4 + [4] * 16 + [1] * 64, 4),
        ([12] * 6 + [3] * 24 + [2] * 36, 6),
    ],
)
def test_ranks_get_equal_shares_of_long_and_of_short_samples(sizes: list[int], dp: int) -> None:
    """Equal tokens are not equal work where attention costs most."""
    plan = pack_rows(sizes, row_tokens=sum(sizes) // dp, dp=dp, linear=0, quadratic=1)
    totals = costs(plan, sizes, 0, 1).sum(1)
    assert totals.max() == totals.min()


@pytest.mark.parametrize(
    ("needed", "buckets", "expected"),
    [
        ([8, 8, 8], 3, [8, 8, 8]),
        ([9, 4, 4, 1], 1, [9, 9, 9, 9]),
        ([9, 4, 4, 1], 2, [9, 4, 4, 4]),
        ([9, 4, 4, 1], 3, [9, 4, 4, 1]),
        ([10, 9, 2, 1], 2, [10, 10, 2, 2]),
        ([10, 6, 5, 5, 5], 2, [10, 6, 6, 6, 6]),
        ([3, 10, 1], 9, [3, 10, 1]),
    ],
)
def test_buckets_raise_lengths_as_little_as_they_can(
    needed: list[int], buckets: int, expected: list[int]
) -> None:
    assert sorted(bucket_lengths(needed, buckets, 1)) == sorted(expected)
    least = min(
        sum(min(b for b in chosen if b >= n) for n in needed)
        for chosen in itertools.combinations(set(needed), min(buckets, len(set(needed))))
        if max(chosen) == max(needed)
    )
    assert sum(bucket_lengths(needed, buckets, 1)) == least


def test_more_lengths_than_are_looked_at_are_rounded_and_none_is_too_short() -> None:
    needed = [*range(1, 20_001, 7), 20_000]
    found = bucket_lengths(needed, 4, 1)
    assert all(n <= f for n, f in zip(needed, found, strict=True))
    assert len(set(found)) == 4 and max(found) == 20_000
    assert sum(found) < 1.01 * (len(needed) / 4 * (5000 + 10_000 + 15_000 + 20_000))


def test_buckets_save_padding_where_samples_are_long_for_a_row() -> None:
    sizes = np.random.default_rng(0).integers(500, 1001, 400).tolist()
    one, four = (pack_rows(sizes, row_tokens=1000, dp=4, buckets=b) for b in (1, 4))
    assert sum(one.lengths) > 990 * 100
    assert sum(four.lengths) < 0.85 * sum(one.lengths)


@pytest.mark.parametrize("kind", ["log-normal", "uniform", "bimodal", "equal", "one giant"])
@pytest.mark.parametrize("dp", [8, 64])
def test_a_hundred_thousand_samples_are_packed_evenly(kind: str, dp: int) -> None:
    """How fast: tools/opsbench/pack.py."""
    rng = np.random.default_rng(0)
    sizes = {
        "log-normal": np.clip(np.exp(rng.normal(7.9, 0.8, 100_000)), 64, 16_384).astype(int),
        "uniform": rng.integers(1, 16_385, 100_000),
        "bimodal": np.where(
            rng.random(100_000) < 0.8,
            rng.integers(200, 800, 100_000),
            rng.integers(8192, 16_385, 100_000),
        ),
        "equal": np.full(100_000, 5461),
        "one giant": np.array([16_384, *rng.integers(100, 300, 99_999)]),
    }[kind].tolist()
    given = {"row_tokens": 16_384, "dp": dp, "linear": 15_472, "quadratic": 1, "buckets": 4}
    plan = pack_rows(sizes, **given)
    assert_kept(plan, sizes, **given)
    totals = costs(plan, sizes, 15_472, 1).sum(1)
    assert totals.max() / totals.mean() < 1.001 or kind == "one giant"


@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("dp", [8, 32])
def test_neither_way_that_is_usual_packs_tighter_or_evener(
    kind: int, dp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Karmarkar-Karp and first fit, with the same lengths and costs."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    bench = importlib.import_module("opsbench.pack")
    for count in (500, 1000):
        _, sizes = [*bench.distributions(count)][kind]
        found = bench.quality(bench.ours(sizes, dp, 1), sizes)
        buckets = bench.quality(bench.ours(sizes, dp, 4), sizes)
        for other in (bench.differencing(sizes, dp), bench.first_fit(sizes, dp)):
            usual = bench.quality(other, sizes)
            assert found.efficiency >= usual.efficiency
            assert found.imbalance <= usual.imbalance + 1e-5
            assert found.microbatches <= usual.microbatches
            assert buckets.efficiency >= usual.efficiency
            # What evens the ranks may cost single microbatches a little.
            assert buckets.slowest <= 1.005 * usual.slowest


GOOD: dict[str, Any] = {"sizes": [3, 4], "row_tokens": 8, "dp": 2}


@pytest.mark.parametrize("call", [pack_rows, pack_rows_ref])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": [3, 9]}, "size 1 must be 1 to 8, got 9"),
        ({"sizes": [0, 3]}, "size 0 must be 1 to 8, got 0"),
        ({"sizes": [3, -1, 4]}, "size 1 must be 1 to 8, got -1"),
        ({"sizes": [3, 2**70]}, "size 1 must be 1 to 8, got 1180591620717411303424"),
        ({"dp": 0}, "dp must be at least 1, got 0"),
        ({"row_tokens": 0}, "row_tokens must be at least 1, got 0"),
        ({"buckets": -1}, "buckets must be at least 1, got -1"),
        ({"rows_multiple": 0}, "rows_multiple must be at least 1, got 0"),
        ({"row_multiple": 0}, "row_multiple must be at least 1, got 0"),
        ({"linear": 0}, "not both 0, got 0 and 0"),
        ({"linear": -1, "quadratic": 2}, "0 or more and not both 0, got -1 and 2"),
        ({"quadratic": -1}, "0 or more and not both 0, got 1 and -1"),
        ({"quadratic": 2**60}, "too large for 2 samples in rows of 8 tokens"),
        ({"linear": 2**80}, "too large for 2 samples"),
        ({"row_tokens": 2**40, "quadratic": 1}, "too large for 2 samples"),
    ],
)
def test_misuse_is_an_error_with_the_numbers(
    call: Any, change: dict[str, Any], message: str
) -> None:
    arguments = {**GOOD, **change}
    with pytest.raises(ValueError, match=message):
        call(arguments.pop("sizes"), **arguments)


def test_the_kernel_refuses_by_itself_what_it_could_not_survive() -> None:
    host = pytest.importorskip("megarl._host")
    for problem in (
        ([3, 9], 8, 2, 1, 1, 1, 0, 1),
        ([0], 8, 2, 1, 1, 1, 0, 1),
        ([3], 8, 0, 1, 1, 1, 0, 1),
        ([3], 8, 2, 1, 0, 1, 0, 1),
    ):
        with pytest.raises(ValueError, match="pack_rows: a"):
            host.pack_rows(*problem)


@pytest.mark.parametrize("choice", ["native", "torch", ""])
def test_the_one_that_was_chosen_runs_and_is_counted(choice: str) -> None:
    code = """
import json
from megarl import ops
print(json.dumps([ops.pack_rows([3, 3, 2, 2, 2], row_tokens=6, dp=2), ops.call_counts()]))
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "MEGARL_OPS": choice},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    plan, counts = json.loads(run.stdout)
    assert plan == [[[[0, 1]], [[2, 3, 4]]], [6]]
    if choice:
        assert counts == {"pack_rows": {choice: 1}}
