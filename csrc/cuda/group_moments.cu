// group_moments on CUDA: one block a group, which reads all samples and counts its own.  That is
// N G reads where N would do, of thousands of samples; in return no atomic addition makes the order,
// and with it the bits, depend on the moment.
#include "../advantages.h"
#include "device.cuh"

namespace megarl {
namespace {

constexpr int kThreads = 256;

__device__ double smaller(double a, double b) { return b < a ? b : a; }
__device__ double larger(double a, double b) { return a < b ? b : a; }

// block_sum with another operation.
template <typename Pick>
__device__ double block_pick(double value, Pick pick) {
  __shared__ double partial[kThreads];
  partial[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      partial[threadIdx.x] = pick(partial[threadIdx.x], partial[threadIdx.x + half]);
    }
    __syncthreads();
  }
  const double picked = partial[0];
  __syncthreads();  // the buffer may be used again
  return picked;
}

__global__ void group_moments_kernel(const double* rewards, const int64_t* group,
                                     const bool* counted, int64_t num_samples, double* out) {
  const int64_t own = blockIdx.x, num_groups = gridDim.x;
  double n = 0.0, sum = 0.0, m2 = 0.0, low = INFINITY, high = -INFINITY;
  for (int64_t i = threadIdx.x; i < num_samples; i += kThreads) {
    if (group[i] < 0 || group[i] >= num_groups) {
      printf("group_moments: group must be in [0, %lld), got %lld at entry %lld\n",
             (long long)num_groups, (long long)group[i], (long long)i);
      __trap();
    }
    if (group[i] != own || !counted[i]) continue;
    n += 1.0;
    sum += rewards[i];
    low = smaller(low, rewards[i]);
    high = larger(high, rewards[i]);
  }
  n = block_sum<kThreads>(n);
  sum = block_sum<kThreads>(sum);
  low = block_pick(low, smaller);
  high = block_pick(high, larger);
  const double mean = n > 0 ? sum / n : 0.0;
  for (int64_t i = threadIdx.x; i < num_samples; i += kThreads) {
    const double deviation = rewards[i] - mean;
    if (group[i] == own && counted[i]) m2 += deviation * deviation;
  }
  m2 = block_sum<kThreads>(m2);
  if (threadIdx.x > 0) return;
  const double found[] = {n, mean, m2, low, high};
  for (int k = 0; k < 5; ++k) out[k * num_groups + own] = found[k];
}

// rewards f64 [N], group i64 [N], counted bool [N] -> f64 [5, G]: n, mean, m2, min, max
Tensor group_moments_cuda(const Tensor& rewards, const Tensor& group, const Tensor& counted,
                          int64_t num_groups) {
  check_group_moments(rewards, group, counted, num_groups);
  const torch::stable::accelerator::DeviceGuard guard(rewards.get_device_index());
  Tensor out = torch::stable::new_empty(rewards, {5, num_groups});
  if (num_groups == 0) return out;

  const Tensor r = torch::stable::contiguous(rewards), g = torch::stable::contiguous(group);
  const Tensor c = torch::stable::contiguous(counted);
  group_moments_kernel<<<num_groups, kThreads, 0, current_stream(r)>>>(
      r.const_data_ptr<double>(), g.const_data_ptr<int64_t>(), c.const_data_ptr<bool>(), r.numel(),
      out.mutable_data_ptr<double>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) {
  m.impl("group_moments", TORCH_BOX(&megarl::group_moments_cuda));
}
