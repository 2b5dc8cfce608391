"""Advantages from more than one reward a sample: of reasoning steps, or of reward components.

Host data, float64, in input order. Groups may be ragged and interleaved.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.algos.group_advantages import Outcomes, group_advantages
from megarl.config.algo import GdpoAdvantage, GrpoAdvantage, ProcessAdvantage
from megarl.ops import steps_to_go

Floats = NDArray[np.float64]


def process_advantages(
    section: ProcessAdvantage,
    step_rewards: Sequence[Sequence[float]],
    step_ends: Sequence[Sequence[int]],
    lengths: Sequence[int],
    groups: Sequence[int],
) -> list[Floats]:
    """f64 [L_i] a sample: A_t = sum of the normalised rewards of the steps that end at t or later.

    ``step_ends[i][j]``: index of the last token of step j; rewards are normalised with mean and
    standard deviation of all step rewards of the group. Tokens after the last step get 0, and so
    does a group whose step rewards are all equal. A reward that is not finite counts for nothing.
    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.3.
    """
    counts = [len(r) for r in step_rewards]
    owner = np.repeat(np.arange(len(step_rewards)), counts)
    flat = np.asarray([r for rewards in step_rewards for r in rewards], np.float64)
    ends = np.asarray([e for sample in step_ends for e in sample], np.int64)
    settings = GrpoAdvantage(ddof=section.ddof, eps=section.eps)
    normalised = group_advantages(settings, Outcomes.of(flat, np.asarray(groups)[owner]))
    values = steps_to_go(
        torch.from_numpy(normalised),
        torch.from_numpy(ends),
        torch.tensor([0, *counts]).cumsum(0),
        torch.tensor([0, *lengths]).cumsum(0),
        sum(lengths),
    )
    return [part.numpy() for part in values.split(list(lengths))]


def gdpo_advantages(
    section: GdpoAdvantage, components: Sequence[Sequence[float]], outcomes: Outcomes
) -> Floats:
    """f64 [N]: every component normalised in its group, summed by ``weights``, then normalised over
    the batch (ddof 1, eps beside the deviation).

    ``components[k][i]``: component k of sample i; a sample with one that is not finite counts for
    none. Source: GDPO, arXiv 2601.05242.
    """
    weights = section.weights or (1.0,) * len(components)
    settings = GrpoAdvantage(eps=section.eps)
    rewards = np.asarray(components, np.float64).reshape(len(components), len(outcomes.groups))
    valid = np.isfinite(rewards).all(0)
    total = np.zeros(len(outcomes.groups))
    for w, values in zip(weights, np.where(valid, rewards, np.nan), strict=True):
        total += w * group_advantages(settings, replace(outcomes, rewards=values))
    counted = total[valid & outcomes.first_of_trajectory()]
    if len(counted) < 2 or counted.max() == counted.min():
        return np.zeros(len(total))
    normalised = (total - counted.mean()) / (counted.std(ddof=1) + section.eps)
    return np.where(valid, normalised, 0.0)
