"""Count, mean and sum of squared deviations of a row's trained tokens, and whitening; in float64.

Shapes: T tokens in a row::

    n = sum of mask      mean = sum of x / n      M2 = sum of (x - mean)^2      where mask
    whiten(x) = (x - mean) / sqrt(variance + eps) where mask, 0 elsewhere

1. The row is cut into blocks of 4096 tokens. A block's mean comes first, then the deviations from
   it; each sum runs in 16 lanes, lane j taking tokens j, j + 16, ..., folded in halves.
   Neighbouring blocks merge (Chan et al. 1979), then the merged ones, and so on::

       delta = mean_b - mean_a              mean = mean_a + delta n_b / n
       M2 = M2_a + M2_b + delta^2 n_a n_b / n

   so thread counts change no bit. (On CUDA a block is summed in another, fixed order.)
2. What lies where not ``mask`` is not looked at. A part without tokens changes nothing.
3. Gradients: of n none, of mean 1/n, of M2 2 (x - mean), of whiten 1 / sqrt(variance + eps).
"""

import math
from typing import Any

import torch
from torch import Tensor

from megarl.ops._arguments import check_mask, check_real_row
from megarl.ops._native import native_devices, runs_native
from megarl.ops._selfcheck import self_check

BLOCK = 4096  # csrc/moments_math.h
LANES = 16  # csrc/cpu/simd.h


def masked_moments(values: Tensor, mask: Tensor) -> Tensor:
    """(n, mean, M2) f64 [3] of the masked numbers: values f32|f64 [T], mask bool [T]. All 0 where
    there are none.
    """
    if runs_native("masked_moments", values.device):
        out: Tensor = torch.ops.megarl.masked_moments(values, mask)
        return out
    return masked_moments_ref(values, mask)


def whiten(values: Tensor, mask: Tensor, *, mean: float, variance: float, eps: float) -> Tensor:
    """values f32|f64 [T], mask bool [T] -> f64 [T]. RuntimeError for a negative variance or eps."""
    if runs_native("whiten", values.device):
        out: Tensor = torch.ops.megarl.whiten(values, mask, mean, variance, eps)
        return out
    return whiten_ref(values, mask, mean, variance, eps)


def masked_moments_ref(values: Tensor, mask: Tensor) -> Tensor:
    """The specification of `masked_moments`, in plain torch; differentiable by plain autograd."""
    _check_moments(values, mask)
    padding = -len(values) % BLOCK
    x = torch.where(mask, values.double(), 0.0)
    x = torch.nn.functional.pad(x, (0, padding)).view(-1, BLOCK)
    counted = torch.nn.functional.pad(mask, (0, padding)).view(-1, BLOCK)
    n = counted.sum(1).double()
    mean = _lane_sums(x) / n.clamp(min=1)
    m2 = _lane_sums(torch.where(counted, (x - mean[:, None]) ** 2, 0.0))
    parts = torch.stack([n, mean, m2])
    while parts.shape[1] > 1:
        odd = parts[:, -1:] if parts.shape[1] % 2 else parts[:, :0]
        pairs = parts[:, : parts.shape[1] // 2 * 2]
        parts = torch.cat([_merged(pairs[:, 0::2], pairs[:, 1::2]), odd], 1)
    return parts[:, 0] if len(values) else torch.zeros_like(parts.sum(1))


def _lane_sums(blocks: Tensor) -> Tensor:
    """[B, BLOCK] -> [B]: a sum of every block, in the order of the docstring."""
    lanes = torch.zeros_like(blocks[:, :LANES])
    for step in blocks.split(LANES, 1):
        lanes = lanes + step
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _merged(a: Tensor, b: Tensor) -> Tensor:
    """Of parts (n, mean, M2) [3, B] each."""
    n = (a[0] + b[0]).clamp(min=1)
    delta = b[1] - a[1]
    mean = a[1] + delta * b[0] / n
    m2 = a[2] + b[2] + delta * delta * a[0] * b[0] / n
    both = torch.stack([a[0] + b[0], mean, m2])
    return torch.where(b[0] == 0, a, torch.where(a[0] == 0, b, both))


def whiten_ref(values: Tensor, mask: Tensor, mean: float, variance: float, eps: float) -> Tensor:
    """The specification of `whiten`, in plain torch; differentiable by plain autograd."""
    _check_whiten(values, mask, variance, eps)
    x = (torch.where(mask, values.double(), 0.0) - mean) / _deviation(variance, eps)
    return torch.where(mask, x, 0.0)


def _deviation(variance: float, eps: float) -> Tensor:
    """A tensor: it may be 0, by which Python would not divide."""
    return torch.tensor(math.sqrt(variance + eps), dtype=torch.float64)


def _check_moments(values: Tensor, mask: Tensor) -> None:
    check_real_row("masked_moments", "values", values, values)
    check_mask("masked_moments", "mask", mask, values)


def _check_whiten(values: Tensor, mask: Tensor, variance: float, eps: float) -> None:
    check_real_row("whiten", "values", values, values)
    check_mask("whiten", "mask", mask, values)
    for name, x in (("variance", variance), ("eps", eps)):
        if x < 0:
            raise RuntimeError(f"whiten: {name} must be at least 0, got {x}")


def _fake_moments(values: Tensor, mask: Tensor) -> Tensor:
    _check_moments(values, mask)
    return values.new_empty(3, dtype=torch.float64)


def _fake_whiten(values: Tensor, mask: Tensor, mean: float, variance: float, eps: float) -> Tensor:
    _check_whiten(values, mask, variance, eps)
    return values.new_empty(values.shape[0], dtype=torch.float64)


def _save_moments(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _backward_of_moments(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    """[3] -> [T]. Plain torch, so that it can itself be differentiated."""
    values, mask, moments = ctx.saved_tensors
    deviations = torch.where(mask, values.double() - moments[1], 0.0)
    per_token = grad[1] / moments[0].clamp(min=1) + 2 * grad[2] * deviations
    return torch.where(mask, per_token, 0.0).to(values.dtype), None


def _save_whiten(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, mask, _, ctx.variance, ctx.eps = inputs
    ctx.save_for_backward(mask)
    ctx.dtype = values.dtype


def _backward_of_whiten(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (mask,) = ctx.saved_tensors
    of_values = torch.where(mask, grad, 0.0) / _deviation(ctx.variance, ctx.eps)
    return torch.where(mask, of_values, 0.0).to(ctx.dtype), None, None, None, None


if native_devices("masked_moments") and native_devices("whiten"):
    torch.library.register_fake("megarl::masked_moments", _fake_moments)
    torch.library.register_autograd(
        "megarl::masked_moments", _backward_of_moments, setup_context=_save_moments
    )
    torch.library.register_fake("megarl::whiten", _fake_whiten)
    torch.library.register_autograd(
        "megarl::whiten", _backward_of_whiten, setup_context=_save_whiten
    )


def _check_case() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(30_007, generator=generator) * 3 + 100
    mask = torch.rand(30_007, generator=generator) < 0.6
    mask[8192:12_288] = False  # a whole block
    values[~mask] = math.nan
    return values, mask


@self_check("masked_moments")
def _check_moments_device(device: torch.device) -> None:
    values, mask = _check_case()
    found = torch.ops.megarl.masked_moments(values.to(device), mask.to(device))
    torch.testing.assert_close(
        found.cpu(), masked_moments_ref(values, mask), rtol=1e-11, atol=1e-11
    )


@self_check("whiten")
def _check_whiten_device(device: torch.device) -> None:
    values, mask = _check_case()
    found = torch.ops.megarl.whiten(values.to(device), mask.to(device), 100.0, 9.0, 1e-8)
    torch.testing.assert_close(
        found.cpu(), whiten_ref(values, mask, 100.0, 9.0, 1e-8), rtol=0, atol=0
    )
