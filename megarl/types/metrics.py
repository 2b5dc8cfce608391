"""Metrics: a value that knows how to reduce."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mean:
    """``total / count``, both summed over ranks and microbatches: never a mean of means."""

    total: float
    count: float


@dataclass(frozen=True)
class Sum:
    value: float


@dataclass(frozen=True)
class Max:
    value: float


@dataclass(frozen=True)
class Min:
    value: float


MetricValue = Mean | Sum | Max | Min


@dataclass(frozen=True)
class Metric:
    """A named value, e.g. ``Metric("policy/entropy", Mean(total=-713.2, count=1021))``."""

    name: str
    value: MetricValue


StepMetrics = list[Metric]
