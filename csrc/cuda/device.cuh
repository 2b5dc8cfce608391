// What the CUDA kernels share.  Only the stable ABI is used (no ATen/cuda, no c10/cuda), so that nvcc
// compiles them against a CPU build of torch.
//
// Nothing here reads device memory on the host: that would stall the stream once a micro-batch.  A bad
// argument that only the device can see is printed with its numbers, and the kernel traps.
#pragma once

#include "../common.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <cstdio>
#include <cuda_runtime.h>

namespace megarl {

inline cudaStream_t current_stream(const Tensor& on) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Checks what block `segment` of `num_segments` sees of `cu` [num_segments + 1].  All threads call it.
template <typename index_t>
__device__ void check_bounds(const char* op, const index_t* cu, int64_t num_segments,
                             int64_t segment, int64_t num_tokens) {
  const long long begin = cu[segment], end = cu[segment + 1];
  const bool starts = segment > 0 || begin == 0;
  const bool ends = segment + 1 < num_segments || end == num_tokens;
  if (starts && ends && begin >= 0 && begin <= end && end <= num_tokens) return;
  if (threadIdx.x == 0) {
    printf("%s: cu_seqlens must start at 0, not decrease, and end at the %lld tokens; got %lld then "
           "%lld at entries %lld and %lld of %lld\n",
           op, (long long)num_tokens, begin, end, (long long)segment, (long long)segment + 1,
           (long long)num_segments + 1);
  }
  __syncthreads();  // the message is written before the trap ends the kernel
  __trap();
}

// The sum over a block's threads, on thread 0, in an order that depends on nothing.  `kThreads`: of the
// block, a power of two.
template <int kThreads, typename T>
__device__ T block_sum(T value) {
  __shared__ T partial[kThreads];
  partial[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }
  const T sum = partial[0];
  __syncthreads();  // the buffer may be used again
  return sum;
}

}  // namespace megarl
