"""Reduction of metrics: the number does not depend on how the data was split."""

import itertools
import math
import random

import pytest

from megarl.monitor.metrics import MetricBag, decode, encode, merge_metrics, reduce_metrics
from megarl.monitor.timing import PhaseTimer
from megarl.types import Max, Mean, Metric, Min, StepMetrics, Sum


def measure(values: list[float]) -> StepMetrics:
    """What one part of a batch reports."""
    metrics = [Metric("mean", Mean(sum(values), len(values))), Metric("sum", Sum(sum(values)))]
    if values:
        metrics += [Metric("max", Max(max(values))), Metric("min", Min(min(values)))]
    return metrics


@pytest.mark.parametrize("parts", [1, 2, 5, 40])
def test_the_number_does_not_depend_on_the_split(parts: int) -> None:
    generator = random.Random(0)
    values = [generator.randrange(-1000, 1000) / 8 for _ in range(30)]  # sums are exact in binary
    cuts = sorted(generator.randrange(31) for _ in range(parts - 1))
    bounds = [0, *cuts, 30]
    split = [measure(values[a:b]) for a, b in itertools.pairwise(bounds)]
    generator.shuffle(split)
    assert reduce_metrics(split) == {
        **{"max": max(values), "mean": sum(values) / 30, "min": min(values), "sum": sum(values)}
    }


def test_a_mean_is_weighted_by_its_counts_and_never_a_mean_of_means() -> None:
    one, many = [Metric("clip", Mean(1.0, 1))], [Metric("clip", Mean(0.0, 99))]
    assert reduce_metrics([one, many]) == {"clip": 0.01}


def test_adding_does_not_depend_on_the_order_of_the_ranks() -> None:
    values = [1e16, 1.0, -1e16, 1.0]
    orders = ([0, 1, 2, 3], [0, 2, 1, 3], [1, 3, 0, 2])
    sums = {reduce_metrics([[Metric("x", Sum(values[i]))] for i in o])["x"] for o in orders}
    assert sums == {2.0}


def test_the_mean_of_nothing_is_left_out_rather_than_zero() -> None:
    empty = [Metric("eval", Mean(0.0, 0))]
    assert reduce_metrics([empty, empty]) == {}
    assert reduce_metrics([empty, [Metric("eval", Mean(3.0, 4))]]) == {"eval": 0.75}
    assert reduce_metrics([]) == reduce_metrics([[], []]) == {}


def test_ranks_may_report_different_names() -> None:
    assert reduce_metrics([[Metric("a", Sum(1))], [Metric("b", Max(2))]]) == {"a": 1, "b": 2}


@pytest.mark.parametrize("other", [Sum(1), Max(1), Min(1)])
def test_one_name_with_two_kinds_is_an_error_that_names_both(other: Sum | Max | Min) -> None:
    with pytest.raises(ValueError, match=r"metric x is (max|mean|min|sum) and (max|mean|min|sum)"):
        reduce_metrics([[Metric("x", Mean(1, 1))], [Metric("x", other)]])


@pytest.mark.parametrize("kind", [Sum, Max, Min])
@pytest.mark.parametrize("order", [[math.nan, 1.0], [1.0, math.nan]])
def test_nan_is_not_lost(kind: type, order: list[float]) -> None:
    assert math.isnan(reduce_metrics([[Metric("x", kind(v))] for v in order])["x"])


def test_infinities_do_not_stop_the_run() -> None:
    both = [[Metric("x", Mean(math.inf, 1))], [Metric("x", Mean(-math.inf, 1))]]
    assert math.isnan(reduce_metrics(both)["x"])
    assert reduce_metrics([[Metric("x", Sum(1e308))]] * 2) == {"x": math.inf}


def test_merging_first_changes_nothing() -> None:
    parts = [measure([1.0, 2.5]), measure([4.0]), measure([])]
    merged = merge_metrics([merge_metrics(parts[:2]), parts[2]])
    assert reduce_metrics([merged]) == reduce_metrics(parts)
    assert [m.name for m in merged] == ["mean", "sum", "max", "min"]


def test_a_bag_merges_and_is_empty_after_draining() -> None:
    bag = MetricBag()
    bag.add("a", Mean(1, 1))
    bag.extend([Metric("a", Mean(0, 3)), Metric("b", Max(7))])
    assert bag.drain() == [Metric("a", Mean(1, 4)), Metric("b", Max(7))]
    assert bag.drain() == []


def test_metrics_survive_the_wire_bit_for_bit() -> None:
    metrics = [
        Metric("a/b", Mean(0.1 + 0.2, 3)),
        Metric("ü", Sum(1e-320)),
        Metric("m", Max(math.inf)),
        Metric("n", Min(-0.0)),
    ]
    assert decode(encode(metrics)) == metrics
    assert math.copysign(1, decode(encode(metrics))[3].value.value) == -1
    (nan,) = decode(encode([Metric("x", Max(math.nan))]))
    assert math.isnan(nan.value.value)


@pytest.mark.parametrize(
    "data",
    [b"x", b'[["a","mean",1.0]]', b'[["a","sum",1.0,2.0]]', b'[["a","mode",1.0]]', b"[1]",
     b'[["a","sum","1"]]', b'[[1,"sum",1.0]]', b"\x80\x04K\x01."],
)  # fmt: skip
def test_anything_else_on_the_wire_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)


def test_phases_add_up_within_a_step_and_start_over_after_it() -> None:
    now = 0.0

    def clock() -> float:
        return now

    timer = PhaseTimer(clock)
    with timer("step"):
        for seconds in (1.0, 2.0):
            with timer("rollout"):
                now += seconds
        with pytest.raises(RuntimeError), timer("train"):
            now += 4.0
            raise RuntimeError
    other = [Metric("time/rollout", Mean(5.0, 1.0)), Metric("time_max/rollout", Max(5.0))]
    assert reduce_metrics([timer.drain(), other]) == {
        **{"time/rollout": 4.0, "time_max/rollout": 5.0},  # ranks with 3 and 5 seconds
        **{"time/train": 4.0, "time_max/train": 4.0, "time/step": 7.0, "time_max/step": 7.0},
    }
    assert timer.drain() == []
