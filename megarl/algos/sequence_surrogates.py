"""Policy objectives of whole sequences: the ratio is one number a sequence.

With P and Q the sums of coef A over the sequence's positive and negative advantages, n its trained
tokens and z the mean log-ratio, s = exp(z), the gradients are closed forms of per-sequence sums::

    gspo        L_i = -(P min(s, 1 + eps_high) + Q max(s, 1 - eps_low))
                dL/dlp_t = -(s/n) (P 1[s <= 1 + eps_high] + Q 1[s >= 1 - eps_low])
    gspo_token  the same values; dL/dlp_t = -coef_t A_t s 1[active_t]
    gmpo        L_i = -(P + Q) s, s = exp(mean of the token log-ratios, each clipped)
                dL/dlp_t = -(s/n) (P + Q) 1[d_t not clipped]

s is clamped at exp(+-20), where its gradient ends. Source: docs/objectives.md, "GSPO gradient".
"""

import math

import torch

from megarl.algos.ratio import Row, SequenceSums, clamped, inside
from megarl.algos.surrogates import TokenLoss
from megarl.config.policies import GmpoPolicy, GspoPolicy, GspoTokenPolicy


def gspo(row: Row, policy: GspoPolicy) -> TokenLoss:
    """l = -A min(s, 1 + eps_high) for A > 0, -A max(s, 1 - eps_low) for A < 0.

    Source: GSPO, arXiv 2507.18071 eq. 5.
    """
    loss, flags, low_ok, high_ok = _clipped(row, policy)
    sums, z = row.sums, row.sums.mean_log_ratio
    pull = torch.where(high_ok, sums.positive, 0.0) + torch.where(low_ok, sums.negative, 0.0)
    grad_S = torch.where(inside(z), -clamped(z).exp() * pull / sums.count.clamp(min=1), 0.0)
    grad = torch.where(row.mask, row.segments.expand(grad_S), 0.0)
    return TokenLoss(loss, grad, flags)


def gspo_token(row: Row, policy: GspoTokenPolicy) -> TokenLoss:
    """The values of ``gspo``; every token carries the gradient of its own advantage.

    Source: GSPO, arXiv 2507.18071 eq. 13 and 14.
    """
    loss, flags, _, _ = _clipped(row, policy)
    z = row.segments.expand(row.sums.mean_log_ratio)
    active = inside(z) & ~(flags["clipfrac_high"] | flags["clipfrac_low"])
    grad = torch.where(active, -row.advantages * clamped(z).exp(), 0.0) * row.coef
    return TokenLoss(loss, grad, flags)


def gmpo(row: Row, policy: GmpoPolicy) -> TokenLoss:
    """l = -A exp(mean_t of d_t), d_t clipped to eps_high for A > 0, to -eps_low for A < 0.

    Source: GMPO, arXiv 2507.20673.
    """
    a, d = row.advantages, row.log_ratio.double()
    flags = {
        "clipfrac_high": (a > 0) & (d > policy.eps_high),
        "clipfrac_low": (a < 0) & (d < -policy.eps_low),
    }
    z_T = torch.where(a > 0, d.clamp(max=policy.eps_high), d.clamp(min=-policy.eps_low))
    z_T = torch.where(a == 0, 0.0, z_T)
    n = row.sums.count.clamp(min=1)
    z = row.segments.sums(z_T)[0] / n
    s = clamped(z).exp()
    pull = torch.where(inside(z), -s * (row.sums.positive + row.sums.negative) / n, 0.0)
    moves = row.mask & (a != 0) & ~flags["clipfrac_high"] & ~flags["clipfrac_low"]
    grad = torch.where(moves, row.segments.expand(pull), 0.0)
    return TokenLoss(-a * row.segments.expand(s), grad, flags)


def _clipped(
    row: Row, policy: GspoPolicy | GspoTokenPolicy
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """(l f64 [T], flags, s within the lower bound [S], within the upper [S]). Decided on the
    log-ratio, where bounds of 1e-4 keep their digits.
    """
    a, z = row.advantages.double(), row.sums.mean_log_ratio
    low_ok, high_ok = _within(row.sums, policy)
    s = clamped(z).exp()
    above = row.segments.expand(torch.where(high_ok, s, 1 + policy.eps_high))
    below = row.segments.expand(torch.where(low_ok, s, 1 - policy.eps_low))
    flags = {
        "clipfrac_high": (a > 0) & ~row.segments.expand(high_ok),
        "clipfrac_low": (a < 0) & ~row.segments.expand(low_ok),
    }
    return -a * torch.where(a > 0, above, below), flags, low_ok, high_ok


def clipped_sequences(
    sums: SequenceSums, policy: GspoPolicy | GspoTokenPolicy
) -> dict[str, torch.Tensor]:
    """bool [S]: sequences of which some token is clipped."""
    low_ok, high_ok = _within(sums, policy)
    clipped = (~high_ok & (sums.positive > 0)) | (~low_ok & (sums.negative < 0))
    return {"seq_clipfrac": clipped}


def _within(
    sums: SequenceSums, policy: GspoPolicy | GspoTokenPolicy
) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [S] twice: s is not below the lower bound, not above the upper."""
    z = sums.mean_log_ratio
    return z >= math.log1p(-policy.eps_low), z <= math.log1p(policy.eps_high)
