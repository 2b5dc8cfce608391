"""Tensor operators with a compiled kernel and a pure-torch reference of the same meaning.

One file an op: signature, equation, reference, shape function, gradient. The reference is the
specification; the kernel, where one is loaded for the device, is only faster.
"""

from megarl.ops._delta_ref import delta_apply_ref_, delta_encode_ref_
from megarl.ops._native import (
    HOST_OPS,
    backends,
    call_counts,
    host_module,
    native_devices,
    native_library,
    runs_native,
    verify_all,
)
from megarl.ops._selfcheck import NativeMismatch
from megarl.ops.delta import delta_apply_, delta_encode_
from megarl.ops.digest import (
    digest,
    digest_copy_,
    digest_copy_ref_,
    digest_partial,
    digest_partial_ref,
    finish,
    merge,
)
from megarl.ops.fp8_block import (
    fp8_block_dequant,
    fp8_block_dequant_ref,
    fp8_block_quant,
    fp8_block_quant_ref,
)
from megarl.ops.gae import (
    discounted_returns,
    discounted_returns_ref,
    gae,
    gae_backward_ref,
    gae_ref,
)
from megarl.ops.group_moments import group_moments, group_moments_ref
from megarl.ops.logprob_entropy import logprob_entropy, logprob_entropy_ref
from megarl.ops.moments import masked_moments, masked_moments_ref, whiten, whiten_ref
from megarl.ops.pack import RowPlan, pack_rows, pack_rows_ref
from megarl.ops.policy_loss import PolicyLoss, PolicyRow, PolicyTerms, policy_loss, policy_sums
from megarl.ops.segment_sum import segment_sum, segment_sum_ref
from megarl.ops.steps_to_go import steps_to_go, steps_to_go_ref

KERNELS = (
    "delta_apply_",
    "delta_encode_",
    "digest_partial",
    "discounted_returns",
    "fp8_block_dequant",
    "fp8_block_quant",
    "gae",
    "gae_backward",
    "group_moments",
    "logprob_entropy",
    "logprob_entropy_backward_",
    "masked_moments",
    "policy_loss",
    "policy_sums",
    "segment_sum",
    "steps_to_go",
    "whiten",
)
"""The ops that have a kernel, on a CPU at least."""

__all__ = [
    "HOST_OPS",
    "KERNELS",
    "NativeMismatch",
    "PolicyLoss",
    "PolicyRow",
    "PolicyTerms",
    "RowPlan",
    "backends",
    "call_counts",
    "delta_apply_",
    "delta_apply_ref_",
    "delta_encode_",
    "delta_encode_ref_",
    "digest",
    "digest_copy_",
    "digest_copy_ref_",
    "digest_partial",
    "digest_partial_ref",
    "discounted_returns",
    "discounted_returns_ref",
    "finish",
    "fp8_block_dequant",
    "fp8_block_dequant_ref",
    "fp8_block_quant",
    "fp8_block_quant_ref",
    "gae",
    "gae_backward_ref",
    "gae_ref",
    "group_moments",
    "group_moments_ref",
    "host_module",
    "logprob_entropy",
    "logprob_entropy_ref",
    "masked_moments",
    "masked_moments_ref",
    "merge",
    "native_devices",
    "native_library",
    "pack_rows",
    "pack_rows_ref",
    "policy_loss",
    "policy_sums",
    "runs_native",
    "segment_sum",
    "segment_sum_ref",
    "steps_to_go",
    "steps_to_go_ref",
    "verify_all",
    "whiten",
    "whiten_ref",
]
