"""The policy loss as tools/kernel_cases.py calls it, and the same objective in eager torch."""

import math

import torch
from torch import Tensor

from megarl import ops
from megarl.ops.policy_loss import PolicyRow, PolicyTerms, policy_loss, policy_sums

_TERMS = PolicyTerms(
    "ppo_clip",
    dict(low=0.8, high=1.28, cap=math.inf, kl_coef=0.1, kl_input_clamp=20.0, kl_output_clamp=10.0),
    "k3",
)


def _row(*columns: Tensor) -> PolicyRow:
    return PolicyRow(*columns[:6], ref_logprobs=columns[6])


def loss_and_gradient(*columns: Tensor) -> tuple[Tensor, ...]:
    return tuple(policy_loss(_row(*columns), _TERMS))


def sums(*columns: Tensor) -> Tensor:
    return policy_sums(_row(*columns), _TERMS)


def eager_ppo_clip(*columns: Tensor) -> tuple[Tensor, ...]:
    """Clipped surrogate and k3, loss and gradient, with two metrics: kernel after kernel."""
    given, old, advantages, weight, mask, _, reference = columns
    low, high, coef = (_TERMS.parameters[name] for name in ("low", "high", "kl_coef"))
    logprobs = given.detach().requires_grad_()
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(low, high)
    surrogate = -torch.minimum(ratio * advantages, clipped * advantages)
    gap = reference - logprobs
    loss_T = surrogate + coef * (gap.exp() - gap - 1)
    loss = torch.where(mask, weight * loss_T, 0.0).sum()
    (grad,) = torch.autograd.grad(loss, logprobs)
    with torch.no_grad():
        fraction = ((ratio != clipped) & mask).sum() / mask.sum()
        kl = torch.where(mask, gap, 0.0).sum() / mask.sum()
    return loss.detach(), grad, fraction, kl


def eager_sums(*columns: Tensor) -> Tensor:
    """The log-ratio's sum of every sequence, in float64."""
    gap = torch.where(columns[4], columns[0] - columns[1], 0.0)
    return ops.segment_sum_ref(gap, columns[5])
