"""Choosing tokens so that a request's draws depend on nothing but its seed and the position.

The uniform number for position p of a request with seed s is the p-th output of a SplitMix64
generator seeded with a mixed s: no state, so neither neighbours, nor completion order, nor a pause
in between can move it. Position is absolute (prompt tokens count), so a response continued as a
longer prompt draws on. Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
Generators", 2014 (constants).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_SEED_MARK = np.uint64(0x6D656761726C5F31)  # keeps seed 0 away from the fixed point of the mixer


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) with 52 bits, one for every pair."""
    with np.errstate(over="ignore"):
        state = _mix(seeds ^ _SEED_MARK) + (positions + np.uint64(1)) * _GAMMA
    return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


@dataclass(frozen=True)
class Truncation:
    """Of every row: sampled from are the ``top_ks`` likeliest tokens that are not behind ``top_ps``
    of the probability and have ``min_ps`` of the likeliest's. i64, f64, f64 [n]; V, 1 and 0 keep
    everything.
    """

    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor

    def keeps(self, probabilities: torch.Tensor) -> torch.Tensor:
        """bool [n, V]. Each limit looks at the whole distribution, as SGLang's torch sampler has
        it: none is renormalised by another. Of equally likely tokens the lower id comes first.
        """
        ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        ranks = torch.arange(ordered.shape[1], device=ordered.device)
        before = ordered.cumsum(dim=-1) - ordered
        kept = (ranks < self.top_ks[:, None]) & (ordered >= ordered[:, :1] * self.min_ps[:, None])
        kept &= (before <= self.top_ps[:, None]) | (self.top_ps[:, None] >= 1)
        return torch.empty_like(kept).scatter_(1, ids, kept)


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    draws: torch.Tensor,
    truncation: Truncation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row, and its log-prob.

    `logits` f32 [n, V]; `temperatures` f32 [n], 0 for greedy; `draws` f64 [n] in [0, 1). Returns
    tokens i64 [n] and log-probs f32 [n] of softmax(logits / t); of greedy rows at temperature 1.
    Those of truncated rows are of the whole distribution, too. All this is as SGLang reports them.
    """
    greedy = temperatures == 0
    scale = torch.where(greedy, torch.ones_like(temperatures), temperatures)
    logprobs = torch.log_softmax(logits / scale[:, None], dim=-1)
    # Inverse of the cumulative distribution, in f64: the first token whose sum exceeds the draw. A
    # draw has 52 bits, so draw * total stays below total, and no token of probability 0 is first.
    probabilities = logprobs.double().exp_()
    if truncation is not None:
        probabilities *= truncation.keeps(probabilities)
    cumulative = probabilities.cumsum_(dim=-1)
    target = draws[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    drawn = drawn.clamp_(
        max=logits.shape[1] - 1
    )  # only NaN rows get there; the caller looks for them
    tokens = torch.where(greedy, logits.argmax(dim=-1), drawn)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
