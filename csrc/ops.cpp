// Every operator of the extension, one line each: this file is its table of contents.
//
// Implementations register themselves: csrc/cpu/<op>.cpp and csrc/cuda/<op>.cu.  The reference that
// defines what an op computes, its shape function and its gradient are Python: megarl/ops/<op>.py.
// Everything here uses torch's stable ABI only, so one binary loads in every torch from 2.10 on and
// in every Python, and a file compiles in about two seconds instead of half a minute.
#include "common.h"

STABLE_TORCH_LIBRARY(megarl, m) {
  m.def("delta_apply_(Tensor(a!) base, Tensor payload) -> ()");
  m.def("delta_encode_(Tensor(a!) base, Tensor new) -> Tensor");
  m.def("digest_copy_(Tensor(a!) place, Tensor source, bool read_back) -> Tensor");
  m.def("digest_partial(Tensor tensor, int[] full_shape, int[] offset) -> Tensor");
  m.def("fp8_block_quant(Tensor x, int block_n, int block_k, float eps, bool power_of_two) -> "
        "(Tensor codes, Tensor scales)");
  m.def("fp8_block_dequant(Tensor codes, Tensor scales, int block_n, int block_k, "
        "ScalarType dtype) -> Tensor");
  m.def(
      "gae(Tensor rewards, Tensor values, Tensor mask, Tensor cu_seqlens, Tensor bootstrap, "
      "float gamma, float lam, bool credit_previous) -> (Tensor, Tensor)");
  m.def(
      "gae_backward(Tensor grad_advantages, Tensor grad_returns, Tensor mask, Tensor cu_seqlens, "
      "float gamma, float lam, bool credit_previous) -> (Tensor, Tensor, Tensor)");
  m.def(
      "discounted_returns(Tensor rewards, Tensor mask, Tensor cu_seqlens, float gamma, "
      "bool credit_previous) -> Tensor");
  m.def("masked_moments(Tensor values, Tensor mask) -> Tensor");
  m.def("whiten(Tensor values, Tensor mask, float mean, float variance, float eps) -> Tensor");
  m.def("group_moments(Tensor rewards, Tensor group, Tensor counted, int num_groups) -> Tensor");
  m.def(
      "steps_to_go(Tensor step_rewards, Tensor step_ends, Tensor step_offsets, Tensor cu_seqlens, "
      "int num_tokens) -> Tensor");
  m.def(
      "logprob_entropy(Tensor logits, Tensor targets, int first_column, int vocab_size, "
      "float temperature) -> Tensor");
  m.def(
      "logprob_entropy_backward_(Tensor(a!) logits, Tensor targets, Tensor softmax, Tensor grads, "
      "int first_column, int vocab_size, float temperature) -> ()");
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
