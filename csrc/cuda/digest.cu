// digest_partial on CUDA: one warp a block of 1,024 words, for each run of the slice.
//
// 1. Lane l takes words l, l + 32, ... of the block, so that a warp reads neighbouring addresses; the
//    multiplication by the block's key is done once, on lane 0.
// 2. Every thread block leaves one number, which a second kernel adds up.  All of it is exact, so the
//    order does not matter and the value is the CPU's.
#include "../digest_math.h"
#include "device.cuh"

#include <algorithm>

namespace megarl {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kMaxGrid = 4096;

__device__ const WordKeys kKeys = make_word_keys();

// Word `word` of a block, as far as it lies in the bytes [at, end) of the block, plus 1 a byte.
// `bytes` is where byte 0 of the block would be.
__device__ uint64_t word_plus_ones(const unsigned char* bytes, int64_t word, int64_t at, int64_t end,
                                   bool aligned) {
  const int64_t first = 4 * word;
  if (aligned && first >= at && first + 4 <= end) {
    return *reinterpret_cast<const uint32_t*>(bytes + first) + kByteOnes;
  }
  uint64_t sum = 0;
  for (int k = 0; k < 4; ++k) {
    if (first + k >= at && first + k < end) sum += (uint64_t{1} + bytes[first + k]) << (8 * k);
  }
  return sum;
}

// Block `block`'s part of the run [begin, end), bytes of the whole tensor; on lane 0.  `run`: where
// the run lies in memory.
__device__ uint64_t sum_block(const unsigned char* run, int64_t begin, int64_t end, int64_t block) {
  const int64_t origin = block * kBlockBytes;
  const int64_t at = max(begin - origin, int64_t{0}), stop = min(end - origin, kBlockBytes);
  const unsigned char* bytes = run + (origin - begin);
  const bool aligned = reinterpret_cast<uintptr_t>(bytes) % 4 == 0;
  uint64_t low = 0, high = 0;  // products have up to 65 bits: their halves are summed
  for (int64_t word = at / 4 + threadIdx.x % 32; 4 * word < stop; word += 32) {
    const uint64_t value = word_plus_ones(bytes, word, at, stop, aligned), key = kKeys.at[word];
    low += (value & 0xffff) * key;
    high += (value >> 16) * key;
  }
  for (int half = 16; half > 0; half /= 2) {
    low += __shfl_down_sync(0xffffffff, low, half);
    high += __shfl_down_sync(0xffffffff, high, half);
  }
  return times_block_key((static_cast<uint128_t>(high) << 16) + low, block);
}

__device__ void store_block_total(uint64_t total, uint64_t* out) {
  __shared__ uint64_t partial[kThreads];
  partial[threadIdx.x] = total;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      partial[threadIdx.x] = add_mod(partial[threadIdx.x], partial[threadIdx.x + half]);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *out = partial[0];
}

// A run touches at most `blocks_per_run` blocks.
__global__ void digest_kernel(const unsigned char* bytes, Runs runs, int64_t blocks_per_run,
                              uint64_t* partials) {
  uint64_t total = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t piece = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
       piece < runs.num_runs * blocks_per_run; piece += step) {
    const int64_t run = piece / blocks_per_run;
    const int64_t begin = runs.begin_of(run), end = begin + runs.run_bytes;
    const int64_t block = begin / kBlockBytes + piece % blocks_per_run;
    if (block * kBlockBytes >= end) continue;
    const uint64_t sum = sum_block(bytes + run * runs.run_bytes, begin, end, block);
    if (threadIdx.x % 32 == 0) total = add_mod(total, sum);
  }
  store_block_total(total, partials + blockIdx.x);
}

__global__ void add_partials_kernel(const uint64_t* partials, int count, uint64_t* out) {
  uint64_t total = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) total = add_mod(total, partials[i]);
  store_block_total(total, out);
}

// tensor [...] of 1, 2, 4 or 8 bytes an element, full_shape and offset of its dimensions -> i64 []
Tensor digest_partial_cuda(const Tensor& tensor, std::vector<int64_t> full_shape,
                           std::vector<int64_t> offset) {
  check_digest_partial(tensor, full_shape, offset);
  const torch::stable::accelerator::DeviceGuard guard(tensor.get_device_index());
  Tensor out = torch::stable::new_zeros(tensor, {}, ScalarType::Long);
  if (tensor.numel() == 0) return out;

  const Tensor x = torch::stable::contiguous(tensor);
  const Runs runs = runs_of(x, full_shape, offset);
  // Its first block may hold a single byte of a run.
  const int64_t blocks_per_run = (runs.run_bytes + kBlockBytes - 2) / kBlockBytes + 1;
  const int64_t pieces = runs.num_runs * blocks_per_run;
  const int grid = static_cast<int>(std::min<int64_t>((pieces + kWarps - 1) / kWarps, kMaxGrid));
  Tensor partials = torch::stable::new_empty(x, {grid}, ScalarType::Long);
  auto* sums = reinterpret_cast<uint64_t*>(partials.mutable_data_ptr<int64_t>());
  digest_kernel<<<grid, kThreads, 0, current_stream(x)>>>(
      static_cast<const unsigned char*>(x.const_data_ptr()), runs, blocks_per_run, sums);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  add_partials_kernel<<<1, kThreads, 0, current_stream(x)>>>(
      sums, grid, reinterpret_cast<uint64_t*>(out.mutable_data_ptr<int64_t>()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) {
  m.impl("digest_partial", TORCH_BOX(&megarl::digest_partial_cuda));
}
