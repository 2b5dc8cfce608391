"""Mean and variance of numbers that lie on several ranks, and whitening with them.

Parts (n, mean, M2 = sum of squared deviations) merge pairwise (Chan et al. 1979)::

    delta = mean_b - mean_a
    M2    = M2_a + M2_b + delta^2 n_a n_b / (n_a + n_b)

E[x^2] - E[x]^2 would cancel. Parts are merged in the order given, so the result depends on how the
batch is split at rounding level only. A row's own moments: `megarl.ops.masked_moments`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megarl import ops

EPS = 1e-8  # inside the square root


@dataclass(frozen=True)
class Moments:
    n: int
    mean: float
    m2: float

    @classmethod
    def of(cls, values: torch.Tensor, mask: torch.Tensor | None = None) -> "Moments":
        """Of f32 or f64 values of any shape, those where ``mask``."""
        counted = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        n, mean, m2 = ops.masked_moments(values.flatten(), counted.flatten()).tolist()
        return cls(int(n), mean, m2)

    @property
    def variance(self) -> float:
        """ddof 1; 0 for fewer than two numbers."""
        return self.m2 / (self.n - 1) if self.n > 1 else 0.0


def merge_moments(parts: Iterable[Moments]) -> Moments:
    total = Moments(0, 0.0, 0.0)
    for part in parts:
        n = total.n + part.n
        if part.n:
            delta = part.mean - total.mean
            mean = total.mean + delta * part.n / n
            m2 = total.m2 + part.m2 + delta**2 * total.n * part.n / n
            total = Moments(n, mean, m2)
    return total


def whiten(values: torch.Tensor, mask: torch.Tensor, moments: Moments) -> torch.Tensor:
    """f64: (x - mean) / sqrt(variance + 1e-8) where ``mask``, 0 elsewhere. With fewer than two
    numbers there is no variance, and x stays as it is.
    """
    if moments.n < 2:
        return torch.where(mask, values.double(), 0.0)
    return ops.whiten(values, mask, mean=moments.mean, variance=moments.variance, eps=EPS)
