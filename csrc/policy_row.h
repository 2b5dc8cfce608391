// A packed row as the policy-loss kernels take it: checked arguments, and where things lie.
#pragma once

#include "common.h"
#include "policy_objectives.h"

#include <optional>
#include <tuple>

namespace megarl {
namespace policy {

// What both ops take.  T tokens, S sequences; rows [T] of one type f32|f64, masks bool [T].
struct Arguments {
  Tensor logprobs, old_logprobs, advantages, weight, mask, cu_seqlens;
  std::optional<Tensor> rollout_logprobs, ref_logprobs, correction, entropy, selected;
  Choices choices;
  Parameters parameters;
};

// Pointers into the row; null where the loss does not read it.
template <typename T>
struct View {
  const T *logprobs, *old_logprobs, *advantages, *weight;
  const T *rollout_logprobs, *ref_logprobs, *correction, *entropy;
  const uint8_t *mask, *selected;
  bool checks_entropy;  // one that is not finite drops its token
};

inline Tensor checked_row(const char* op, const char* name, const Tensor& x, const Tensor& like) {
  check_row(op, name, x, like);
  STD_TORCH_CHECK(x.scalar_type() == like.scalar_type(), op, ": ", name, " must be ",
                  like.scalar_type(), " like logprobs, got ", x.scalar_type());
  return torch::stable::contiguous(x);
}
inline Tensor checked_mask(const char* op, const char* name, const Tensor& x, const Tensor& like) {
  check_row(op, name, x, like);
  check_type(op, name, x, "bool", ScalarType::Bool);
  return torch::stable::contiguous(x);
}
inline std::optional<Tensor> checked_row(const char* op, const char* name,
                                         const std::optional<Tensor>& x, const Tensor& like) {
  if (!x.has_value()) return x;
  return checked_row(op, name, *x, like);
}

inline void check_choice(const char* op, const char* name, int64_t value, int64_t count) {
  STD_TORCH_CHECK(value >= 0 && value < count, op, ": ", name, " must be 0 to ", count - 1, ", got ",
                  value);
}
inline void check_given(const char* op, const char* name, const std::optional<Tensor>& x, bool needed) {
  STD_TORCH_CHECK(x.has_value() || !needed, op, ": ", name, " must be given, the loss reads it");
}

// Parameters f64 [kNumParameters] on the host.
inline Parameters checked_parameters(const char* op, const Tensor& x) {
  check_dim(op, "parameters", x, 1);
  check_type(op, "parameters", x, "float64", ScalarType::Double);
  STD_TORCH_CHECK(x.numel() == kNumParameters && x.is_cpu(), op, ": parameters must be ",
                  kNumParameters, " numbers on the host, got ", x.numel());
  const Tensor numbers = torch::stable::contiguous(x);
  Parameters p;
  std::memcpy(&p, numbers.const_data_ptr<double>(), sizeof(p));
  return p;
}

inline void check_needed(const char* op, const Arguments& a) {
  const Choices& c = a.choices;
  check_given(op, "rollout_logprobs", a.rollout_logprobs,
              c.objective == kMinirl || c.opsm == kAgainstRollout || a.correction.has_value());
  check_given(op, "ref_logprobs", a.ref_logprobs, c.kl_type != kNoKl);
  check_given(op, "entropy", a.entropy, a.parameters.entropy_coef != 0);
  check_given(op, "selected", a.selected, c.objective == kKlCov);
}

inline Arguments checked_arguments(const char* op, const Tensor& logprobs, const Tensor& old_logprobs,
                                   const Tensor& advantages, const Tensor& weight,
                                   const Tensor& mask, const Tensor& cu_seqlens,
                                   const std::optional<Tensor>& rollout_logprobs,
                                   const std::optional<Tensor>& ref_logprobs,
                                   const std::optional<Tensor>& correction,
                                   const std::optional<Tensor>& entropy,
                                   const std::optional<Tensor>& selected, const Tensor& parameters,
                                   int64_t objective, int64_t kl_type, int64_t kl_weight,
                                   int64_t opsm, bool all_metrics) {
  check_dim(op, "logprobs", logprobs, 1);
  check_real(op, "logprobs", logprobs);
  check_cu_seqlens(op, cu_seqlens, logprobs);
  check_choice(op, "objective", objective, kNumObjectives);
  check_choice(op, "kl_type", kl_type, kNumKlTypes);
  check_choice(op, "kl_weight", kl_weight, kNumKlWeights);
  check_choice(op, "opsm", opsm, kNumOpsm);
  const auto row = [&](const char* name, const auto& x) {
    return checked_row(op, name, x, logprobs);
  };
  Arguments a{torch::stable::contiguous(logprobs),
              row("old_logprobs", old_logprobs),
              row("advantages", advantages),
              row("weight", weight),
              checked_mask(op, "mask", mask, logprobs),
              torch::stable::contiguous(cu_seqlens),
              row("rollout_logprobs", rollout_logprobs),
              row("ref_logprobs", ref_logprobs),
              row("correction", correction),
              row("entropy", entropy),
              std::nullopt,
              {static_cast<int>(objective), static_cast<int>(kl_type), static_cast<int>(kl_weight),
               static_cast<int>(opsm), all_metrics},
              checked_parameters(op, parameters)};
  if (selected.has_value()) a.selected = checked_mask(op, "selected", *selected, logprobs);
  check_needed(op, a);
  return a;
}

// The arguments both ops begin with, as their schemas list them (ops.cpp).
#define MEGARL_POLICY_SIGNATURE                                                                      \
  const Tensor &logprobs, const Tensor &old_logprobs, const Tensor &advantages,                      \
      const Tensor &weight, const Tensor &mask, const Tensor &cu_seqlens,                            \
      const std::optional<Tensor>&rollout_logprobs, const std::optional<Tensor>&ref_logprobs,        \
      const std::optional<Tensor>&correction, const std::optional<Tensor>&entropy,                   \
      const std::optional<Tensor>&selected, const Tensor &parameters, int64_t objective,             \
      int64_t kl_type, int64_t kl_weight, int64_t opsm, bool all_metrics
#define MEGARL_POLICY_ARGUMENTS                                                                      \
  logprobs, old_logprobs, advantages, weight, mask, cu_seqlens, rollout_logprobs, ref_logprobs,      \
      correction, entropy, selected, parameters, objective, kl_type, kl_weight, opsm, all_metrics

// Sums of whole sequences from an earlier call, f64 [kNumSums, S].
inline Tensor checked_sums(const char* op, const Tensor& sums, const Arguments& a) {
  check_dim(op, "sequence_sums", sums, 2);
  check_type(op, "sequence_sums", sums, "float64", ScalarType::Double);
  STD_TORCH_CHECK(sums.size(0) == kNumSums && sums.size(1) == a.cu_seqlens.numel() - 1, op,
                  ": sequence_sums must be [", int(kNumSums), ", ", a.cu_seqlens.numel() - 1,
                  "], got [", sums.size(0), ", ", sums.size(1), "]");
  check_device(op, "sequence_sums", sums, a.logprobs);
  return torch::stable::contiguous(sums);
}

// What policy_loss returns.
struct Output {
  Tensor grad, grad_entropy, sums, totals;

  template <typename T>
  T* entropy_gradient() {
    return grad_entropy.numel() == 0 ? nullptr : grad_entropy.mutable_data_ptr<T>();
  }
};

inline Output new_output(const char* op, const Arguments& a, const std::optional<Tensor>& sums) {
  using torch::stable::new_empty;
  const Tensor& row = a.logprobs;
  const int64_t num_tokens = row.numel(), num_segments = a.cu_seqlens.numel() - 1;
  const bool has_entropy = a.parameters.entropy_coef != 0;
  Tensor whole = torch::stable::new_zeros(row, {kNumSums, num_segments}, ScalarType::Double);
  if (sums.has_value()) torch::stable::copy_(whole, checked_sums(op, *sums, a));
  return {new_empty(row, {num_tokens}), new_empty(row, {has_entropy ? num_tokens : 0}), whole,
          new_empty(row, {kNumTotals}, ScalarType::Double)};
}

template <typename T>
const T* pointer(const std::optional<Tensor>& x) {
  return x.has_value() ? x->const_data_ptr<T>() : nullptr;
}

template <typename T>
View<T> view_of(const Arguments& a) {
  const bool reads_rollout = a.choices.objective == kMinirl || a.choices.opsm == kAgainstRollout ||
                             a.correction.has_value();
  return {a.logprobs.const_data_ptr<T>(),
          a.old_logprobs.const_data_ptr<T>(),
          a.advantages.const_data_ptr<T>(),
          a.weight.const_data_ptr<T>(),
          reads_rollout ? pointer<T>(a.rollout_logprobs) : nullptr,
          a.choices.kl_type == kNoKl ? nullptr : pointer<T>(a.ref_logprobs),
          pointer<T>(a.correction),
          pointer<T>(a.entropy),
          static_cast<const uint8_t*>(a.mask.const_data_ptr()),
          a.selected.has_value() ? static_cast<const uint8_t*>(a.selected->const_data_ptr()) : nullptr,
          a.parameters.entropy_coef != 0};
}

}  // namespace policy
}  // namespace megarl
