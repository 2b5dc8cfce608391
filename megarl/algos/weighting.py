"""What weighs the tokens of one optimizer step: corrections, then aggregation weights.

Both are of the whole step, whatever rank a row lies on; ``share`` brings the sums together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megarl.algos.advantages import Share
from megarl.algos.correction import Correction, corrected
from megarl.algos.normalize import token_weights
from megarl.algos.segments import Segments
from megarl.config.algo import AlgoSection
from megarl.types import PackedBatch


@dataclass(frozen=True)
class TokenWeights:
    """Of one row. ``aggregation`` f64 [T], 0 where nothing is trained."""

    aggregation: torch.Tensor
    correction: Correction | None


def weigh(
    algo: AlgoSection,
    rows: Sequence[PackedBatch],
    trained: Mapping[int, int],
    groups: Mapping[int, int],
    share: Share,
) -> list[TokenWeights]:
    """One a row, before they are rounded to what a row holds. Collective.

    ``trained``, ``groups``: trained tokens and prompt of every sample of the step, the same on
    every rank. With ``denominator_mask: kept``, tokens that the correction rejects have weight 0
    and are not counted.
    """
    found: list[Correction] | None = None
    keep = [row.mask for row in rows]
    if algo.correction is not None:
        found = corrected(algo.correction, rows, share)
        if algo.aggregation.counts_kept:
            keep = [c.keep for c in found]
            trained = _kept_counts(rows, keep, share)
    counted = [trained[i] for i in groups]
    weights = token_weights(algo.aggregation, counted, list(groups.values()))
    of_sample = dict(zip(groups, weights, strict=True))
    corrections = found if found is not None else [None] * len(rows)
    return [
        TokenWeights(torch.where(kept, row.spread(lambda i: of_sample[i]), 0.0), correction)
        for row, kept, correction in zip(rows, keep, corrections, strict=True)
    ]


def _kept_counts(
    rows: Sequence[PackedBatch], keep: Sequence[torch.Tensor], share: Share
) -> dict[int, int]:
    """Tokens of every sample that a correction kept, on whatever rank they lie."""
    local = []
    for row, kept in zip(rows, keep, strict=True):
        sums = Segments(row.cu_seqlens).sums(kept)[0].tolist()
        local += [[i, int(sums[k])] for k, i in enumerate(row.samples)]
    return dict(pair for rank in share(local) for pair in rank)
