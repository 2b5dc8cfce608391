"""Policy objectives: one function each, per token, minimised. ``presets.py`` names them.

``l`` is the token loss before its aggregation weight. Trust regions are closed; A = 0 gives 0.
"""

from dataclasses import dataclass, field

import torch

from megarl.algos.ratio import LOG_RATIO_LIMIT, sequence_log_ratio, token_log_ratio, token_ratio
from megarl.algos.segments import Segments
from megarl.config.schema import GspoPolicy, PpoClipPolicy, ReinforcePolicy, SapoPolicy, SftPolicy
from megarl.types import LossInputs


@dataclass(frozen=True)
class TokenLoss:
    """``loss`` [T] with gradient; ``flags``: name -> bool [T], reported as shares of trained
    tokens; ``seq_flags``: name -> bool [S], as shares of trained sequences. ``uses_ratio``: whether
    there is a behaviour policy, hence ratios to report."""

    loss: torch.Tensor
    flags: dict[str, torch.Tensor] = field(default_factory=dict)
    seq_flags: dict[str, torch.Tensor] = field(default_factory=dict)
    uses_ratio: bool = True


def reinforce(inputs: LossInputs, segments: Segments, policy: ReinforcePolicy) -> TokenLoss:
    """l = -A lp."""
    return TokenLoss(-inputs.advantages * inputs.logprobs)


def sft(inputs: LossInputs, segments: Segments, policy: SftPolicy) -> TokenLoss:
    """l = -lp: the negative log-likelihood of demonstrations."""
    return TokenLoss(-inputs.logprobs, uses_ratio=False)


def ppo_clip(inputs: LossInputs, segments: Segments, policy: PpoClipPolicy) -> TokenLoss:
    """l = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)); dual clip c, A < 0: min(l, -A c).

    Source: PPO, arXiv 1707.06347 eq. 7; separate bounds: DAPO, arXiv 2503.14476; dual clip: arXiv
    1912.09729.
    """
    advantages, r = inputs.advantages, token_ratio(inputs)
    # max(-A r, -A clip(r)) binds above for A > 0, below for A < 0
    capped = torch.where(
        advantages > 0, r.clamp(max=1 + policy.eps_high), r.clamp(min=1 - policy.eps_low)
    )
    flags = {
        "clipfrac_high": (advantages > 0) & (r > 1 + policy.eps_high),
        "clipfrac_low": (advantages < 0) & (r < 1 - policy.eps_low),
    }
    if policy.dual_clip is not None:
        capped = torch.where(advantages < 0, capped.clamp(max=policy.dual_clip), capped)
        flags["clipfrac_dual"] = (advantages < 0) & (r > policy.dual_clip)
    return TokenLoss(-advantages * capped, flags)


def gspo(inputs: LossInputs, segments: Segments, policy: GspoPolicy) -> TokenLoss:
    """l = -A min(s, 1 + eps_high) for A > 0, -A max(s, 1 - eps_low) for A < 0.

    s is the sequence ratio (``ratio.py``).

    Every token of a sequence shares s; its gradient reaches all of the sequence's tokens, each by
    1/n. The clip is decided on the log-ratio, where bounds of 1e-4 keep their digits. Source: GSPO,
    arXiv 2507.18071 eq. 5.
    """
    log_s = sequence_log_ratio(inputs, segments).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    high = torch.log1p(torch.tensor(policy.eps_high, dtype=torch.float64))
    low = torch.log1p(torch.tensor(-policy.eps_low, dtype=torch.float64))
    advantages = inputs.advantages.double()
    above = segments.expand(log_s.clamp(max=float(high)).exp())
    below = segments.expand(log_s.clamp(min=float(low)).exp())
    loss = -advantages * torch.where(advantages > 0, above, below)
    token_log_s = segments.expand(log_s)
    flags = {
        "clipfrac_high": (advantages > 0) & (token_log_s > high),
        "clipfrac_low": (advantages < 0) & (token_log_s < low),
    }
    clipped = (
        segments.sum((inputs.mask & (flags["clipfrac_high"] | flags["clipfrac_low"])).float()) > 0
    )
    return TokenLoss(loss, flags, {"seq_clipfrac": clipped})


def sapo(inputs: LossInputs, segments: Segments, policy: SapoPolicy) -> TokenLoss:
    """l = -(4/tau) sigmoid(tau (r - 1)) A, tau = tau_pos where A > 0 else tau_neg.

    Source: SAPO, arXiv 2511.20347. At r = 1 the gradient in lp is -A.
    """
    advantages, r = inputs.advantages, token_ratio(inputs)
    tau = torch.where(advantages > 0, policy.tau_pos, policy.tau_neg)
    gate = torch.sigmoid(tau * (r - 1))
    # sech^2(tau (r - 1) / 2), the gradient's gate: below one half the token is mostly switched off
    weight = 4 * gate.detach() * (1 - gate.detach())
    return TokenLoss(-(4 / tau) * gate * advantages, {"gatefrac_low": weight < 0.5})


def log_ratio_for_metrics(inputs: LossInputs) -> torch.Tensor:
    """f32 [T], detached: the token log-ratio, clamped."""
    return token_log_ratio(inputs).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
