// What encoding and applying a delta share on CUDA: sums of chunks' lengths, and numbers for the host.
#pragma once

#include "../delta_format.h"
#include "device.cuh"

namespace megarl {

constexpr int kSumThreads = 1024;

// bounds[k] is the sum of the first k of `count` sizes.  One thread block.
static __global__ void bounds_kernel(const int64_t* sizes, int64_t count, int64_t* bounds) {
  __shared__ int64_t sums[kSumThreads];
  int64_t before = 0;
  for (int64_t first = 0; first < count; first += kSumThreads) {
    const int64_t i = first + threadIdx.x;
    sums[threadIdx.x] = i < count ? sizes[i] : 0;
    __syncthreads();
    for (int reach = 1; reach < kSumThreads; reach *= 2) {
      const int64_t more = threadIdx.x >= reach ? sums[threadIdx.x - reach] : 0;
      __syncthreads();
      sums[threadIdx.x] += more;
      __syncthreads();
    }
    if (i < count) bounds[i + 1] = before + sums[threadIdx.x];
    before += sums[kSumThreads - 1];
    __syncthreads();  // before the next sizes are put there
  }
  if (threadIdx.x == 0) bounds[0] = 0;
}

// i64 [C] -> i64 [C + 1]
inline Tensor bounds_of(const Tensor& sizes) {
  Tensor bounds = torch::stable::new_empty(sizes, {sizes.numel() + 1}, ScalarType::Long);
  bounds_kernel<<<1, kSumThreads, 0, current_stream(sizes)>>>(
      sizes.const_data_ptr<int64_t>(), sizes.numel(), bounds.mutable_data_ptr<int64_t>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return bounds;
}

// Entry `index` of i64 numbers.  Waits for the device.
inline int64_t read_number(const Tensor& numbers, int64_t index) {
  int64_t number = 0;
  STD_CUDA_CHECK(cudaMemcpyAsync(&number, numbers.const_data_ptr<int64_t>() + index, sizeof(number),
                                 cudaMemcpyDeviceToHost, current_stream(numbers)));
  STD_CUDA_CHECK(cudaStreamSynchronize(current_stream(numbers)));
  return number;
}

inline void copy_on_device(void* to, const void* from, int64_t num_bytes, const Tensor& on) {
  STD_CUDA_CHECK(
      cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToDevice, current_stream(on)));
}

}  // namespace megarl
