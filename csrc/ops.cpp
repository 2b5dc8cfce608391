// Every operator of the extension, one line each: this file is its table of contents.
//
// Implementations register themselves: csrc/cpu/<op>.cpp and csrc/cuda/<op>.cu.  The reference that
// defines what an op computes, its shape function and its gradient are Python: megarl/ops/<op>.py.
// Everything here uses torch's stable ABI only, so one binary loads in every torch from 2.10 on and
// in every Python, and a file compiles in about two seconds instead of half a minute.
#include "common.h"

STABLE_TORCH_LIBRARY(megarl, m) {
  m.def("digest_partial(Tensor tensor, int[] full_shape, int[] offset) -> Tensor");
  m.def("fp8_block_quant(Tensor x, int block_n, int block_k, float eps, bool power_of_two) -> "
        "(Tensor codes, Tensor scales)");
  m.def("fp8_block_dequant(Tensor codes, Tensor scales, int block_n, int block_k, "
        "ScalarType dtype) -> Tensor");
  m.def("segment_sum(Tensor values, Tensor cu_seqlens) -> Tensor");
  m.def(
      "policy_sums(Tensor logprobs, Tensor old_logprobs, Tensor advantages, Tensor weight, "
      "Tensor mask, Tensor cu_seqlens, Tensor? rollout_logprobs, Tensor? ref_logprobs, "
      "Tensor? correction, Tensor? entropy, Tensor? selected, Tensor parameters, int objective, "
      "int kl_type, int kl_weight, int opsm, bool all_metrics) -> Tensor");
  m.def(
      "policy_loss(Tensor logprobs, Tensor old_logprobs, Tensor advantages, Tensor weight, "
      "Tensor mask, Tensor cu_seqlens, Tensor? rollout_logprobs, Tensor? ref_logprobs, "
      "Tensor? correction, Tensor? entropy, Tensor? selected, Tensor parameters, int objective, "
      "int kl_type, int kl_weight, int opsm, bool all_metrics, Tensor? sequence_sums) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
}
