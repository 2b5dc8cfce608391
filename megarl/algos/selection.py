"""Tokens that an objective treats differently, chosen before the step from the old policy's pass.

KL-Cov: of all n trained tokens of the optimizer step the max(1, floor(ratio n)) with the highest
covariance cov_t = (A_t - mean A)(lp_t - mean lp). Ties go to the earlier token in the step's order
(sample, position), so the choice does not depend on the split.
ASPO: the tokens at or above a quantile of their own sequence's entropy.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from megarl.algos.advantages import Share
from megarl.config.policies import AspoPolicy, KlCovPolicy
from megarl.types import PackedBatch

Candidate = tuple[float, int, int]  # -covariance, sample, position in its row's segment: best first


def select_by_covariance(policy: KlCovPolicy, rows: Sequence[PackedBatch], share: Share) -> None:
    """KL-Cov's ``selected`` of one optimizer step's rows. Collective: every rank shares its best
    candidates.
    """
    count, mean_a, mean_lp = means_of_step(rows, share)
    wanted = num_selected(policy.ratio, count)
    best = heapq.nsmallest(
        wanted, (c for row in rows for c in _candidates(row, mean_a, mean_lp, wanted))
    )
    chosen = heapq.nsmallest(wanted, (tuple(c) for rank in share(best) for c in rank))
    for row in rows:
        row.selected = torch.zeros_like(row.mask)
        starts = {i: start for i, start, _ in row.segments()}
        for _, sample, position in chosen:
            if sample in starts:
                row.selected[starts[sample] + position] = True


def means_of_step(rows: Sequence[PackedBatch], share: Share) -> tuple[int, float, float]:
    """(trained tokens, mean advantage, mean log-prob) of one optimizer step. Collective."""
    tokens = [(row.advantages[used], _old(row)[used]) for row in rows for used in [_finite(row)]]
    sums = [[len(a), float(a.double().sum()), float(lp.double().sum())] for a, lp in tokens]
    parts = [part for rank in share(sums) for part in rank]
    count = sum(p[0] for p in parts)
    mean_a, mean_lp = (math.fsum(p[k] for p in parts) / max(1, count) for k in (1, 2))
    return count, mean_a, mean_lp


def covariance(
    advantages: torch.Tensor, logprobs: torch.Tensor, mean_advantage: float, mean_logprob: float
) -> torch.Tensor:
    """f64 [T]"""
    return (advantages.double() - mean_advantage) * (logprobs.double() - mean_logprob)


def num_selected(ratio: float, tokens: int) -> int:
    return min(tokens, max(1, int(ratio * tokens)))


def _candidates(
    row: PackedBatch, mean_advantage: float, mean_logprob: float, wanted: int
) -> list[Candidate]:
    """The row's best; equal ones in the row's order, which is by sample."""
    cov = covariance(row.advantages, _old(row), mean_advantage, mean_logprob)
    there = _finite(row).nonzero().squeeze(1)
    order = there[torch.sort(-cov[there], stable=True).indices[:wanted]].tolist()
    bounds = list(row.segments())
    found = []
    for at in order:
        sample, start, _ = next(b for b in bounds if b[1] <= at < b[1] + b[2])
        found.append((-float(cov[at]), sample, at - start))
    return found


def select_by_entropy(policy: AspoPolicy, rows: Sequence[PackedBatch], share: Share) -> None:
    """ASPO's ``selected``, where it has a quantile."""
    if policy.entropy_quantile is None:
        return
    for row in rows:
        assert row.old_entropy is not None, "the old log-prob pass: checked by validate()"
        row.selected = high_entropy(
            row.old_entropy, row.mask, row.cu_seqlens, policy.entropy_quantile
        )


def high_entropy(
    entropy: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor, quantile: float
) -> torch.Tensor:
    """bool [T]: trained tokens at or above their sequence's ``quantile`` (linear interpolation)."""
    out = torch.zeros_like(mask)
    for start, end in pairwise(cu_seqlens.tolist()):
        here = mask[start:end]
        values = entropy[start:end].double()
        if here.any():
            out[start:end] = here & (values >= torch.quantile(values[here], quantile))
    return out


def _finite(row: PackedBatch) -> torch.Tensor:
    """Trained tokens that have a covariance: one NaN must not decide about all others."""
    return row.mask & torch.isfinite(_old(row)) & torch.isfinite(row.advantages)


def _old(row: PackedBatch) -> torch.Tensor:
    assert row.old_logprobs is not None, "the old log-prob pass: checked by validate()"
    return row.old_logprobs


SELECTIONS: dict[str, Callable[[Any, Sequence[PackedBatch], Share], None]] = {
    "kl_cov": select_by_covariance,
    "aspo": select_by_entropy,
}
