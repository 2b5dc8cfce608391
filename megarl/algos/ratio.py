"""Importance ratios from log-probs.

token:     r_t = exp(clamp(d_t, -20, 20)), d = lp - lo; gradient 0 outside the clamp
sequence:  s_i = exp(clamp(mean_t d_t, -20, 20)) over the trained tokens (GSPO, arXiv 2507.18071 eq.
7)

``inputs`` are 0 at masked positions (``objective.py`` sees to it): their ratio is 1.
"""

import torch

from megarl.algos.segments import Segments
from megarl.types import LossInputs

LOG_RATIO_LIMIT = 20.0


def token_log_ratio(inputs: LossInputs) -> torch.Tensor:
    """f32 [T]: lp - lo."""
    return inputs.logprobs - inputs.old_logprobs


def token_ratio(inputs: LossInputs) -> torch.Tensor:
    """f32 [T]: exp of the clamped log-ratio; 1 where masked."""
    return token_log_ratio(inputs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_log_ratio(inputs: LossInputs, segments: Segments) -> torch.Tensor:
    """f64 [S]: the mean log-ratio of every sequence's trained tokens; 0 for a sequence without any.

    Collective over the context-parallel ranks.
    """
    count = segments.sum(inputs.mask.float())
    return segments.sum(token_log_ratio(inputs)) / count.clamp(min=1)
