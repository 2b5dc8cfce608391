"""Importance ratios of a packed row, and the per-sequence sums its objective needs.

token:     r_t = exp(clamp(d_t, -20, 20)), d = lp - lo; dr/dlp = r inside the clamp, 0 outside
sequence:  s_i = exp(clamp(mean_t d_t, -20, 20)) over the trained tokens (GSPO, arXiv 2507.18071 eq.
7); ds/dlp_t = s/n inside the clamp, 0 outside

The log-probs are subtracted before anything is summed: sums of log-probs lose what their difference
is about. Sums are float64.
"""

from dataclasses import dataclass, replace

import torch

from megarl.algos.segments import Segments
from megarl.config.algo import OpsmSection
from megarl.types import LossInputs

LOG_RATIO_LIMIT = 20.0


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def inside(log_ratio: torch.Tensor) -> torch.Tensor:
    """Where a clamped log-ratio still has a gradient."""
    return log_ratio.abs() <= LOG_RATIO_LIMIT


@dataclass(frozen=True)
class SequenceSums:
    """f64 [S]: sums over the used tokens of every whole sequence. ``dropped``: trained tokens that
    are not finite; ``positive``, ``negative``: coef A by its sign; ``gap``: what OPSM compares;
    ``square``, ``distance``: clamped d^2 and |r - 1|, which are reported only.
    """

    count: torch.Tensor
    log_ratio: torch.Tensor
    positive: torch.Tensor
    negative: torch.Tensor
    dropped: torch.Tensor
    gap: torch.Tensor
    advantage: torch.Tensor
    square: torch.Tensor
    distance: torch.Tensor

    @property
    def mean_log_ratio(self) -> torch.Tensor:
        """f64 [S]; 0 for a sequence without tokens."""
        return self.log_ratio / self.count.clamp(min=1)

    def kept(self, opsm: OpsmSection | None) -> torch.Tensor:
        """bool [S]: sequences that are not switched off as off-policy."""
        if opsm is None:
            return torch.ones_like(self.count, dtype=torch.bool)
        lost = -self.gap / self.count.clamp(min=1)
        return ~((self.advantage < 0) & (lost > opsm.delta))

    def alive(self, whole_sequences: bool) -> torch.Tensor:
        """bool [S]: sequences that no dropped token spoils."""
        return self.dropped == 0 if whole_sequences else torch.ones_like(self.dropped) > 0

    def counted(self, alive: torch.Tensor, kept: torch.Tensor) -> "SequenceSums":
        """As the objective uses them: 0 for sequences that are spoilt, and what pulls 0 for those
        that are switched off.
        """
        there = {name: torch.where(alive, getattr(self, name), 0.0) for name in _OF_TOKENS}
        pulls = {n: torch.where(alive & kept, getattr(self, n), 0.0) for n in _PULLS}
        return replace(self, **there, **pulls)


_PULLS = ("positive", "negative")
_OF_TOKENS = ("count", "log_ratio", "square", "distance")


@dataclass(frozen=True)
class Row:
    """A row as its objective sees it: every field 0 at tokens that are not used.

    ``coef`` f64 [T] is the weight of a token's policy term, aggregation and corrections together;
    ``log_ratio`` [T] is d.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    selected: torch.Tensor | None
    coef: torch.Tensor
    log_ratio: torch.Tensor
    sums: SequenceSums
    mask: torch.Tensor
    segments: Segments

    @property
    def ratio(self) -> torch.Tensor:
        """[T]"""
        return clamped(self.log_ratio).exp()


def log_ratio(inputs: LossInputs) -> torch.Tensor:
    """[T], detached: lp - lo."""
    return inputs.logprobs.detach() - inputs.old_logprobs
