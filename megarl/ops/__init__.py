"""Tensor operators with a compiled kernel and a pure-torch reference of the same meaning.

One file an op: signature, equation, reference, shape function, gradient. The reference is the
specification; the kernel, where one is loaded for the device, is only faster.
"""

from megarl.ops._native import backends, call_counts, native_devices, native_library
from megarl.ops.logprob_entropy import logprob_entropy, logprob_entropy_ref
from megarl.ops.segment_sum import segment_sum, segment_sum_ref

KERNELS = ("logprob_entropy", "segment_sum")
"""The ops that have a kernel, on a CPU at least."""

__all__ = [
    "KERNELS",
    "backends",
    "call_counts",
    "logprob_entropy",
    "logprob_entropy_ref",
    "native_devices",
    "native_library",
    "segment_sum",
    "segment_sum_ref",
]
