"""Generalised advantage estimation and discounted returns over packed rows, in float64.

Shapes: T tokens in a row, S sequences packed in it. A sequence's steps are its trained tokens
u_1 < ... < u_K only, those where ``mask``; what lies between has no value and costs no discount.
With V_{K+1} = bootstrap and A_{K+1} = 0 (arXiv 1506.02438)::

    delta_k = (r_k + gamma V_{k+1}) - V_k
    A_k = delta_k + (gamma lam) A_{k+1}          return_k = A_k + V_k

and for ``discounted_returns`` (arXiv 2501.03262) G_k = r_k + gamma G_{k+1}.

1. ``credit_previous``: r_k is the reward of u_k and of all masked tokens between it and u_{k+1},
   summed from the last to the first. Before u_1 there is no one to credit. Otherwise rewards of
   masked tokens are not looked at; values of masked tokens never are.
2. Masked tokens get 0. A NaN stays in its sequence. One walk from a sequence's last token to its
   first, in the order of operations above: thread count and packing change no bit, nor does the
   device.
3. Both are linear. With gradients a_k of A_k and b_k of return_k, and d_0 = 0, the adjoint is::

       d_k = (a_k + b_k) + (gamma lam) d_{k-1}    gradient of r_k, and of what is credited to it
       (b_k - d_k) + gamma d_{k-1}                gradient of V_k
       gamma d_K                                  gradient of bootstrap

   ``gae_backward``, whose own gradient is ``gae``.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megarl.ops._arguments import (
    check_bounds,
    check_cu_seqlens,
    check_finite,
    check_mask,
    check_per_sequence,
    check_real,
    check_real_row,
    check_row,
    check_type,
)
from megarl.ops._native import native_devices, runs_native
from megarl.ops._selfcheck import self_check


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Tensor,
    *,
    gamma: float,
    lam: float,
    credit_previous: bool = True,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) f64 [T]: rewards and values f32|f64 [T] (values of the state before a
    token), mask bool [T], cu_seqlens i32|i64 [S+1], bootstrap f32|f64 [S]: the value after a
    sequence's last trained token, 0 where it ended.

    RuntimeError, with the numbers, if `cu_seqlens` does not start at 0, decreases, or does not end
    at T, or a discount is not finite.
    """
    arguments = (rewards, values, mask, cu_seqlens, bootstrap, gamma, lam, credit_previous)
    if runs_native("gae", rewards.device):
        out: tuple[Tensor, Tensor] = torch.ops.megarl.gae(*arguments)
        return out
    return gae_ref(*arguments)


def discounted_returns(
    rewards: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    credit_previous: bool = True,
) -> Tensor:
    """Rewards of this and all later trained tokens, discounted once a trained token: rewards
    f32|f64 [T], mask bool [T], cu_seqlens i32|i64 [S+1] -> f64 [T]. Errors as `gae`.
    """
    arguments = (rewards, mask, cu_seqlens, gamma, credit_previous)
    if runs_native("discounted_returns", rewards.device):
        out: Tensor = torch.ops.megarl.discounted_returns(*arguments)
        return out
    return discounted_returns_ref(*arguments)


# --- the specification ----------------------------------------------------------------------------


def gae_ref(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Tensor,
    gamma: float,
    lam: float,
    credit_previous: bool = True,
) -> tuple[Tensor, Tensor]:
    """The specification of `gae`, in plain torch; differentiable by plain autograd."""
    _check_gae(rewards, values, mask, cu_seqlens, bootstrap, gamma, lam)
    check_bounds("gae", cu_seqlens, rewards.numel())
    steps = _Steps(mask, cu_seqlens)
    r = steps.padded(_credited(rewards, mask, cu_seqlens) if credit_previous else rewards)
    v = steps.padded(values)
    last = torch.arange(v.shape[1], device=v.device) == steps.lengths[:, None] - 1
    after = torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], 1)
    after = torch.where(last, bootstrap.double()[:, None], after)
    advantages = _discounted(r + gamma * after - v, gamma * lam)
    return steps.scattered(advantages), steps.scattered(advantages + v)


def discounted_returns_ref(
    rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float, credit_previous: bool = True
) -> Tensor:
    """The specification of `discounted_returns`; differentiable by plain autograd."""
    _check_returns(rewards, mask, cu_seqlens, gamma)
    check_bounds("discounted_returns", cu_seqlens, rewards.numel())
    steps = _Steps(mask, cu_seqlens)
    r = _credited(rewards, mask, cu_seqlens) if credit_previous else rewards
    return steps.scattered(_discounted(steps.padded(r), gamma))


def gae_backward_ref(
    grad_advantages: Tensor,
    grad_returns: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    credit_previous: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification of `gae_backward`: gradients of rewards [T], values [T], bootstrap [S]."""
    _check_backward(grad_advantages, grad_returns, mask, cu_seqlens, gamma, lam)
    check_bounds("gae_backward", cu_seqlens, mask.numel())
    steps = _Steps(mask, cu_seqlens)
    a, b = steps.padded(grad_advantages), steps.padded(grad_returns)
    d = _discounted((a + b).flip(1), gamma * lam).flip(1)
    before = torch.cat([torch.zeros_like(d[:, :1]), d[:, :-1]], 1)
    of_rewards = steps.scattered(d)
    if credit_previous:
        previous, earned = _previous(mask, cu_seqlens)
        of_rewards = torch.where(earned, of_rewards[previous.clamp(min=0)], 0.0)
    filled = steps.lengths > 0
    of_bootstrap = torch.zeros(len(filled), dtype=torch.float64, device=mask.device)
    of_bootstrap[filled] = gamma * d[filled, steps.lengths[filled] - 1]
    return of_rewards, steps.scattered(b - d + gamma * before), of_bootstrap


def _credited(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """f64 [T]: rewards of masked tokens moved to the trained token before them."""
    previous, earned = _previous(mask, cu_seqlens)
    out = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    return out.index_add(0, previous[earned].flip(0), rewards.double()[earned].flip(0))


def _previous(mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The last trained token up to every token, i64 [T], and whether it is in its sequence."""
    tokens = torch.arange(len(mask), device=mask.device)
    here = torch.where(mask, tokens, -1)
    previous = here.cummax(0).values if len(mask) else here
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    return previous, previous >= cu_seqlens[:-1].long().repeat_interleave(lengths)


class _Steps:
    """The trained tokens of every sequence as a padded matrix [S, K], and back."""

    def __init__(self, mask: Tensor, cu_seqlens: Tensor) -> None:
        self.total = len(mask)
        self.positions = mask.nonzero().squeeze(1)
        before = torch.cat([mask.new_zeros(1, dtype=torch.long), mask.long().cumsum(0)])
        self.lengths = before[cu_seqlens[1:].long()] - before[cu_seqlens[:-1].long()]

    def padded(self, values_T: Tensor) -> Tensor:
        if len(self.lengths) == 0:
            return values_T.new_zeros(0, 0, dtype=torch.float64)
        parts = values_T.double()[self.positions].split(self.lengths.tolist())
        return pad_sequence(list(parts), batch_first=True)

    def scattered(self, values_SK: Tensor) -> Tensor:
        columns = torch.arange(values_SK.shape[1], device=values_SK.device)
        inside = columns < self.lengths[:, None]
        out = torch.zeros(self.total, dtype=torch.float64, device=values_SK.device)
        return out.index_put((self.positions,), values_SK[inside])


def _discounted(values_SK: Tensor, factor: float) -> Tensor:
    """y_k = x_k + factor y_{k+1}, row by row, from y_{K+1} = 0."""
    after = values_SK.new_zeros(values_SK.shape[0])
    found = []
    for column in reversed(values_SK.unbind(1)):
        after = column + factor * after
        found.append(after)
    return torch.stack(found[::-1], 1) if found else values_SK


# --- shapes and gradients -------------------------------------------------------------------------


def _check_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Tensor,
    gamma: float,
    lam: float,
) -> None:
    check_real_row("gae", "rewards", rewards, rewards)
    check_real_row("gae", "values", values, rewards)
    check_mask("gae", "mask", mask, rewards)
    check_cu_seqlens("gae", cu_seqlens, rewards)
    check_per_sequence("gae", "bootstrap", bootstrap, cu_seqlens)
    check_real("gae", "bootstrap", bootstrap)
    check_finite("gae", "gamma", gamma)
    check_finite("gae", "lam", lam)


def _check_returns(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float) -> None:
    check_real_row("discounted_returns", "rewards", rewards, rewards)
    check_mask("discounted_returns", "mask", mask, rewards)
    check_cu_seqlens("discounted_returns", cu_seqlens, rewards)
    check_finite("discounted_returns", "gamma", gamma)


def _check_backward(
    grad_advantages: Tensor,
    grad_returns: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
) -> None:
    for name, x in (("grad_advantages", grad_advantages), ("grad_returns", grad_returns)):
        check_row("gae_backward", name, x, grad_advantages)
        check_type("gae_backward", name, x, torch.float64)
    check_mask("gae_backward", "mask", mask, grad_advantages)
    check_cu_seqlens("gae_backward", cu_seqlens, grad_advantages)
    check_finite("gae_backward", "gamma", gamma)
    check_finite("gae_backward", "lam", lam)


def _fake_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Tensor,
    gamma: float,
    lam: float,
    credit_previous: bool,
) -> tuple[Tensor, Tensor]:
    _check_gae(rewards, values, mask, cu_seqlens, bootstrap, gamma, lam)
    row = rewards.new_empty(rewards.shape[0], dtype=torch.float64)
    return row, torch.empty_like(row)


def _fake_backward(
    grad_advantages: Tensor,
    grad_returns: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    credit_previous: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_backward(grad_advantages, grad_returns, mask, cu_seqlens, gamma, lam)
    row = grad_advantages.new_empty(grad_advantages.shape[0])
    return row, torch.empty_like(row), row.new_empty(cu_seqlens.shape[0] - 1)


def _fake_returns(
    rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float, credit_previous: bool
) -> Tensor:
    _check_returns(rewards, mask, cu_seqlens, gamma)
    return rewards.new_empty(rewards.shape[0], dtype=torch.float64)


def _save_gae(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rewards, values, mask, cu_seqlens, bootstrap, *ctx.settings = inputs
    ctx.save_for_backward(mask, cu_seqlens)
    ctx.dtypes = [rewards.dtype, values.dtype, bootstrap.dtype]


def _backward_of_gae(ctx: Any, grad_advantages: Tensor, grad_returns: Tensor) -> tuple[Any, ...]:
    mask, cu_seqlens = ctx.saved_tensors
    grads = torch.ops.megarl.gae_backward(
        grad_advantages, grad_returns, mask, cu_seqlens, *ctx.settings
    )
    of_rewards, of_values, of_bootstrap = (
        grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)
    )
    return of_rewards, of_values, None, None, of_bootstrap, None, None, None


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, mask, cu_seqlens, *ctx.settings = inputs
    ctx.save_for_backward(mask, cu_seqlens)


def _backward_of_backward(
    ctx: Any, of_rewards: Tensor, of_values: Tensor, of_bootstrap: Tensor
) -> tuple[Any, ...]:
    """The adjoint of the adjoint."""
    mask, cu_seqlens = ctx.saved_tensors
    grads = torch.ops.megarl.gae(
        of_rewards, of_values, mask, cu_seqlens, of_bootstrap, *ctx.settings
    )
    return *grads, None, None, None, None, None


def _save_returns(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rewards, mask, cu_seqlens, ctx.gamma, ctx.credit_previous = inputs
    ctx.save_for_backward(mask, cu_seqlens)
    ctx.dtype = rewards.dtype


def _backward_of_returns(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Returns are the advantages where lam is 1 and there are no values."""
    mask, cu_seqlens = ctx.saved_tensors
    of_rewards, _, _ = torch.ops.megarl.gae_backward(
        grad, torch.zeros_like(grad), mask, cu_seqlens, ctx.gamma, 1.0, ctx.credit_previous
    )
    return of_rewards.to(ctx.dtype), None, None, None, None


if all(native_devices(op) for op in ("gae", "gae_backward", "discounted_returns")):
    torch.library.register_fake("megarl::gae", _fake_gae)
    torch.library.register_fake("megarl::gae_backward", _fake_backward)
    torch.library.register_fake("megarl::discounted_returns", _fake_returns)
    torch.library.register_autograd("megarl::gae", _backward_of_gae, setup_context=_save_gae)
    torch.library.register_autograd(
        "megarl::gae_backward", _backward_of_backward, setup_context=_save_backward
    )
    torch.library.register_autograd(
        "megarl::discounted_returns", _backward_of_returns, setup_context=_save_returns
    )


# --- on a device ----------------------------------------------------------------------------------


def _check_case() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 10_007, generator=generator)
    mask = torch.rand(10_007, generator=generator) < 0.7
    mask[:300] = False
    cu_seqlens = torch.tensor([0, 0, 300, 301, 4000, 10_007, 10_007], dtype=torch.int32)
    return rewards, values, mask, cu_seqlens, torch.randn(6, generator=generator)


@self_check("gae")
def _check_device(device: torch.device) -> None:
    case = _check_case()
    for credit in (False, True):
        found = torch.ops.megarl.gae(*(x.to(device) for x in case), 0.99, 0.95, credit)
        for one, two in zip(found, gae_ref(*case, 0.99, 0.95, credit), strict=True):
            torch.testing.assert_close(one.cpu(), two, rtol=0, atol=0)


@self_check("gae_backward")
def _check_backward_device(device: torch.device) -> None:
    rewards, values, mask, cu_seqlens, _ = _check_case()
    case = (rewards.double(), values.double(), mask, cu_seqlens)
    for credit in (False, True):
        found = torch.ops.megarl.gae_backward(*(x.to(device) for x in case), 0.99, 0.95, credit)
        for one, two in zip(found, gae_backward_ref(*case, 0.99, 0.95, credit), strict=True):
            torch.testing.assert_close(one.cpu(), two, rtol=0, atol=0)


@self_check("discounted_returns")
def _check_returns_device(device: torch.device) -> None:
    rewards, _, mask, cu_seqlens, _ = _check_case()
    case = (rewards, mask, cu_seqlens)
    for credit in (False, True):
        found = torch.ops.megarl.discounted_returns(*(x.to(device) for x in case), 0.99, credit)
        expected = discounted_returns_ref(*case, 0.99, credit)
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)
