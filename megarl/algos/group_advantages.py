"""Advantages from the rewards of a prompt's samples. Host data, float64, in input order.

R_i reward of sample i, mu and sigma of its group of K finite rewards, l_i response length::

    grpo      (R_i - mu) / (sigma + eps)             DeepSeekMath, arXiv 2402.03300
      scale=batch: sigma of all raw rewards          Lite-PPO, arXiv 2508.08221
    dr_grpo    R_i - mu                              arXiv 2503.20783
    rloo      (R_i - mu) K / (K - 1)                 arXiv 2402.14740
    grpo_loo  (R_i - mu_-i) / (sigma_-i + eps)       the others' mean and sigma; sigma_-i = 0: / 1
    opo        R_i - sum_j l_j R_j / sum_j l_j       arXiv 2505.23585
    gpg       (R_i - mu) alpha / f_norm              arXiv 2504.02546; alpha: samples over samples
                                                     in groups that are not all equal

1. A group whose rewards are all equal has advantage 0 exactly; so has a group of one, unless
   ``singleton`` says otherwise.
2. A non-finite reward takes its sample out of the statistics; its advantage is 0.
3. Samples of one trajectory share its reward and count once, with the length of all of them
   together; it is truncated where one of them is.
4. Groups may be ragged and interleaved.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from megarl.config.algo import (
    DrGrpoAdvantage,
    GpgAdvantage,
    GroupAdvantage,
    GrpoAdvantage,
    GrpoLooAdvantage,
    OpoAdvantage,
    RlooAdvantage,
)
from megarl.errors import DataError
from megarl.ops import group_moments

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Outcomes:
    """What is known of a step's N samples when they are scored."""

    rewards: Floats  # [N]
    groups: NDArray[np.int64]  # [N]
    lengths: NDArray[np.int64]  # [N] tokens that were sampled, trained or not
    truncated: Bools  # [N]
    trajectories: NDArray[np.int64] | None = None  # [N]; None: every sample is one of its own

    @classmethod
    def of(
        cls,
        rewards: ArrayLike,
        groups: ArrayLike,
        lengths: ArrayLike | None = None,
        truncated: ArrayLike | None = None,
        trajectories: ArrayLike | None = None,
    ) -> "Outcomes":
        values = np.asarray(rewards, np.float64)
        count = len(values)
        return cls(
            values,
            np.asarray(groups, np.int64),
            np.asarray([1] * count if lengths is None else lengths, np.int64),
            np.asarray([False] * count if truncated is None else truncated, np.bool_),
            None if trajectories is None else np.asarray(trajectories, np.int64),
        )

    @property
    def valid(self) -> Bools:
        return np.isfinite(self.rewards)

    def members(self, counted: Bools) -> Iterator[NDArray[np.int64]]:
        """Of every group the indices of its counted samples, one for each trajectory."""
        once = np.flatnonzero(counted & self.first_of_trajectory())
        ordered = once[np.argsort(self.groups[once], kind="stable")]
        labels = np.unique(self.groups)
        if len(labels):
            yield from np.split(ordered, np.searchsorted(self.groups[ordered], labels[1:]))

    def of_trajectories(self) -> "Outcomes":
        """Every sample with the length and the truncation of its whole trajectory."""
        if self.trajectories is None:
            return self
        _, which = np.unique(
            np.stack([self.groups, self.trajectories]), axis=1, return_inverse=True
        )
        which = which.ravel()
        lengths = np.bincount(which, weights=self.lengths)[which]
        truncated = np.bincount(which, weights=self.truncated)[which] > 0
        return replace(self, lengths=lengths.astype(np.int64), truncated=truncated)

    def first_of_trajectory(self) -> Bools:
        """The one sample of every trajectory that counts."""
        first = np.ones(len(self.groups), np.bool_)
        if self.trajectories is not None:
            _, where = np.unique(
                np.stack([self.groups, self.trajectories]), axis=1, return_index=True
            )
            first[:] = False
            first[where] = True
        return first

    def spread_over_trajectories(self, values: Floats) -> Floats:
        """Every sample gets the value of its trajectory's first one. Raises DataError where their
        rewards disagree.
        """
        if self.trajectories is None:
            return values
        out = values.copy()
        seen: dict[tuple[int, int], int] = {}
        for i, key in enumerate(zip(self.groups.tolist(), self.trajectories.tolist(), strict=True)):
            first = seen.setdefault(key, i)
            a, b = self.rewards[first], self.rewards[i]
            if a != b and not (np.isnan(a) and np.isnan(b)):
                raise DataError(
                    f"samples {first} and {i} are of one trajectory ({key[1]} of group {key[0]}) "
                    f"with rewards {a} and {b}; accepted: one reward a trajectory"
                )
            out[i] = values[first]
        return out


def group_advantages(section: GroupAdvantage, outcomes: Outcomes) -> Floats:
    """f64 [N]: one advantage a sample. ``section``: one of the group estimators of
    ``config/algo.py``.
    """
    outcomes = outcomes.of_trajectories()
    counted, silenced = outcomes.valid, ~outcomes.valid
    if section.truncated_variant is not None:
        silenced = silenced | outcomes.truncated
    if section.truncated_variant == "exclude":
        counted = counted & ~outcomes.truncated
    once = counted & outcomes.first_of_trajectory()
    compared, alone, batch = _compared(outcomes, once)
    estimator = GROUP_ESTIMATORS[section.name]
    out = np.zeros(len(outcomes.rewards))
    out[compared.samples] = estimator.compute(section, compared, batch)
    if section.singleton == "raw":
        out[alone] = estimator.singleton(section, outcomes.rewards[alone], batch)
    out = outcomes.spread_over_trajectories(out)
    return np.where(silenced, 0.0, out)


@dataclass(frozen=True)
class _Batch:
    """What estimators use of the whole batch."""

    rewards: Floats  # the counted ones
    informative: int  # of them, samples in groups that are not all equal


@dataclass(frozen=True)
class _Compared:
    """The K counted samples of groups that are not all equal, and the moments of their groups."""

    samples: NDArray[np.int64]  # [K] indices of the batch, ascending
    rewards: Floats  # [K]
    lengths: NDArray[np.int64]  # [K]
    group: NDArray[np.int64]  # [K] from 0 on
    size: Floats  # [K] of the sample's group, and so below
    mean: Floats
    m2: Floats

    @property
    def centred(self) -> Floats:
        return self.rewards - self.mean

    def std(self, ddof: int) -> Floats:
        return np.sqrt(self.m2 / (self.size - ddof))

    def sums(self, values: Floats) -> Floats:
        """Of every sample its group's sum."""
        return np.asarray(np.bincount(self.group, weights=values)[self.group], np.float64)


def _compared(outcomes: Outcomes, once: Bools) -> tuple[_Compared, NDArray[np.int64], _Batch]:
    """What is compared, the samples that are alone in their groups, and the batch. ``once``: the
    samples that count.
    """
    labels, group = np.unique(outcomes.groups, return_inverse=True)
    moments = group_moments(
        torch.tensor(outcomes.rewards), torch.tensor(group), torch.tensor(once), len(labels)
    )
    size, mean, m2, low, high = moments.numpy()[:, group]
    # not M2 == 0: the mean of seven times 0.1 is not 0.1
    several = np.flatnonzero(once & (size > 1) & (low < high))
    compared = _Compared(
        several,
        outcomes.rewards[several],
        outcomes.lengths[several],
        group[several],
        size[several],
        mean[several],
        m2[several],
    )
    alone = np.flatnonzero(once & (size == 1))
    return compared, alone, _Batch(outcomes.rewards[once], len(several))


def _std(rewards: Floats, ddof: int) -> float:
    return float(rewards.std(ddof=ddof)) if len(rewards) > ddof else 0.0


def _grpo(section: GrpoAdvantage, of: _Compared, batch: _Batch) -> Floats:
    if section.scale == "none":
        return of.centred
    of_batch = np.asarray(_std(batch.rewards, section.ddof))
    deviation: Floats = {"group": of.std(section.ddof), "batch": of_batch}[section.scale]
    return np.asarray(of.centred / (deviation + section.eps), np.float64)


def _dr_grpo(section: DrGrpoAdvantage, of: _Compared, batch: _Batch) -> Floats:
    return of.centred


def _rloo(section: RlooAdvantage, of: _Compared, batch: _Batch) -> Floats:
    return of.centred * (of.size / (of.size - 1))


def _grpo_loo(section: GrpoLooAdvantage, of: _Compared, batch: _Batch) -> Floats:
    """Sample by sample: from the group's own moments the others' would cancel."""
    out = np.empty_like(of.rewards)
    order = np.argsort(of.group, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(of.group[order])) + 1):
        rewards = of.rewards[members]
        for k, i in enumerate(members):
            others = np.delete(rewards, k)
            spread = len(others) > section.ddof and others.max() > others.min()
            scale = _std(others, section.ddof) + section.eps if spread else 1.0
            out[i] = (rewards[k] - others.mean()) / scale
    return out


def _opo(section: OpoAdvantage, of: _Compared, batch: _Batch) -> Floats:
    total = of.sums(of.lengths.astype(np.float64))
    said = total > 0  # else nothing of this group is trained, and the plain mean takes its place
    weighted = of.sums(of.lengths * of.rewards) / np.where(said, total, 1.0)
    return np.where(said, of.rewards - weighted, of.centred)


def _gpg(section: GpgAdvantage, of: _Compared, batch: _Batch) -> Floats:
    scale: float = len(batch.rewards) / max(1, batch.informative) / section.f_norm
    return of.centred * scale


def _raw(section: GroupAdvantage, rewards: Floats, batch: _Batch) -> Floats:
    return rewards


def _raw_scaled(section: GrpoAdvantage, rewards: Floats, batch: _Batch) -> Floats:
    """Mean 0 and standard deviation 1 for a group that has none."""
    scale = {"group": 1.0, "batch": _std(batch.rewards, section.ddof)}.get(section.scale)
    return rewards if scale is None else rewards / (scale + section.eps)


@dataclass(frozen=True)
class _Estimator:
    compute: Callable[[Any, _Compared, _Batch], Floats]
    singleton: Callable[[Any, Floats, _Batch], Floats] = _raw


GROUP_ESTIMATORS: dict[str, _Estimator] = {
    "grpo": _Estimator(_grpo, _raw_scaled),
    "dr_grpo": _Estimator(_dr_grpo),
    "rloo": _Estimator(_rloo),
    "grpo_loo": _Estimator(_grpo_loo),
    "opo": _Estimator(_opo),
    "gpg": _Estimator(_gpg),
}
