// steps_to_go on the CPU.  A sequence is one thread's: the rewards are laid where their steps end, then
// summed from the last token to the first.
#include "../advantages.h"
#include "bounds.h"

namespace megarl {
namespace {

// step_rewards f64 [P], step_ends i64 [P], step_offsets i32|i64 [S+1], cu_seqlens i32|i64 [S+1]
//   -> f64 [T]
Tensor steps_to_go_cpu(const Tensor& step_rewards, const Tensor& step_ends,
                       const Tensor& step_offsets, const Tensor& cu_seqlens, int64_t num_tokens) {
  const char* op = "steps_to_go";
  check_steps_to_go(step_rewards, step_ends, step_offsets, cu_seqlens, num_tokens);
  const std::vector<int64_t> bounds = checked_bounds(op, cu_seqlens, num_tokens);
  const std::vector<int64_t> steps =
      checked_bounds(op, step_offsets, step_rewards.numel(), "step_offsets", "steps");
  const Tensor rewards = torch::stable::contiguous(step_rewards);
  const Tensor ends = torch::stable::contiguous(step_ends);
  const double* reward = rewards.const_data_ptr<double>();
  const int64_t* end = ends.const_data_ptr<int64_t>();
  for (size_t s = 0; s + 1 < bounds.size(); ++s) {
    const int64_t length = bounds[s + 1] - bounds[s];
    for (int64_t j = steps[s]; j < steps[s + 1]; ++j) {
      STD_TORCH_CHECK(end[j] >= 0 && end[j] < length, op, ": step_ends must be in [0, ", length,
                      "), the tokens of sequence ", s, ", got ", end[j], " at entry ", j);
    }
  }

  Tensor out = torch::stable::new_zeros(step_rewards, {num_tokens});
  double* to_go = out.mutable_data_ptr<double>();
  for_each_sequence(bounds, [&](int64_t s) {
    for (int64_t j = steps[s]; j < steps[s + 1]; ++j) to_go[bounds[s] + end[j]] += reward[j];
    double later = 0.0;
    for (int64_t t = bounds[s + 1] - 1; t >= bounds[s]; --t) to_go[t] = later = later + to_go[t];
  });
  return out;
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CPU, m) {
  m.impl("steps_to_go", TORCH_BOX(&megarl::steps_to_go_cpu));
}
