"""The critic's loss of a packed row, clipped, with its gradient in closed form.

::

    l = 1/2 max((v - R)^2, (v_c - R)^2),  v_c = clip(v, v_old - eps, v_old + eps)
    g = v - R where the first is at least as large, else 0

Aggregated as a token mean. Source: PPO2 (OpenAI baselines); docs/objectives.md, "Value loss".
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarl.algos.advantages import Share
from megarl.algos.moments import Moments, merge_moments
from megarl.config.algo import ValueSection
from megarl.types import Mean, Metric, PackedBatch, StepMetrics, Sum


@dataclass(frozen=True)
class ValueLoss:
    """``loss`` f64 with gradient in the values; ``clipped`` bool [T]."""

    loss: torch.Tensor
    clipped: torch.Tensor
    metrics: StepMetrics


def value_loss(
    section: ValueSection,
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
) -> ValueLoss:
    """The weighted sum over trained tokens; all [T]. ``weight`` carries the normalisation."""
    zero = torch.zeros((), dtype=values.dtype)
    v, old, target = (torch.where(mask, x, zero) for x in (values, old_values, returns))
    error = v - target
    clipped = torch.zeros_like(mask)
    limited = error.detach()
    if section.clip is not None:
        # not old + clip(v - old): rounding would move values that are inside
        limited = (v.clamp(old - section.clip, old + section.clip) - target).detach()
        clipped = mask & (limited**2 > error.detach() ** 2)
    per_token = 0.5 * torch.where(clipped, limited**2, error**2)
    loss = (torch.where(mask, weight, zero).double() * per_token.double()).sum()
    count = float(mask.sum())
    metrics = [
        Metric("value/loss", Sum(float(loss.detach()))),
        Metric("value/clipfrac", Mean(float(clipped.sum()), count)),
        Metric("value/error_sq", Mean(float((error.detach() ** 2).double().sum()), count)),
    ]
    return ValueLoss(loss, clipped, metrics)


def value_metrics(rows: Sequence[PackedBatch], share: Share) -> StepMetrics:
    """Of the values before the update, at trained tokens; final, the same on every rank. The
    explained variance is 1 - Var(R - v) / Var(R): 1 where values foretell the returns, 0 where they
    say as much as a constant. Collective.
    """
    pairs = [(row.returns[row.mask].double(), row.values[row.mask]) for row in rows]  # type: ignore[index]
    here = [[r for r, _ in pairs], [v for _, v in pairs], [r - v for r, v in pairs]]
    parts = [Moments.of(torch.cat(x)) if pairs else Moments(0, 0.0, 0.0) for x in here]
    everywhere = share([[p.n, p.mean, p.m2] for p in parts])
    returns, values, errors = (
        merge_moments(Moments(*rank[k]) for rank in everywhere) for k in range(3)
    )
    metrics = [
        Metric("value/mean", Mean(values.mean, min(values.n, 1))),
        Metric("value/return_mean", Mean(returns.mean, min(returns.n, 1))),
    ]
    if returns.m2 > 0:
        metrics.append(Metric("value/explained_variance", Mean(1 - errors.m2 / returns.m2, 1)))
    return metrics
