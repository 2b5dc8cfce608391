"""Weights against the mismatch of trainer and rollout server: constants of the policy term.

With g = lo - lr of a token, rho = exp(clamp(g, -20, 20))::

    level     weight                            mode
    token     rho_t                             truncate: bring it into [low, high] (TIS)
    sequence  exp(clamp(sum_t g, -20, 20))      mask: drop it outside [low, high] (MIS, IcePop)
    geometric exp(clamp(mean_t g, -20, 20))

Then the filters drop tokens (k2) or sequences (geo, k3, veto), and ``batch_normalize`` divides by
the mean weight. Intervals are closed. A log-prob that is not finite makes its own token's weight
0 and changes no other's; the loss reports it. Sources: docs/objectives.md, "Corrections".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megarl.algos.advantages import Share
from megarl.algos.kl import k3
from megarl.algos.ratio import clamped
from megarl.algos.segments import Segments
from megarl.config.algo import CorrectionSection
from megarl.types import PackedBatch


@dataclass(frozen=True)
class Correction:
    """``weight`` f64 [T], 0 where masked or dropped; ``keep`` bool [T]; of every sequence f64 [S]
    ``log_ratio_sum`` and ``count`` of its trained, finite tokens.
    """

    weight: torch.Tensor
    keep: torch.Tensor
    log_ratio_sum: torch.Tensor
    count: torch.Tensor

    @property
    def geometric_ratio(self) -> torch.Tensor:
        """f64 [S]; 1 for a sequence without trained tokens."""
        return clamped(self.log_ratio_sum / self.count.clamp(min=1)).exp()


def corrected(
    section: CorrectionSection, rows: Sequence[PackedBatch], share: Share
) -> list[Correction]:
    """Of all rows of one optimizer step, with ``batch_normalize`` over all ranks. Collective."""
    found = []
    for row in rows:
        assert row.old_logprobs is not None, "the old log-prob pass: checked by validate()"
        found.append(
            rollout_correction(
                section,
                row.old_logprobs,
                row.rollout_logprobs,
                row.mask,
                Segments(row.cu_seqlens),
            )
        )
    if not section.batch_normalize:
        return found
    sums = [
        weight_sums(section, c, Segments(row.cu_seqlens))
        for row, c in zip(rows, found, strict=True)
    ]
    everywhere = [pair for rank in share(sums) for pair in rank]
    total, count = (math.fsum(p[k] for p in everywhere) for k in (0, 1))
    return [replace(c, weight=normalised(c.weight, total, count)) for c in found]


def rollout_correction(
    section: CorrectionSection,
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    segments: Segments,
) -> Correction:
    """Weights of one row, [T] each, of whole sequences; ``normalised`` comes after all rows.

    A token with a number that is not finite counts for nothing here; the objective drops it.
    """
    mask = mask & torch.isfinite(old_logprobs) & torch.isfinite(rollout_logprobs)
    g = torch.where(mask, old_logprobs - rollout_logprobs, 0.0)
    rho = clamped(g.double()).exp()
    vetoed = torch.zeros_like(mask) if section.veto is None else mask & (rho < section.veto)
    spread = torch.where(mask, k3(clamped(g.double())), 0.0)
    total, count, vetoes, spread_sum = segments.sums(g, mask, vetoed, spread)
    n = count.clamp(min=1)
    geometric = clamped(total / n).exp()
    weight, keep = torch.ones_like(rho), mask.clone()
    if section.level is not None:
        raw = {
            "token": lambda: rho,
            "sequence": lambda: segments.expand(clamped(total).exp()),
            "geometric": lambda: segments.expand(geometric),
        }[section.level]()
        low, high = section.low or 0.0, section.high or float("inf")
        weight = raw.clamp(low, high)
        if section.mode == "mask":
            weight, keep = raw, keep & (raw >= low) & (raw <= high)
    good = vetoes == 0
    if section.geo_filter is not None:
        low, high = section.geo_filter
        good = good & (geometric >= low) & (geometric <= high)
    if section.k3_filter is not None:
        good = good & (spread_sum / n <= section.k3_filter)
    if section.k2_filter is not None:
        keep = keep & (g.double() ** 2 / 2 <= section.k2_filter)
    keep = keep & segments.expand(good)
    return Correction(torch.where(keep, weight, 0.0), keep, total, count)


def weight_sums(
    section: CorrectionSection, found: Correction, segments: Segments
) -> tuple[float, float]:
    """(sum of weights, how many) that ``batch_normalize`` divides: of trained tokens at token
    level, else of sequences with trained tokens. They add up over rows and ranks.
    """
    if section.level in (None, "token"):
        return float(found.weight.sum()), float(found.count.sum())
    # A sequence's weight is that of each of its tokens, 0 where it is dropped.
    there = found.count > 0
    mean = segments.sums(found.weight)[0] / found.count.clamp(min=1)
    return float(mean[there].sum()), float(there.sum())


def normalised(weight: torch.Tensor, total: float, count: float) -> torch.Tensor:
    """``weight`` over the mean weight ``total / count``; as it is where all weights are 0."""
    return weight if total == 0 else weight * (count / total)
