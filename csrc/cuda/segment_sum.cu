// segment_sum on CUDA: one block a sequence.
//
// 1. Thread i adds tokens i, i + kThreads, ... of its sequence in float64; the partial sums are then
//    folded in a fixed tree.  The order depends on the sequence's length alone, so equal inputs give
//    equal bits; it is not the CPU's order, so the two may differ in the last bits.
// 2. cu_seqlens is checked where it lies.  A check on the host would stall the stream once a
//    micro-batch; here a bad entry is printed with its numbers and the kernel traps.
// Only the stable ABI is used (no ATen/cuda, no c10/cuda): nvcc compiles this against a CPU torch.
#include "../common.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <cstdio>
#include <cuda_runtime.h>

namespace megarl {
namespace {

constexpr int kThreads = 256;  // a power of two: the tree below halves it

template <typename scalar_t, typename index_t>
__global__ void segment_sum_kernel(const scalar_t* values, const index_t* cu, int64_t num_tokens,
                                   double* sums) {
  const int64_t segment = blockIdx.x;
  const int64_t begin = cu[segment], end = cu[segment + 1];
  if (begin < 0 || begin > end || end > num_tokens) {
    if (threadIdx.x == 0) {
      printf("segment_sum: cu_seqlens must start at 0 or above, not decrease, and not exceed the "
             "%lld values; got %lld then %lld at entries %lld and %lld\n",
             (long long)num_tokens, (long long)begin, (long long)end, (long long)segment,
             (long long)segment + 1);
    }
    __syncthreads();  // the message is written before the trap ends the kernel
    __trap();
  }

  double sum = 0.0;
  for (int64_t t = begin + threadIdx.x; t < end; t += kThreads) sum += static_cast<double>(values[t]);

  __shared__ double partial[kThreads];
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) sums[segment] = partial[0];
}

template <typename scalar_t, typename index_t>
void launch(const Tensor& row, const Tensor& cu, Tensor& sums) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(row.get_device_index(), &stream));
  segment_sum_kernel<<<sums.numel(), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      row.const_data_ptr<scalar_t>(), cu.const_data_ptr<index_t>(), row.numel(),
      sums.mutable_data_ptr<double>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// values f32|f64 [T], cu_seqlens i32|i64 [S+1] -> f64 [S]
Tensor segment_sum_cuda(const Tensor& values, const Tensor& cu_seqlens) {
  check_packed("segment_sum", values, cu_seqlens);
  const torch::stable::accelerator::DeviceGuard guard(values.get_device_index());
  Tensor sums = torch::stable::new_empty(values, {cu_seqlens.numel() - 1}, ScalarType::Double);
  if (sums.numel() == 0) return sums;

  const Tensor row = torch::stable::contiguous(values), cu = torch::stable::contiguous(cu_seqlens);
  const bool narrow = cu.scalar_type() == ScalarType::Int;
  if (row.scalar_type() == ScalarType::Float) {
    narrow ? launch<float, int32_t>(row, cu, sums) : launch<float, int64_t>(row, cu, sums);
  } else {
    narrow ? launch<double, int32_t>(row, cu, sums) : launch<double, int64_t>(row, cu, sums);
  }
  return sums;
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) {
  m.impl("segment_sum", TORCH_BOX(&megarl::segment_sum_cuda));
}
