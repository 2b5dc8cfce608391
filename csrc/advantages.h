// Argument checks of the ops that advantages are made of.
#pragma once

#include "common.h"

#include <cmath>

namespace megarl {

inline void check_mask(const char* op, const char* name, const Tensor& mask, const Tensor& like) {
  check_row(op, name, mask, like);
  check_type(op, name, mask, "bool", ScalarType::Bool);
}

inline void check_finite(const char* op, const char* name, double value) {
  STD_TORCH_CHECK(std::isfinite(value), op, ": ", name, " must be finite, got ", value);
}

inline void check_real_row(const char* op, const char* name, const Tensor& x, const Tensor& like) {
  check_row(op, name, x, like);
  check_real(op, name, x);
}

// One entry a sequence.
inline void check_per_sequence(const char* op, const char* name, const Tensor& x,
                               const Tensor& cu_seqlens) {
  check_dim(op, name, x, 1);
  STD_TORCH_CHECK(x.numel() == cu_seqlens.numel() - 1, op, ": ", name, " must have ",
                  cu_seqlens.numel() - 1, " entries, one a sequence, got ", x.numel());
  check_device(op, name, x, cu_seqlens);
}

inline void check_gae(const Tensor& rewards, const Tensor& values, const Tensor& mask,
                      const Tensor& cu_seqlens, const Tensor& bootstrap, double gamma, double lam) {
  check_real_row("gae", "rewards", rewards, rewards);
  check_real_row("gae", "values", values, rewards);
  check_mask("gae", "mask", mask, rewards);
  check_cu_seqlens("gae", cu_seqlens, rewards);
  check_per_sequence("gae", "bootstrap", bootstrap, cu_seqlens);
  check_real("gae", "bootstrap", bootstrap);
  check_finite("gae", "gamma", gamma);
  check_finite("gae", "lam", lam);
}

inline void check_gae_backward(const Tensor& grad_advantages, const Tensor& grad_returns,
                               const Tensor& mask, const Tensor& cu_seqlens, double gamma,
                               double lam) {
  const char* op = "gae_backward";
  check_row(op, "grad_advantages", grad_advantages, grad_advantages);
  check_type(op, "grad_advantages", grad_advantages, "float64", ScalarType::Double);
  check_row(op, "grad_returns", grad_returns, grad_advantages);
  check_type(op, "grad_returns", grad_returns, "float64", ScalarType::Double);
  check_mask(op, "mask", mask, grad_advantages);
  check_cu_seqlens(op, cu_seqlens, grad_advantages);
  check_finite(op, "gamma", gamma);
  check_finite(op, "lam", lam);
}

inline void check_discounted_returns(const Tensor& rewards, const Tensor& mask,
                                     const Tensor& cu_seqlens, double gamma) {
  check_real_row("discounted_returns", "rewards", rewards, rewards);
  check_mask("discounted_returns", "mask", mask, rewards);
  check_cu_seqlens("discounted_returns", cu_seqlens, rewards);
  check_finite("discounted_returns", "gamma", gamma);
}

inline void check_masked_moments(const Tensor& values, const Tensor& mask) {
  check_real_row("masked_moments", "values", values, values);
  check_mask("masked_moments", "mask", mask, values);
}

inline void check_whiten(const Tensor& values, const Tensor& mask, double variance, double eps) {
  check_real_row("whiten", "values", values, values);
  check_mask("whiten", "mask", mask, values);
  STD_TORCH_CHECK(!(variance < 0), "whiten: variance must be at least 0, got ", variance);
  STD_TORCH_CHECK(!(eps < 0), "whiten: eps must be at least 0, got ", eps);
}

inline void check_group_moments(const Tensor& rewards, const Tensor& group, const Tensor& counted,
                                int64_t num_groups) {
  const char* op = "group_moments";
  check_dim(op, "rewards", rewards, 1);
  check_type(op, "rewards", rewards, "float64", ScalarType::Double);
  check_row(op, "group", group, rewards);
  check_type(op, "group", group, "int64", ScalarType::Long);
  check_mask(op, "counted", counted, rewards);
  STD_TORCH_CHECK(num_groups >= 0, op, ": num_groups must be at least 0, got ", num_groups);
}

inline void check_steps_to_go(const Tensor& step_rewards, const Tensor& step_ends,
                              const Tensor& step_offsets, const Tensor& cu_seqlens,
                              int64_t num_tokens) {
  const char* op = "steps_to_go";
  STD_TORCH_CHECK(num_tokens >= 0, op, ": num_tokens must be at least 0, got ", num_tokens);
  check_dim(op, "step_rewards", step_rewards, 1);
  check_type(op, "step_rewards", step_rewards, "float64", ScalarType::Double);
  check_dim(op, "step_ends", step_ends, 1);
  STD_TORCH_CHECK(step_ends.numel() == step_rewards.numel(), op, ": step_ends must have ",
                  step_rewards.numel(), " entries, one a step, got ", step_ends.numel());
  check_type(op, "step_ends", step_ends, "int64", ScalarType::Long);
  check_device(op, "step_ends", step_ends, step_rewards);
  check_cu_seqlens(op, cu_seqlens, step_rewards);
  check_dim(op, "step_offsets", step_offsets, 1);
  check_type(op, "step_offsets", step_offsets, "int32 or int64", ScalarType::Int, ScalarType::Long);
  STD_TORCH_CHECK(step_offsets.numel() == cu_seqlens.numel(), op, ": step_offsets must have ",
                  cu_seqlens.numel(), " entries like cu_seqlens, got ", step_offsets.numel());
  check_device(op, "step_offsets", step_offsets, step_rewards);
}

}  // namespace megarl
