// group_moments on the CPU: two passes over the samples in their order, by one thread.  A batch has
// thousands of samples, not millions, and the order of the additions is part of the op's definition.
#include "../advantages.h"

#include <algorithm>
#include <limits>

namespace megarl {
namespace {

// rewards f64 [N], group i64 [N], counted bool [N] -> f64 [5, G]: n, mean, m2, min, max
Tensor group_moments_cpu(const Tensor& rewards, const Tensor& group, const Tensor& counted,
                         int64_t num_groups) {
  check_group_moments(rewards, group, counted, num_groups);
  const Tensor r = torch::stable::contiguous(rewards), g = torch::stable::contiguous(group);
  const Tensor c = torch::stable::contiguous(counted);
  const double* reward = r.const_data_ptr<double>();
  const int64_t* of = g.const_data_ptr<int64_t>();
  const bool* counts = c.const_data_ptr<bool>();
  const int64_t num_samples = rewards.numel();
  for (int64_t i = 0; i < num_samples; ++i) {
    STD_TORCH_CHECK(of[i] >= 0 && of[i] < num_groups, "group_moments: group must be in [0, ",
                    num_groups, "), got ", of[i], " at entry ", i);
  }

  Tensor out = torch::stable::new_zeros(rewards, {5, num_groups});
  double* n = out.mutable_data_ptr<double>();
  double *mean = n + num_groups, *m2 = mean + num_groups;
  double *low = m2 + num_groups, *high = low + num_groups;
  std::fill(low, low + num_groups, std::numeric_limits<double>::infinity());
  std::fill(high, high + num_groups, -std::numeric_limits<double>::infinity());
  for (int64_t i = 0; i < num_samples; ++i) {
    if (!counts[i]) continue;
    const int64_t k = of[i];
    n[k] += 1.0;
    mean[k] += reward[i];
    low[k] = std::min(low[k], reward[i]);
    high[k] = std::max(high[k], reward[i]);
  }
  for (int64_t k = 0; k < num_groups; ++k) mean[k] = n[k] > 0 ? mean[k] / n[k] : 0.0;
  for (int64_t i = 0; i < num_samples; ++i) {
    if (!counts[i]) continue;
    const double deviation = reward[i] - mean[of[i]];
    m2[of[i]] += deviation * deviation;
  }
  return out;
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CPU, m) {
  m.impl("group_moments", TORCH_BOX(&megarl::group_moments_cpu));
}
