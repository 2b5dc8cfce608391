// gae, its adjoint, and discounted_returns on the CPU.
//
// 1. A sequence is one thread's, walked once, token by token, in float64 (gae_math.h): neither the
//    thread count nor the packing changes a bit, and the reference is met bit for bit.
// 2. The chain of dependent operations is two a token, about as long as it takes to bring the token's
//    25 bytes to memory and back: a parallel scan over the tokens would add work and save no time.
#include "pages.h"
#include "../advantages.h"
#include "../gae_math.h"
#include "bounds.h"

#include <tuple>

namespace megarl {
namespace {

double entry(const Tensor& x, int64_t i) {
  return x.scalar_type() == ScalarType::Float ? static_cast<double>(x.const_data_ptr<float>()[i])
                                              : x.const_data_ptr<double>()[i];
}

template <typename reward_t, typename value_t>
void walk(const Tensor& rewards, const Tensor& values, const bool* mask,
          const std::vector<int64_t>& bounds, const Tensor& bootstrap, const GaeSettings& settings,
          double* advantages, double* returns) {
  const reward_t* r = rewards.const_data_ptr<reward_t>();
  const value_t* v = values.const_data_ptr<value_t>();
  for_each_sequence(bounds, [&](int64_t s) {
    GaeState state{entry(bootstrap, s)};
    const GaeSettings own = settings;
    for (int64_t t = bounds[s + 1] - 1; t >= bounds[s]; --t) {
      gae_step(own, state, static_cast<double>(r[t]), static_cast<double>(v[t]), mask[t],
               advantages[t], returns[t]);
    }
  });
}

// rewards, values f32|f64 [T], mask bool [T], cu_seqlens i32|i64 [S+1], bootstrap f32|f64 [S]
//   -> advantages, returns f64 [T]
std::tuple<Tensor, Tensor> gae_cpu(const Tensor& rewards, const Tensor& values, const Tensor& mask,
                                   const Tensor& cu_seqlens, const Tensor& bootstrap, double gamma,
                                   double lam, bool credit_previous) {
  check_gae(rewards, values, mask, cu_seqlens, bootstrap, gamma, lam);
  const std::vector<int64_t> bounds = checked_bounds("gae", cu_seqlens, rewards.numel());

  Tensor advantages = torch::stable::new_empty(rewards, {rewards.numel()}, ScalarType::Double);
  advise_large_pages(advantages);
  Tensor returns = torch::stable::new_empty(rewards, {rewards.numel()}, ScalarType::Double);
  advise_large_pages(returns);
  if (rewards.numel() == 0) return {advantages, returns};

  const Tensor r = torch::stable::contiguous(rewards), v = torch::stable::contiguous(values);
  const Tensor m = torch::stable::contiguous(mask), after = torch::stable::contiguous(bootstrap);
  const GaeSettings settings{gamma, gamma * lam, credit_previous};
  const bool narrow_rewards = r.scalar_type() == ScalarType::Float;
  const bool narrow_values = v.scalar_type() == ScalarType::Float;
  const auto of_types = narrow_rewards
                            ? (narrow_values ? walk<float, float> : walk<float, double>)
                            : (narrow_values ? walk<double, float> : walk<double, double>);
  of_types(r, v, m.const_data_ptr<bool>(), bounds, after, settings,
           advantages.mutable_data_ptr<double>(), returns.mutable_data_ptr<double>());
  return {advantages, returns};
}

// grad_advantages, grad_returns f64 [T], mask bool [T], cu_seqlens i32|i64 [S+1]
//   -> grad_rewards, grad_values f64 [T], grad_bootstrap f64 [S]
std::tuple<Tensor, Tensor, Tensor> gae_backward_cpu(const Tensor& grad_advantages,
                                                    const Tensor& grad_returns, const Tensor& mask,
                                                    const Tensor& cu_seqlens, double gamma,
                                                    double lam, bool credit_previous) {
  check_gae_backward(grad_advantages, grad_returns, mask, cu_seqlens, gamma, lam);
  const int64_t num_tokens = grad_advantages.numel(), num_segments = cu_seqlens.numel() - 1;
  const std::vector<int64_t> bounds = checked_bounds("gae_backward", cu_seqlens, num_tokens);

  Tensor of_rewards = torch::stable::new_empty(grad_advantages, {num_tokens});
  advise_large_pages(of_rewards);
  Tensor of_values = torch::stable::new_empty(grad_advantages, {num_tokens});
  advise_large_pages(of_values);
  Tensor of_bootstrap = torch::stable::new_zeros(grad_advantages, {num_segments});
  if (num_tokens == 0) return {of_rewards, of_values, of_bootstrap};

  const Tensor ga = torch::stable::contiguous(grad_advantages);
  const Tensor gr = torch::stable::contiguous(grad_returns);
  const Tensor m = torch::stable::contiguous(mask);
  const double* a = ga.const_data_ptr<double>();
  const double* b = gr.const_data_ptr<double>();
  const bool* trained = m.const_data_ptr<bool>();
  double* grad_r = of_rewards.mutable_data_ptr<double>();
  double* grad_v = of_values.mutable_data_ptr<double>();
  double* grad_b = of_bootstrap.mutable_data_ptr<double>();
  const GaeSettings settings{gamma, gamma * lam, credit_previous};
  for_each_sequence(bounds, [&](int64_t s) {
    AdjointState state;
    for (int64_t t = bounds[s]; t < bounds[s + 1]; ++t) {
      adjoint_step(settings, state, a[t], b[t], trained[t], grad_r[t], grad_v[t]);
    }
    grad_b[s] = settings.gamma * state.before;
  });
  return {of_rewards, of_values, of_bootstrap};
}

template <typename scalar_t>
void walk_returns(const Tensor& rewards, const bool* mask, const std::vector<int64_t>& bounds,
                  double gamma, bool credit_previous, double* returns) {
  const scalar_t* r = rewards.const_data_ptr<scalar_t>();
  for_each_sequence(bounds, [&](int64_t s) {
    ReturnsState state;
    for (int64_t t = bounds[s + 1] - 1; t >= bounds[s]; --t) {
      returns[t] = returns_step(gamma, credit_previous, state, static_cast<double>(r[t]), mask[t]);
    }
  });
}

// rewards f32|f64 [T], mask bool [T], cu_seqlens i32|i64 [S+1] -> f64 [T]
Tensor discounted_returns_cpu(const Tensor& rewards, const Tensor& mask, const Tensor& cu_seqlens,
                              double gamma, bool credit_previous) {
  check_discounted_returns(rewards, mask, cu_seqlens, gamma);
  const std::vector<int64_t> bounds =
      checked_bounds("discounted_returns", cu_seqlens, rewards.numel());

  Tensor returns = torch::stable::new_empty(rewards, {rewards.numel()}, ScalarType::Double);
  advise_large_pages(returns);
  if (rewards.numel() == 0) return returns;

  const Tensor r = torch::stable::contiguous(rewards), m = torch::stable::contiguous(mask);
  const auto of_type =
      r.scalar_type() == ScalarType::Float ? walk_returns<float> : walk_returns<double>;
  of_type(r, m.const_data_ptr<bool>(), bounds, gamma, credit_previous,
          returns.mutable_data_ptr<double>());
  return returns;
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CPU, m) {
  m.impl("gae", TORCH_BOX(&megarl::gae_cpu));
  m.impl("gae_backward", TORCH_BOX(&megarl::gae_backward_cpu));
  m.impl("discounted_returns", TORCH_BOX(&megarl::discounted_returns_cpu));
}
