// fp8_block_quant and fp8_block_dequant on CUDA: one thread block an FP8 block.
//
// 1. The largest magnitude is found with atomic maxima of bits in shared memory: a maximum does not
//    depend on the order.  Codes and scales are the CPU's, bit for bit (--fmad=false, IEEE division).
// 2. A value that is not finite is printed with its place, and the kernel traps.
#include "../fp8_math.h"
#include "device.cuh"

namespace megarl {
namespace {

constexpr int kThreads = 256;

__device__ float as_float(float x) { return x; }
__device__ float as_float(uint16_t x) { return bf16_to_float(x); }
__device__ void store(float* at, float x) { *at = x; }
__device__ void store(uint16_t* at, float x) { *at = float_to_bf16(x); }

// Of thread block `blockIdx.x`: its elements are [row + i / columns][column + i % columns].
struct Tile {
  int64_t row, column, rows, columns, stride;

  __device__ Tile(int64_t n, int64_t k, int64_t block_n, int64_t block_k) : stride(k) {
    const int64_t per_row = (k + block_k - 1) / block_k;
    row = blockIdx.x / per_row * block_n;
    column = blockIdx.x % per_row * block_k;
    rows = min(block_n, n - row);
    columns = min(block_k, k - column);
  }
  __device__ int64_t numel() const { return rows * columns; }
  __device__ int64_t at(int64_t i) const {
    return (row + i / columns) * stride + column + i % columns;
  }
};

template <typename stored_t>
__device__ void refuse_non_finite(const stored_t* x, const Tile& tile) {
  int count = 0;
  for (int64_t i = 0; i < tile.numel(); ++i) {
    const float value = as_float(x[tile.at(i)]);
    if ((bits_of(value) & 0x7fffffff) < kInfBits) continue;
    if (count++ == 0) {
      printf("fp8_block_quant: x must be finite, got %f at [%lld, %lld]\n", value,
             (long long)(tile.at(i) / tile.stride), (long long)(tile.at(i) % tile.stride));
    }
  }
  printf("fp8_block_quant: %d value(s) that are not finite in the block from [%lld, %lld] on\n", count,
         (long long)tile.row, (long long)tile.column);
}

template <typename stored_t>
__global__ void quant_kernel(const stored_t* x, int64_t n, int64_t k, int64_t block_n,
                             int64_t block_k, float eps, bool power_of_two, uint8_t* codes,
                             float* scales) {
  const Tile tile(n, k, block_n, block_k);
  __shared__ unsigned amax;
  if (threadIdx.x == 0) amax = 0;
  __syncthreads();
  unsigned mine = 0;
  for (int64_t i = threadIdx.x; i < tile.numel(); i += kThreads) {
    mine = max(mine, bits_of(as_float(x[tile.at(i)])) & 0x7fffffff);
  }
  atomicMax(&amax, mine);
  __syncthreads();
  if (amax >= kInfBits) {
    if (threadIdx.x == 0) refuse_non_finite(x, tile);
    __syncthreads();  // the message is written before the trap ends the kernel
    __trap();
  }
  const float scale = block_scale(amax, eps, power_of_two), inverse = 1.0f / scale;
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  for (int64_t i = threadIdx.x; i < tile.numel(); i += kThreads) {
    codes[tile.at(i)] = float_to_e4m3(as_float(x[tile.at(i)]) * inverse);
  }
}

template <typename scale_t, typename out_t>
__global__ void dequant_kernel(const uint8_t* codes, const scale_t* scales, int64_t n, int64_t k,
                               int64_t block_n, int64_t block_k, out_t* out) {
  const Tile tile(n, k, block_n, block_k);
  const float scale = as_float(scales[blockIdx.x]);
  for (int64_t i = threadIdx.x; i < tile.numel(); i += kThreads) {
    store(out + tile.at(i), e4m3_to_float(codes[tile.at(i)]) * scale);
  }
}

template <typename stored_t>
void launch_quant(const Tensor& x, int64_t block_n, int64_t block_k, double eps, bool power_of_two,
                  Tensor& codes, Tensor& scales) {
  quant_kernel<<<scales.numel(), kThreads, 0, current_stream(x)>>>(
      static_cast<const stored_t*>(x.const_data_ptr()), x.size(0), x.size(1), block_n, block_k,
      static_cast<float>(eps), power_of_two, static_cast<uint8_t*>(codes.mutable_data_ptr()),
      scales.mutable_data_ptr<float>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// x f32|bf16 [N, K] -> codes e4m3 [N, K], scales f32 [ceil(N / block_n), ceil(K / block_k)]
std::tuple<Tensor, Tensor> fp8_block_quant_cuda(const Tensor& x, int64_t block_n, int64_t block_k,
                                                double eps, bool power_of_two) {
  check_fp8_block_quant(x, block_n, block_k, eps);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Tensor codes = torch::stable::new_empty(x, {x.size(0), x.size(1)}, ScalarType::Float8_e4m3fn);
  Tensor scales = torch::stable::new_empty(
      x, {num_blocks(x.size(0), block_n), num_blocks(x.size(1), block_k)}, ScalarType::Float);
  if (x.numel() == 0) return {codes, scales};

  const Tensor in = torch::stable::contiguous(x);
  const bool wide = x.scalar_type() == ScalarType::Float;
  (wide ? launch_quant<float> : launch_quant<uint16_t>)(in, block_n, block_k, eps, power_of_two,
                                                        codes, scales);
  return {codes, scales};
}

template <typename scale_t, typename out_t>
void launch_dequant(const Tensor& codes, const Tensor& scales, int64_t block_n, int64_t block_k,
                    Tensor& out) {
  dequant_kernel<<<scales.numel(), kThreads, 0, current_stream(codes)>>>(
      static_cast<const uint8_t*>(codes.const_data_ptr()),
      static_cast<const scale_t*>(scales.const_data_ptr()), codes.size(0), codes.size(1), block_n,
      block_k, static_cast<out_t*>(out.mutable_data_ptr()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// codes e4m3 [N, K], scales f32|bf16 [ceil(N / block_n), ceil(K / block_k)] -> out_dtype [N, K]
Tensor fp8_block_dequant_cuda(const Tensor& codes, const Tensor& scales, int64_t block_n,
                              int64_t block_k, ScalarType out_dtype) {
  check_fp8_block_dequant(codes, scales, block_n, block_k, out_dtype);
  const torch::stable::accelerator::DeviceGuard guard(codes.get_device_index());
  Tensor out = torch::stable::new_empty(codes, {codes.size(0), codes.size(1)}, out_dtype);
  if (codes.numel() == 0) return out;

  const Tensor q = torch::stable::contiguous(codes), s = torch::stable::contiguous(scales);
  const bool wide = out_dtype == ScalarType::Float;
  if (scales.scalar_type() == ScalarType::Float) {
    (wide ? launch_dequant<float, float> : launch_dequant<float, uint16_t>)(q, s, block_n, block_k,
                                                                            out);
  } else {
    (wide ? launch_dequant<uint16_t, float>
          : launch_dequant<uint16_t, uint16_t>)(q, s, block_n, block_k, out);
  }
  return out;
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) {
  m.impl("fp8_block_quant", TORCH_BOX(&megarl::fp8_block_quant_cuda));
  m.impl("fp8_block_dequant", TORCH_BOX(&megarl::fp8_block_dequant_cuda));
}
