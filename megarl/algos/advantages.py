"""Advantages from the rewards of a step. Host data, float64, in input order.

R_i reward of sample i, mu and sigma (ddof 1) of its group of K finite rewards::

    grpo      (R_i - mu) / (sigma + 1e-6)        DeepSeekMath, arXiv 2402.03300
    dr_grpo    R_i - mu                          arXiv 2503.20783
    rloo      (R_i - mu) K / (K - 1)             arXiv 2402.14740

A group whose rewards are all equal, and a group of one, has advantage 0 exactly. A non-finite
reward takes its sample out of the group's statistics and has advantage 0.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
EPS = 1e-6


def _grpo(rewards: Floats) -> Floats:
    scale: float = rewards.std(ddof=1) + EPS
    return _dr_grpo(rewards) / scale


def _dr_grpo(rewards: Floats) -> Floats:
    mean: float = rewards.mean()
    return rewards - mean


def _rloo(rewards: Floats) -> Floats:
    return _dr_grpo(rewards) * (len(rewards) / (len(rewards) - 1))


ESTIMATORS: dict[str, Callable[[Floats], Floats]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
}


def group_advantages(estimator: str, rewards: Sequence[float], groups: Sequence[int]) -> Floats:
    """f64 [N]: one advantage a sample. ``groups``: any labels, groups may be ragged and
    interleaved.
    """
    values, labels = np.asarray(rewards, np.float64), np.asarray(groups)
    out = np.zeros(len(values))
    for label in np.unique(labels):
        members = np.flatnonzero((labels == label) & np.isfinite(values))
        group = values[members]
        if len(group) > 1 and group.max() > group.min():
            out[members] = ESTIMATORS[estimator](group)
    return out
