"""Groups that teach, and what is said of them."""

import logging
from collections.abc import Sequence

from megarl.algos.shaping import informative_groups
from megarl.types import Known, Max, Mean, Metric, Sample, StepMetrics

log = logging.getLogger(__name__)


def informative(samples: Sequence[Known]) -> dict[int, bool]:
    """By group label: whether it has right and wrong samples (``algos/shaping.py``)."""
    return informative_groups([float(s.correct) for s in samples], [s.group for s in samples])


def only_informative(samples: Sequence[Sample], step: int) -> tuple[list[Sample], StepMetrics]:
    """The informative groups of a recorded step; all groups where none is."""
    found = informative(samples)
    teaching = sum(found.values())
    metrics = filter_metrics(teaching, len(found), rounds=1)
    if not teaching:
        log.warning("step %d: no prompt of %d is informative; all are kept", step, len(found))
        return list(samples), metrics
    return [s for s in samples if found[s.group]], metrics


def filter_metrics(teaching: int, groups: int, rounds: int) -> StepMetrics:
    """Every rank reports the same; a mean and a maximum stay what they are."""
    share = Metric("filter/informative_share", Mean(teaching, groups))
    return [share, Metric("filter/rounds", Max(rounds))]
