"""Sum of each packed sequence, in float64.

Shapes: T tokens in a row, S sequences packed in it.

    out[s] = sum over t in [cu_seqlens[s], cu_seqlens[s+1]) of float64(values[t])

1. Accumulated left to right in float64: neither the thread count nor the packing changes a bit.
   (On CUDA the order is another, fixed one; see csrc/cuda/segment_sum.cu.)
2. An empty sequence (two equal entries) sums to exactly 0.
3. The gradient of token t is that of its sequence's sum, in the dtype of `values`.
"""

from typing import Any

import torch
from torch import Tensor

from megarl.ops._arguments import check_bounds, check_cu_seqlens, check_dim, check_real
from megarl.ops._native import native_devices, runs_native
from megarl.ops._selfcheck import self_check


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum each packed sequence: values f32|f64 [T], cu_seqlens i32|i64 [S+1] -> f64 [S].

    RuntimeError, with the numbers, if `cu_seqlens` does not start at 0, decreases, or does not end
    at T.
    """
    if runs_native("segment_sum", values.device):
        out: Tensor = torch.ops.megarl.segment_sum(values, cu_seqlens)
        return out
    return segment_sum_ref(values, cu_seqlens)


def segment_sum_ref(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The specification of `segment_sum`, in plain torch; differentiable by plain autograd."""
    _check_types(values, cu_seqlens)
    check_bounds("segment_sum", cu_seqlens, values.numel())
    sums = torch.zeros(cu_seqlens.numel() - 1, dtype=torch.float64, device=values.device)
    return sums.index_add(0, _segment_ids(cu_seqlens, values.numel()), values.double())


def _segment_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The sequence each token lies in: i64 [T]."""
    tokens = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    # How many entries are <= t. Among equal entries the last one counts, so an empty sequence gets
    # no token.
    return torch.searchsorted(cu_seqlens.contiguous(), tokens, right=True) - 1


def _check_types(values: Tensor, cu_seqlens: Tensor) -> None:
    check_dim("segment_sum", "values", values, 1)
    check_real("segment_sum", "values", values)
    check_cu_seqlens("segment_sum", cu_seqlens, values)


def _fake(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    _check_types(values, cu_seqlens)
    return values.new_empty(cu_seqlens.shape[0] - 1, dtype=torch.float64)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    values, cu_seqlens = inputs
    ctx.save_for_backward(cu_seqlens)
    ctx.num_tokens, ctx.dtype = values.shape[0], values.dtype


def _backward(ctx: Any, grad_sums: Tensor) -> tuple[Tensor, None]:
    """[S] -> [T]. Plain torch, so that it can itself be differentiated."""
    (cu_seqlens,) = ctx.saved_tensors
    ids = _segment_ids(cu_seqlens, ctx.num_tokens)
    return grad_sums.index_select(0, ids).to(ctx.dtype), None


if native_devices("segment_sum"):
    torch.library.register_fake("megarl::segment_sum", _fake)
    torch.library.register_autograd(
        "megarl::segment_sum", _backward, setup_context=_save_for_backward
    )


@self_check("segment_sum")
def _check(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(10_007, generator=generator)
    cu_seqlens = torch.tensor([0, 0, 5, 4000, 10_007, 10_007], dtype=torch.int32)
    found = torch.ops.megarl.segment_sum(values.to(device), cu_seqlens.to(device))
    torch.testing.assert_close(
        found.cpu(), segment_sum_ref(values, cu_seqlens), rtol=1e-11, atol=1e-9
    )
