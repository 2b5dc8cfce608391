"""Per-rank metrics to one number a name, whatever the split.

1. Mean adds totals and counts and divides once: never a mean of means. Count 0 has no value and is
   left out. Sum adds, Max and Min compare; NaN anywhere in a Max or Min is NaN.
2. Additions are exact until the last rounding (``math.fsum``), so the number depends neither on the
   order of the ranks nor on how the data was split over them.
3. One name has one kind everywhere: a Mean here and a Sum there is a programming error.
Between ranks metrics travel as JSON (``encode``, ``decode``): data, never pickled objects.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megarl.types import Max, Mean, Metric, MetricValue, Min, StepMetrics, Sum

_KINDS: dict[str, type] = {"mean": Mean, "sum": Sum, "max": Max, "min": Min}


def reduce_metrics(parts: Sequence[StepMetrics]) -> dict[str, float]:
    """``parts[rank]`` -> name: number, sorted by name. Raises ValueError when kinds disagree.

    Example: clip fraction of one rank with 1 clipped of 1 token and of one with 0 of 99: 0.01.
    """
    merged = merge_metrics(parts)
    values = {m.name: value for m in merged if (value := scalar(m.value)) is not None}
    return dict(sorted(values.items()))


def derived(values: Mapping[str, float]) -> dict[str, float]:
    """What follows from reduced metrics and has no sum of its own."""
    return {
        name: formula(*(values[needed] for needed in names))
        for name, (names, formula) in _DERIVED.items()
        if all(values.get(needed) for needed in names)
    }


_DERIVED: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {
    "perf/tokens_per_s": (("perf/tokens", "time/step"), lambda tokens, s: tokens / s),
    # effective sample size, 1 where all ratios are equal
    "policy/ratio_ess": (("policy/ratio_mean", "policy/ratio_sq_mean"), lambda m, sq: m * m / sq),
}


def merge_metrics(parts: Iterable[StepMetrics]) -> StepMetrics:
    """One Metric a name, in order of first appearance, of the same kind as its parts."""
    by_name: dict[str, list[MetricValue]] = {}
    for part in parts:
        for metric in part:
            by_name.setdefault(metric.name, []).append(metric.value)
    return [Metric(name, _merge(name, values)) for name, values in by_name.items()]


def scalar(value: MetricValue) -> float | None:
    """The number a metric stands for; None for the mean of nothing."""
    if isinstance(value, Mean):
        return value.total / value.count if value.count else None
    return value.value


class MetricBag:
    """Collects metrics of one step on one rank, merging as it goes."""

    def __init__(self) -> None:
        self._metrics: StepMetrics = []

    def add(self, name: str, value: MetricValue) -> None:
        self._metrics.append(Metric(name, value))

    def extend(self, metrics: Iterable[Metric]) -> None:
        self._metrics += metrics

    def drain(self) -> StepMetrics:
        """What was collected since the last call, merged; the bag is empty afterwards."""
        collected, self._metrics = self._metrics, []
        return merge_metrics([collected])


def encode(metrics: StepMetrics) -> bytes:
    """For a gather between ranks: ``[["policy/entropy", "mean", -713.2, 1021.0], ...]``"""
    rows = [[m.name, _kind(m.value), *map(float, vars(m.value).values())] for m in metrics]
    return json.dumps(rows).encode()


def decode(data: bytes) -> StepMetrics:
    """The inverse of ``encode``, bit for bit. Raises ValueError on anything else."""
    return [_decode_row(row) for row in json.loads(data)]


def _decode_row(row: Any) -> Metric:
    match row:
        case [str(name), str(kind), *numbers] if kind in _KINDS:
            expected = 2 if kind == "mean" else 1
            if len(numbers) == expected and all(type(x) is float for x in numbers):
                return Metric(name, _KINDS[kind](*numbers))
    raise ValueError(f"not an encoded metric: {row!r}")


def _kind(value: MetricValue) -> str:
    return type(value).__name__.lower()


def _merge(name: str, values: Sequence[MetricValue]) -> MetricValue:
    kinds = sorted({_kind(v) for v in values})
    if len(kinds) > 1:
        raise ValueError(f"metric {name} is {' and '.join(kinds)}; one name has one kind")
    if kinds == ["mean"]:
        means = [v for v in values if isinstance(v, Mean)]
        return Mean(_sum([m.total for m in means]), _sum([m.count for m in means]))
    numbers = [v.value for v in values if not isinstance(v, Mean)]
    if kinds == ["sum"]:
        return Sum(_sum(numbers))
    pick, kind = (max, Max) if kinds == ["max"] else (min, Min)
    return kind(math.nan if any(map(math.isnan, numbers)) else pick(numbers))


def _sum(numbers: Sequence[float]) -> float:
    """``math.fsum``; where it refuses (inf - inf, overflow) plain addition has the answer."""
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):
        return float(sum(numbers))
