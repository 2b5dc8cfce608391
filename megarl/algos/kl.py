"""Divergence from the reference policy, x = lp_ref - lp: value k and closed-form gradient dk/dlp.

::

    type    value          gradient    expected gradient, tokens sampled from pi
    k1      -x             1           0: useless as a loss, right in the reward
    k2      x^2 / 2        -x          that of KL(pi | ref)
    k3      e^x - x - 1    1 - e^x     that of KL(ref | pi)
    k3+     as k3          as k2       that of KL(pi | ref)

With ``is_weight`` a factor w multiplies the estimate, ``old``: w = pi / pi_old, ``self``: w = 1
with the gradient of pi / pi. Then dk/dlp = w (value + gradient): for k3 that is -w x, the gradient
of KL(pi | ref), with ``old`` also off-policy. Gradients are 0 beyond a clamp; beyond the input
clamp w is frozen as well. Source: docs/objectives.md, "KL terms".
"""

import torch

from megarl.algos.ratio import clamped, inside
from megarl.config.algo import KlSection


def kl_term(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    kl: KlSection,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(value [T], gradient in ``logprobs`` [T]), without the coefficient. Inputs [T], finite."""
    x = ref_logprobs - logprobs
    frozen = torch.zeros_like(x, dtype=torch.bool)
    if kl.input_clamp is not None:
        frozen = x.abs() > kl.input_clamp
        x = x.clamp(-kl.input_clamp, kl.input_clamp)
    value, grad, product = _ESTIMATORS[kl.type](x)
    if kl.output_clamp is not None:
        over = value.abs() > kl.output_clamp
        value = value.clamp(-kl.output_clamp, kl.output_clamp)
        grad, product = torch.where(over, 0.0, grad), torch.where(over, value, product)
    if kl.weight == "old":
        d = logprobs - old_logprobs
        w = clamped(d).exp()
        value, grad = w * value, w * torch.where(inside(d), product, grad)
    elif kl.weight == "self":
        grad = product
    return value, torch.where(frozen, 0.0, grad)


def k3(x: torch.Tensor) -> torch.Tensor:
    """e^x - x - 1, with its digits also near 0."""
    return torch.where(
        x.abs() < 1e-3, x * x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5))), torch.expm1(x) - x
    )


# (value, gradient, value + gradient): their sum cancels where it is formed from rounded parts
Estimate = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _k1(x: torch.Tensor) -> Estimate:
    return -x, torch.ones_like(x), 1 - x


def _k2(x: torch.Tensor) -> Estimate:
    return x * x / 2, -x, x * x / 2 - x


def _k3(x: torch.Tensor) -> Estimate:
    return k3(x), -torch.expm1(x), -x


def _k3_straight_through(x: torch.Tensor) -> Estimate:
    return k3(x), -x, k3(x) - x


_ESTIMATORS = {"k1": _k1, "k2": _k2, "k3": _k3, "k3+": _k3_straight_through}
