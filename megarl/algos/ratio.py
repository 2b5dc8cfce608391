"""Importance ratios of a packed row, and the per-sequence sums its objective needs.

token:     r_t = exp(clamp(d_t, -20, 20)), d = lp - lo; dr/dlp = r inside the clamp, 0 outside
sequence:  s_i = exp(clamp(mean_t d_t, -20, 20)) over the trained tokens (GSPO, arXiv 2507.18071 eq.
7); ds/dlp_t = s/n inside the clamp, 0 outside

The log-probs are subtracted before anything is summed: sums of log-probs lose what their difference
is about. Sums are float64.
"""

from dataclasses import dataclass

import torch

from megarl.algos.segments import Segments
from megarl.types import LossInputs

LOG_RATIO_LIMIT = 20.0


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def inside(log_ratio: torch.Tensor) -> torch.Tensor:
    """Where a clamped log-ratio still has a gradient."""
    return log_ratio.abs() <= LOG_RATIO_LIMIT


@dataclass(frozen=True)
class Row:
    """A row as its objective sees it: every field 0 at tokens that are not used.

    ``coef`` f64 [T] is the weight of a token's policy term, aggregation and corrections together;
    ``log_ratio`` [T] is d. Per sequence, f64 [S]: ``count`` used tokens, ``log_ratio_sum``, the
    sums of coef A over its positive and its negative advantages, of clamped d^2 and of |r - 1|.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    selected: torch.Tensor | None
    coef: torch.Tensor
    log_ratio: torch.Tensor
    count: torch.Tensor
    log_ratio_sum: torch.Tensor
    positive: torch.Tensor
    negative: torch.Tensor
    square_sum: torch.Tensor
    distance_sum: torch.Tensor
    mask: torch.Tensor
    segments: Segments

    @property
    def ratio(self) -> torch.Tensor:
        """[T]"""
        return clamped(self.log_ratio).exp()

    @property
    def mean_log_ratio(self) -> torch.Tensor:
        """f64 [S]; 0 for a sequence without tokens."""
        return self.log_ratio_sum / self.count.clamp(min=1)

    @property
    def sequence_ratio(self) -> torch.Tensor:
        """f64 [S]: s; 1 for a sequence without tokens."""
        return clamped(self.mean_log_ratio).exp()


def log_ratio(inputs: LossInputs) -> torch.Tensor:
    """[T], detached: lp - lo."""
    return inputs.logprobs.detach() - inputs.old_logprobs
