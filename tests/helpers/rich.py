"""A step's samples and log-probs in which every rule of the algorithm has something to act on.

Groups are ragged and interleaved: groups of one, of equal rewards, a trajectory of several samples,
a reward that is NaN, truncated and fully masked responses, holes in masks, step rewards on trained
and on masked tokens. Log-ratios to the old, the rollout's and the reference policy have both signs
and every size from 1e-5 to 30, by token and as means of whole sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.types import PackedBatch, Sample

Floats = NDArray[np.float32]
SIZES = 10.0 ** np.arange(-5, 1.5, 0.125)  # of means of whole sequences: less than a factor 2 apart


@dataclass(frozen=True)
class Numbers:
    """Of one sample, f32 [L] each, about its token t: what passes through the model would give."""

    old_logprobs: Floats
    logprobs: Floats
    old_entropy: Floats
    entropy: Floats
    new_values: Floats  # [L], of the state after token t


def rich_samples(*, seed: int = 0, components: int = 2, long: Sequence[int] = ()) -> list[Sample]:
    """Some 130 samples. ``long``: trained tokens of further ones, of a group of their own."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for group in range(32):
        size = [1, 5, 4, 6][group % 4]
        for index in range(size):
            trained = int(rng.integers(1, 13))
            samples.append(_sample(rng, group, index, trained, components))
    samples += [_sample(rng, 32, k, n, components) for k, n in enumerate(long)]
    _special(samples, components)
    return [samples[i] for i in rng.permutation(len(samples))]


def _sample(rng: Any, group: int, index: int, trained: int, components: int) -> Sample:
    prompt = int(rng.integers(1, 5))
    length = prompt + trained
    mask = np.arange(length) >= prompt
    if index % 3 == 1 and trained > 4:
        mask[prompt + 1 : prompt + 3] = False  # a tool's answer
    equal = group % 8 == 2
    rewards = np.full(components, 0.1) if equal else rng.integers(0, 5, components) / 4
    ends = prompt + np.sort(rng.choice(trained, min(3, trained), replace=False))
    old = -3 * rng.random(length)
    return Sample(
        prompt_id=f"p{group}",
        group=group,
        index=index,
        tokens=rng.integers(0, 24, length).astype(np.int32),
        mask=mask,
        rollout_logprobs=(old + _gaps(rng, length)).astype(np.float32),
        rewards=rewards.astype(np.float32),
        correct=bool(rewards.sum() > 1),
        truncated=index % 4 == 2,
        step_rewards=(rng.integers(-2, 3, len(ends)) / 2).astype(np.float32),
        step_ends=ends.astype(np.int32),
        values=rng.normal(size=length).astype(np.float32),
        ref_logprobs=(old + _gaps(rng, length)).astype(np.float32),
    )


def _special(samples: list[Sample], components: int) -> None:
    """A trajectory of two samples, a reward that is no number, and a response without a token."""
    first = next(k for k, s in enumerate(samples) if s.group == 1)
    changes: dict[int, dict[str, Any]] = {
        first: {"trajectory": 0},
        first + 1: {"trajectory": 0, "rewards": samples[first].rewards},
        first + 2: {"trajectory": 1},
    }
    third = next(k for k, s in enumerate(samples) if s.group == 3)
    changes[third] = {"rewards": np.full(components, np.nan, np.float32)}
    changes[third + 1] = {"mask": np.zeros_like(samples[third + 1].mask)}
    for k, change in changes.items():
        samples[k] = Sample(**{**vars(samples[k]), **change})


def _gaps(rng: Any, length: int) -> NDArray[np.float64]:
    """Log-ratios of one sequence: two thirds of them around a mean of their own, of some size."""
    if rng.random() < 2 / 3:
        mean = float(rng.choice([-1, 1]) * rng.choice(SIZES) * rng.uniform(0.8, 1.2))
        noise = rng.normal(size=length)
        return mean * (1 + 0.3 * (noise - noise.mean()))
    return np.asarray(rng.choice([-1, 1], length) * 10.0 ** rng.uniform(-4, 1.5, length))


def rich_numbers(samples: Sequence[Sample], *, seed: int, entropy: float = 1.0) -> list[Numbers]:
    """``entropy``: its mean, nats. The same for a sample wherever it lies in ``samples``."""
    found = []
    for sample in samples:
        rng = np.random.default_rng([seed, sample.group, sample.index])
        length = len(sample.tokens)
        old = sample.rollout_logprobs + _gaps(rng, length)
        values = sample.values if sample.values is not None else np.zeros(length)
        numbers = (
            old,
            old + _gaps(rng, length),
            2 * entropy * rng.random(length),
            2 * entropy * rng.random(length),
            values + rng.normal(size=length) * 10.0 ** rng.uniform(-3, 1),
        )
        found.append(Numbers(*(np.asarray(x, np.float32) for x in numbers)))
    return found


def set_passes(row: PackedBatch, numbers: Sequence[Numbers], *, recompute: bool) -> None:
    """What the passes before the update leave in a row: garbage where nothing is trained."""
    if recompute:
        row.old_logprobs = trained(row, [n.old_logprobs for n in numbers])
        row.old_entropy = trained(row, [n.old_entropy for n in numbers])


def trained(row: PackedBatch, values: Sequence[Floats]) -> torch.Tensor:
    """f32 [T] from arrays of samples, NaN where nothing is trained."""
    return torch.where(row.mask, row.spread(lambda i: values[i]), torch.nan).float()
