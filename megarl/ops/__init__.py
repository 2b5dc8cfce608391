"""Tensor operators with a compiled kernel and a pure-torch reference of the same meaning.

One file an op: signature, equation, reference, shape function, gradient. The reference is the
specification; the kernel, where one is loaded for the device, is only faster.
"""

from megarl.ops._native import (
    backends,
    call_counts,
    host_module,
    native_devices,
    native_library,
)
from megarl.ops.pack import RowPlan, pack_rows, pack_rows_ref
from megarl.ops.segment_sum import segment_sum, segment_sum_ref

KERNELS = ("segment_sum",)
"""The ops that have a kernel, on a CPU at least."""

__all__ = [
    "KERNELS",
    "RowPlan",
    "backends",
    "call_counts",
    "host_module",
    "native_devices",
    "native_library",
    "pack_rows",
    "pack_rows_ref",
    "segment_sum",
    "segment_sum_ref",
]
