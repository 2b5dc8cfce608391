"""Policy objectives of single tokens, minimised: value l and closed-form gradient g = dl/dlp.

``presets.py`` names them, ``sequence_surrogates.py`` has those of whole sequences. A advantage, r
token ratio, d its logarithm, both clamped at |d| = 20 where the gradient ends (``in``). Trust
regions are closed: a bound itself is inside. A = 0 gives l = 0 and g = 0. Source of every formula:
docs/objectives.md, "Policy objectives".
"""

from dataclasses import dataclass, field

import torch

from megarl.algos.ratio import Row, clamped, inside
from megarl.config.policies import (
    AspoPolicy,
    CispoPolicy,
    KlCovPolicy,
    MinirlPolicy,
    PpoClipPolicy,
    ReinforcePolicy,
    SapoPolicy,
    SftPolicy,
)


@dataclass(frozen=True)
class TokenLoss:
    """``loss`` [T]: l of every token. ``grad`` f64 [T]: d(sum coef l)/dlp.

    ``flags``: name -> bool [T], reported as shares of trained tokens; ``means``: name -> [T],
    reported as token means.
    """

    loss: torch.Tensor
    grad: torch.Tensor
    flags: dict[str, torch.Tensor] = field(default_factory=dict)
    means: dict[str, torch.Tensor] = field(default_factory=dict)


def reinforce(row: Row, policy: ReinforcePolicy) -> TokenLoss:
    """l = -A lp, g = -A."""
    a = row.advantages
    return TokenLoss(-a * row.logprobs, -a * row.coef)


def sft(row: Row, policy: SftPolicy) -> TokenLoss:
    """l = -lp, g = -1: the negative log-likelihood of demonstrations."""
    return TokenLoss(-row.logprobs, -row.coef)


def ppo_clip(row: Row, policy: PpoClipPolicy) -> TokenLoss:
    """l = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)); with dual clip c, A < 0: min(l, -A c).

    g = -A r in, 0 where the clipped term is taken. Source: PPO, arXiv 1707.06347 eq. 7; two bounds:
    DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729.
    """
    a, r = row.advantages, row.ratio
    flags = clip_flags(a, r, 1 - policy.eps_low, 1 + policy.eps_high)
    capped = torch.where(a > 0, r.clamp(max=1 + policy.eps_high), r.clamp(min=1 - policy.eps_low))
    if policy.dual_clip is not None:
        flags["clipfrac_dual"] = (a < 0) & (r > policy.dual_clip)
        capped = torch.where(a < 0, capped.clamp(max=policy.dual_clip), capped)
    stopped = torch.stack(list(flags.values())).any(0)
    active = inside(row.log_ratio) & ~stopped
    return TokenLoss(-a * capped, torch.where(active, -a * r, 0.0) * row.coef, flags)


def cispo(row: Row, policy: CispoPolicy) -> TokenLoss:
    """l = -w A lp, g = -w A, w = clip(r, w_min, w_max) held constant: no token's gradient is lost.

    ``ppo_mask`` drops the tokens PPO would clip. Source: MiniMax-M1, arXiv 2506.13585 eq. 4 and 7.
    The value depends on the scale of lp; ``surrogate`` is what to plot.
    """
    a, r = row.advantages, row.ratio
    low, high = policy.bounds
    w = r.clamp(low, high)
    flags = {"weight_capped": r > high, "weight_raised": r < low}
    if policy.ppo_mask:
        assert policy.eps_low is not None and policy.eps_high is not None, "checked by validate()"
        clip = clip_flags(a, r, 1 - policy.eps_low, 1 + policy.eps_high)
        w = torch.where(clip["clipfrac_high"] | clip["clipfrac_low"], 0.0, w)
        flags |= clip
    return TokenLoss(
        -w * a * row.logprobs, -w * a * row.coef, flags, means={"surrogate_loss": -w * a}
    )


def sapo(row: Row, policy: SapoPolicy) -> TokenLoss:
    """l = -(4/tau) sigmoid(x) A, x = tau (r - 1), tau = tau_pos where A > 0, else tau_neg.

    g = -A r sech^2(x/2) in; at r = 1 it is -A. The sech is formed from e^-|x|, which keeps its
    digits where the sigmoid has rounded to 0 or 1. Source: SAPO, arXiv 2511.20347.
    """
    a, r = row.advantages, row.ratio
    tau = torch.where(a > 0, r.new_tensor(policy.tau_pos), r.new_tensor(policy.tau_neg))
    x = tau * (r - 1)
    e = torch.exp(-x.abs())
    gate = 4 * e / (1 + e) ** 2
    g = torch.where(inside(row.log_ratio), -a * r * gate, 0.0)
    flags = {"gatefrac_low": gate < 0.5}  # mostly switched off
    return TokenLoss(-(4 / tau) * torch.sigmoid(x) * a, g * row.coef, flags, means={"gate": gate})


def aspo(row: Row, policy: AspoPolicy) -> TokenLoss:
    """l = -A w, g = -A w; w = min(1/r, c) for A > 0, min(r, c) for A < 0. Outside PPO's region of
    r, l stays at the bound's value and g is 0.

    The inverted ratio raises what has become unlikely. c caps softly: gradients remain. Tokens of
    high entropy (``selected``) have a clip range of their own. Source: ASPO, arXiv 2510.06062.
    """
    a, r, c = row.advantages, row.ratio, policy.dual_clip
    wide = torch.zeros_like(row.mask) if row.selected is None else row.selected
    bounds = r.new_tensor(
        [
            [1 - policy.eps_low, 1 + policy.eps_high],
            [1 - policy.eps_entropic, 1 + policy.eps_entropic],
        ]
    )
    low, high = bounds[wide.long()].unbind(-1)
    flags = clip_flags(a, r, low, high)
    held = torch.where(a > 0, torch.minimum(r, high), torch.maximum(r, low))
    w = torch.where(a > 0, 1 / held, held).clamp(max=c)
    g = torch.where(flags["clipfrac_high"] | flags["clipfrac_low"], 0.0, -a * w)
    flags["clipfrac_dual"] = (a < 0) & (r > c)
    flags["weight_capped"] = (a > 0) & (1 / r > c)
    return TokenLoss(-a * w, g * row.coef, flags)


def minirl(row: Row, policy: MinirlPolicy) -> TokenLoss:
    """l = -M w A lp, g = -M w A, w = min(pi / pi_rollout, tis_max) held constant, M: PPO's region
    of r.

    Source: MiniRL, arXiv 2512.01374.
    """
    a = row.advantages
    flags = clip_flags(a, row.ratio, 1 - policy.eps_low, 1 + policy.eps_high)
    w = clamped(row.logprobs - row.rollout_logprobs).exp()
    flags["weight_capped"] = w > policy.tis_max
    w = torch.where(
        flags["clipfrac_high"] | flags["clipfrac_low"], 0.0, w.clamp(max=policy.tis_max)
    )
    return TokenLoss(
        -w * a * row.logprobs, -w * a * row.coef, flags, means={"surrogate_loss": -w * a}
    )


def kl_cov(row: Row, policy: KlCovPolicy) -> TokenLoss:
    """l = -A r + coef |d| on selected tokens, g = -A r in + coef sign(d).

    ``selected``: the tokens of highest covariance of advantage and log-prob (``selection.py``).
    Source: "The Entropy Mechanism of RL for Reasoning LMs", arXiv 2505.22617.
    """
    assert row.selected is not None, "chosen before the step"
    a, r, d = row.advantages, row.ratio, row.log_ratio
    penalty = torch.where(row.selected & row.mask, d.new_tensor(policy.coef), 0.0)
    g = torch.where(inside(d), -a * r, 0.0) + penalty * d.sign()
    return TokenLoss(-a * r + penalty * d.abs(), g * row.coef, {"selected": row.selected})


def clip_flags(
    a: torch.Tensor, r: torch.Tensor, low: float | torch.Tensor, high: float | torch.Tensor
) -> dict[str, torch.Tensor]:
    """Tokens beyond PPO's trust region, on the side their advantage pushes to."""
    return {"clipfrac_high": (a > 0) & (r > high), "clipfrac_low": (a < 0) & (r < low)}
