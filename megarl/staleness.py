"""How old samples are when they are trained: in versions, from the weights that sampled a token to
those that train on it.
"""

from collections import Counter
from collections.abc import Sequence

from megarl.types import Known, Max, Mean, Metric, StepMetrics


def oldest_version(samples: Sequence[Known], default: int) -> int:
    """Of the weights that sampled any of their tokens; ``default`` where nobody said."""
    return min((span.version for s in samples for span in s.version_spans), default=default)


def staleness_metrics(samples: Sequence[Known], step: int) -> StepMetrics:
    """Of a step that trains the weights ``step - 1``. ``staleness/tokens_K``: the share of response
    tokens that are K versions old.
    """
    ages: Counter[int] = Counter()
    for sample in samples:
        for span in sample.version_spans:
            ages[step - 1 - span.version] += span.end - span.start
    tokens = sum(ages.values())
    if not tokens:
        return []
    total = sum(age * count for age, count in ages.items())
    metrics = [
        Metric("staleness/mean", Mean(total, tokens)),
        Metric("staleness/max", Max(max(age for age, count in ages.items() if count))),
    ]
    shares = [
        Metric(f"staleness/tokens_{age}", Mean(ages[age], tokens)) for age in range(max(ages) + 1)
    ]
    return metrics + shares
