"""Argument checks of the references, in the words of the kernels' (csrc/common.h)."""

import math
from itertools import pairwise

import torch
from torch import Tensor


def check_type(op: str, name: str, x: Tensor, *accepted: torch.dtype) -> None:
    if x.dtype not in accepted:
        names = " or ".join(str(d).removeprefix("torch.") for d in accepted)
        raise RuntimeError(f"{op}: {name} must be {names}, got {x.dtype}")


def check_dim(op: str, name: str, x: Tensor, dim: int) -> None:
    if x.dim() != dim:
        raise RuntimeError(f"{op}: {name} must have {dim} dimension(s), got {x.dim()}")


def check_device(op: str, name: str, x: Tensor, like: Tensor) -> None:
    if x.device != like.device:
        raise RuntimeError(
            f"{op}: {name} must be on the device of the others, {like.device}, got {x.device}"
        )


def check_row(op: str, name: str, x: Tensor, like: Tensor) -> None:
    """A row of as many tokens as `like`."""
    check_dim(op, name, x, 1)
    if x.numel() != like.numel():
        raise RuntimeError(
            f"{op}: {name} must have {like.numel()} tokens like the others, got {x.numel()}"
        )
    check_device(op, name, x, like)


def check_real(op: str, name: str, x: Tensor) -> None:
    check_type(op, name, x, torch.float32, torch.float64)


def check_mask(op: str, name: str, mask: Tensor, like: Tensor) -> None:
    check_row(op, name, mask, like)
    check_type(op, name, mask, torch.bool)


def check_real_row(op: str, name: str, x: Tensor, like: Tensor) -> None:
    check_row(op, name, x, like)
    check_real(op, name, x)


def check_per_sequence(op: str, name: str, x: Tensor, cu_seqlens: Tensor) -> None:
    """One entry a sequence."""
    check_dim(op, name, x, 1)
    count = cu_seqlens.numel() - 1
    if x.numel() != count:
        raise RuntimeError(
            f"{op}: {name} must have {count} entries, one a sequence, got {x.numel()}"
        )
    check_device(op, name, x, cu_seqlens)


def check_finite(op: str, name: str, value: float) -> None:
    if not math.isfinite(value):
        raise RuntimeError(f"{op}: {name} must be finite, got {value}")


def check_cu_seqlens(op: str, cu_seqlens: Tensor, like: Tensor) -> None:
    """All that is known without reading the entries."""
    check_dim(op, "cu_seqlens", cu_seqlens, 1)
    check_type(op, "cu_seqlens", cu_seqlens, torch.int32, torch.int64)
    if cu_seqlens.numel() == 0:
        raise RuntimeError(f"{op}: cu_seqlens must have at least 1 entry, got 0")
    check_device(op, "cu_seqlens", cu_seqlens, like)


def check_bounds(
    op: str, cu_seqlens: Tensor, num_tokens: int, name: str = "cu_seqlens", unit: str = "tokens"
) -> None:
    """Reads the entries, for which an accelerator must stop: only the references pay that."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise RuntimeError(f"{op}: {name} must start at 0, got {bounds[0]}")
    for i, (before, after) in enumerate(pairwise(bounds), start=1):
        if before > after:
            raise RuntimeError(
                f"{op}: {name} must not decrease, "
                f"got {before} then {after} at entries {i - 1} and {i}"
            )
    if bounds[-1] != num_tokens:
        raise RuntimeError(
            f"{op}: {name} must end at the {num_tokens} {unit}, got {bounds[-1]} as its last entry"
        )
