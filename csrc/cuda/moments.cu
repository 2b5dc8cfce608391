// masked_moments and whiten on CUDA.
//
// One block of threads for each kMomentsBlock tokens: their mean, then the deviations from it, each
// summed in a fixed tree (device.cuh).  One thread then merges the blocks in the CPU's tree.
#include "../advantages.h"
#include "../moments_math.h"
#include "device.cuh"

#include <algorithm>
#include <cmath>

namespace megarl {
namespace {

constexpr int kThreads = 256;

template <typename scalar_t>
__global__ void block_moments_kernel(const scalar_t* values, const bool* mask, int64_t num_tokens,
                                     double* parts) {
  const int64_t begin = blockIdx.x * kMomentsBlock;
  const int64_t end = begin + kMomentsBlock < num_tokens ? begin + kMomentsBlock : num_tokens;
  __shared__ MomentsPart part;
  double count = 0.0, sum = 0.0, squares = 0.0;
  for (int64_t t = begin + threadIdx.x; t < end; t += kThreads) {
    count += mask[t] ? 1.0 : 0.0;
    sum += mask[t] ? static_cast<double>(values[t]) : 0.0;
  }
  count = block_sum<kThreads>(count);
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) part = {count, count > 0 ? sum / count : 0.0, 0.0};
  __syncthreads();
  for (int64_t t = begin + threadIdx.x; t < end; t += kThreads) {
    const double deviation = static_cast<double>(values[t]) - part.mean;
    squares += mask[t] ? deviation * deviation : 0.0;
  }
  squares = block_sum<kThreads>(squares);
  if (threadIdx.x == 0) {
    part.m2 = squares;
    reinterpret_cast<MomentsPart*>(parts)[blockIdx.x] = part;
  }
}

__global__ void merge_kernel(double* parts, int64_t count) {
  merge_tree(reinterpret_cast<MomentsPart*>(parts), count);
}

// values f32|f64 [T], mask bool [T] -> f64 [3]
Tensor masked_moments_cuda(const Tensor& values, const Tensor& mask) {
  check_masked_moments(values, mask);
  const torch::stable::accelerator::DeviceGuard guard(values.get_device_index());
  const int64_t num_tokens = values.numel();
  const int64_t num_blocks = (num_tokens + kMomentsBlock - 1) / kMomentsBlock;
  if (num_blocks == 0) return torch::stable::new_zeros(values, {3}, ScalarType::Double);

  Tensor parts = torch::stable::new_empty(values, {num_blocks, 3}, ScalarType::Double);
  const Tensor row = torch::stable::contiguous(values), m = torch::stable::contiguous(mask);
  double* found = parts.mutable_data_ptr<double>();
  if (row.scalar_type() == ScalarType::Float) {
    block_moments_kernel<<<num_blocks, kThreads, 0, current_stream(row)>>>(
        row.const_data_ptr<float>(), m.const_data_ptr<bool>(), num_tokens, found);
  } else {
    block_moments_kernel<<<num_blocks, kThreads, 0, current_stream(row)>>>(
        row.const_data_ptr<double>(), m.const_data_ptr<bool>(), num_tokens, found);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  merge_kernel<<<1, 1, 0, current_stream(row)>>>(found, num_blocks);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return torch::stable::clone(torch::stable::select(parts, 0, 0));
}

template <typename scalar_t>
__global__ void whiten_kernel(const scalar_t* values, const bool* mask, double mean,
                              double deviation, int64_t num_tokens, double* out) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x; t < num_tokens; t += stride) {
    out[t] = mask[t] ? (static_cast<double>(values[t]) - mean) / deviation : 0.0;
  }
}

// values f32|f64 [T], mask bool [T] -> f64 [T]
Tensor whiten_cuda(const Tensor& values, const Tensor& mask, double mean, double variance,
                   double eps) {
  check_whiten(values, mask, variance, eps);
  const torch::stable::accelerator::DeviceGuard guard(values.get_device_index());
  const int64_t num_tokens = values.numel();
  Tensor out = torch::stable::new_empty(values, {num_tokens}, ScalarType::Double);
  if (num_tokens == 0) return out;

  const Tensor row = torch::stable::contiguous(values), m = torch::stable::contiguous(mask);
  const double deviation = std::sqrt(variance + eps);
  const int64_t num_blocks = std::min<int64_t>((num_tokens + kThreads - 1) / kThreads, 65535);
  double* found = out.mutable_data_ptr<double>();
  if (row.scalar_type() == ScalarType::Float) {
    whiten_kernel<<<num_blocks, kThreads, 0, current_stream(row)>>>(
        row.const_data_ptr<float>(), m.const_data_ptr<bool>(), mean, deviation, num_tokens, found);
  } else {
    whiten_kernel<<<num_blocks, kThreads, 0, current_stream(row)>>>(
        row.const_data_ptr<double>(), m.const_data_ptr<bool>(), mean, deviation, num_tokens, found);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) {
  m.impl("masked_moments", TORCH_BOX(&megarl::masked_moments_cuda));
  m.impl("whiten", TORCH_BOX(&megarl::whiten_cuda));
}
