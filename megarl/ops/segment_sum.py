"""Sum of each packed sequence, in float64.

Shapes: T tokens in a row, S sequences packed in it.

    out[s] = sum over t in [cu_seqlens[s], cu_seqlens[s+1]) of float64(values[t])

1. Accumulated left to right in float64: neither the thread count nor the packing changes a bit.
   (On CUDA the order is another, fixed one; see csrc/cuda/segment_sum.cu.)
2. An empty sequence (two equal entries) sums to exactly 0.
3. Tokens outside [cu_seqlens[0], cu_seqlens[S]) belong to no sequence: not even a NaN there shows.
4. The gradient of token t is that of its sequence's sum, in the dtype of `values`; 0 outside.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megarl.ops._native import native_devices

_NATIVE_DEVICES = native_devices("segment_sum")


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum each packed sequence: values f32|f64 [T], cu_seqlens i32|i64 [S+1] -> f64 [S].

    RuntimeError, with the numbers, if `cu_seqlens` starts below 0, decreases, or ends above T.
    """
    if values.device.type in _NATIVE_DEVICES:
        out: Tensor = torch.ops.megarl.segment_sum(values, cu_seqlens)
        return out
    return segment_sum_ref(values, cu_seqlens)


def segment_sum_ref(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The specification of `segment_sum`, in plain torch; differentiable by plain autograd."""
    _check_types(values, cu_seqlens)
    _check_bounds(cu_seqlens, values.numel())
    num_segments = cu_seqlens.numel() - 1
    # Slot S collects the tokens of no sequence and is then cut off, which keeps every shape static.
    sums = torch.zeros(num_segments + 1, dtype=torch.float64, device=values.device)
    ids = _segment_ids(cu_seqlens, values.numel())
    return sums.index_add(0, ids, values.double())[:num_segments]


def _segment_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The sequence each token lies in: i64 [T] in [0, S], S for "in none"."""
    tokens = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    # How many entries are <= t: 0 before the first, S+1 from the last on. Among equal entries the
    # last one counts, so an empty sequence gets no token.
    passed = torch.searchsorted(cu_seqlens.contiguous(), tokens, right=True)
    return torch.where(passed == 0, cu_seqlens.numel(), passed) - 1


def _check_types(values: Tensor, cu_seqlens: Tensor) -> None:
    """What is known without reading the data; the kernels check the same (csrc/common.h)."""
    if values.dim() != 1 or cu_seqlens.dim() != 1:
        raise RuntimeError(
            "segment_sum: values and cu_seqlens must have 1 dimension, "
            f"got {values.dim()} and {cu_seqlens.dim()}"
        )
    if values.dtype not in (torch.float32, torch.float64):
        raise RuntimeError(f"segment_sum: values must be float32 or float64, got {values.dtype}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(
            f"segment_sum: cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}"
        )
    if cu_seqlens.numel() == 0:
        raise RuntimeError("segment_sum: cu_seqlens must have at least 1 entry, got 0")


def _check_bounds(cu_seqlens: Tensor, num_tokens: int) -> None:
    """Reads the entries, for which an accelerator must stop: only the reference pays that."""
    bounds = cu_seqlens.tolist()
    if bounds[0] < 0:
        raise RuntimeError(f"segment_sum: cu_seqlens must start at 0 or above, got {bounds[0]}")
    for i, (before, after) in enumerate(pairwise(bounds), start=1):
        if before > after:
            raise RuntimeError(
                "segment_sum: cu_seqlens must not decrease, "
                f"got {before} then {after} at entries {i - 1} and {i}"
            )
    if bounds[-1] > num_tokens:
        raise RuntimeError(
            f"segment_sum: cu_seqlens must not exceed the {num_tokens} values, "
            f"got {bounds[-1]} as its last entry"
        )


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
    # One more entry, 0, is what the tokens of no sequence receive.
    padded = torch.nn.functional.pad(grad_sums, (0, 1))
    ids = _segment_ids(cu_seqlens, ctx.num_tokens)
    return padded.index_select(0, ids).to(ctx.dtype), None


if _NATIVE_DEVICES:
    torch.library.register_fake("megarl::segment_sum", _fake)
    torch.library.register_autograd(
        "megarl::segment_sum", _backward, setup_context=_save_for_backward
    )
