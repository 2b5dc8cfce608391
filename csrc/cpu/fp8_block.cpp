// fp8_block_quant and fp8_block_dequant on the CPU.
//
// A block is read twice, once for its largest magnitude and once for its codes; a block of 128 x 128 is
// in the second-level cache by then.  Threads take blocks; nothing is shared between blocks.
#include "pages.h"
#include "../fp8_math.h"
#include "simd.h"

#include <algorithm>
#include <cmath>

namespace megarl {
namespace {

struct Block {
  int64_t rows, columns, stride;  // of elements, in a tensor of `stride` columns
};

// The largest magnitude's bits.  Bits of magnitudes are ordered as the magnitudes are; NaN is last.
MEGARL_SIMD uint32_t amax_bits(const float* x, Block block) {
  uint32_t amax = 0;
  for (int64_t r = 0; r < block.rows; ++r) {
    const float* row = x + r * block.stride;
    for (int64_t c = 0; c < block.columns; ++c) {
      const uint32_t magnitude = bits_of(row[c]) & 0x7fffffff;
      amax = magnitude > amax ? magnitude : amax;
    }
  }
  return amax;
}

MEGARL_SIMD uint32_t amax_bits(const uint16_t* x, Block block) {
  uint16_t amax = 0;
  for (int64_t r = 0; r < block.rows; ++r) {
    const uint16_t* row = x + r * block.stride;
    for (int64_t c = 0; c < block.columns; ++c) {
      const uint16_t magnitude = row[c] & 0x7fff;
      amax = magnitude > amax ? magnitude : amax;
    }
  }
  return static_cast<uint32_t>(amax) << 16;
}

MEGARL_SIMD void quantise(const float* __restrict__ x, Block block, float inverse,
                          uint8_t* __restrict__ codes) {
  for (int64_t r = 0; r < block.rows; ++r) {
    const float* row = x + r * block.stride;
    uint8_t* out = codes + r * block.stride;
    for (int64_t c = 0; c < block.columns; ++c) out[c] = float_to_e4m3(row[c] * inverse);
  }
}

MEGARL_SIMD void quantise(const uint16_t* __restrict__ x, Block block, float inverse,
                          uint8_t* __restrict__ codes) {
  for (int64_t r = 0; r < block.rows; ++r) {
    const uint16_t* row = x + r * block.stride;
    uint8_t* out = codes + r * block.stride;
    for (int64_t c = 0; c < block.columns; ++c) {
      out[c] = float_to_e4m3(bf16_to_float(row[c]) * inverse);
    }
  }
}

MEGARL_SIMD void dequantise(const uint8_t* __restrict__ codes, Block block, float scale,
                            float* __restrict__ out) {
  for (int64_t r = 0; r < block.rows; ++r) {
    const uint8_t* row = codes + r * block.stride;
    float* y = out + r * block.stride;
    for (int64_t c = 0; c < block.columns; ++c) y[c] = e4m3_to_float(row[c]) * scale;
  }
}

MEGARL_SIMD void dequantise(const uint8_t* __restrict__ codes, Block block, float scale,
                            uint16_t* __restrict__ out) {
  for (int64_t r = 0; r < block.rows; ++r) {
    const uint8_t* row = codes + r * block.stride;
    uint16_t* y = out + r * block.stride;
    for (int64_t c = 0; c < block.columns; ++c) y[c] = float_to_bf16(e4m3_to_float(row[c]) * scale);
  }
}

float as_float(float x) { return x; }
float as_float(uint16_t x) { return bf16_to_float(x); }

// Runs `work(block's index, its first element, its extent)` for the blocks of [n, k], row by row.
template <typename Work>
void for_each_block(int64_t n, int64_t k, int64_t block_n, int64_t block_k, const Work& work) {
  const int64_t columns = num_blocks(k, block_k), count = num_blocks(n, block_n) * columns;
  const int64_t grain = std::max<int64_t>(1, 65536 / (block_n * block_k));
  torch::stable::parallel_for(0, count, grain, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      const int64_t row = b / columns * block_n, column = b % columns * block_k;
      work(b, row * k + column,
           Block{std::min(block_n, n - row), std::min(block_k, k - column), k});
    }
  });
}

// Looks for what must not be there, once it is known that it is: only then is the time spent.
template <typename stored_t>
[[noreturn]] void refuse_non_finite(const stored_t* x, int64_t num_elements, int64_t num_columns) {
  int64_t count = 0, first = -1;
  for (int64_t i = 0; i < num_elements; ++i) {
    if (std::isfinite(as_float(x[i]))) continue;
    if (count++ == 0) first = i;
  }
  STD_TORCH_CHECK(false, "fp8_block_quant: x must be finite, got ", count,
                  " value(s) that are not, the first ", as_float(x[first]), " at [",
                  first / num_columns, ", ", first % num_columns, "]");
  std::abort();  // not reached
}

template <typename stored_t>
void quantise_all(const Tensor& x, int64_t block_n, int64_t block_k, float eps, bool power_of_two,
                  uint8_t* codes, float* scales) {
  const auto* in = static_cast<const stored_t*>(x.const_data_ptr());
  for_each_block(x.size(0), x.size(1), block_n, block_k, [&](int64_t b, int64_t at, Block block) {
    const uint32_t amax = amax_bits(in + at, block);
    // No scale is infinite: it marks a block that is refused below.
    scales[b] = amax < kInfBits ? block_scale(amax, eps, power_of_two) : float_of(kInfBits);
    if (amax < kInfBits) quantise(in + at, block, 1.0f / scales[b], codes + at);
  });
  const int64_t count = num_blocks(x.size(0), block_n) * num_blocks(x.size(1), block_k);
  const auto infinite = [](float scale) { return bits_of(scale) == kInfBits; };
  if (std::any_of(scales, scales + count, infinite)) refuse_non_finite(in, x.numel(), x.size(1));
}

// x f32|bf16 [N, K] -> codes e4m3 [N, K], scales f32 [ceil(N / block_n), ceil(K / block_k)]
std::tuple<Tensor, Tensor> fp8_block_quant_cpu(const Tensor& x, int64_t block_n, int64_t block_k,
                                               double eps, bool power_of_two) {
  check_fp8_block_quant(x, block_n, block_k, eps);
  Tensor codes = torch::stable::new_empty(x, {x.size(0), x.size(1)}, ScalarType::Float8_e4m3fn);
  advise_large_pages(codes);
  Tensor scales = torch::stable::new_empty(
      x, {num_blocks(x.size(0), block_n), num_blocks(x.size(1), block_k)}, ScalarType::Float);
  if (x.numel() == 0) return {codes, scales};

  const Tensor in = torch::stable::contiguous(x);
  auto* out = static_cast<uint8_t*>(codes.mutable_data_ptr());
  const auto run = x.scalar_type() == ScalarType::Float ? quantise_all<float> : quantise_all<uint16_t>;
  run(in, block_n, block_k, static_cast<float>(eps), power_of_two, out,
      scales.mutable_data_ptr<float>());
  return {codes, scales};
}

template <typename scale_t, typename out_t>
void dequantise_all(const Tensor& codes, const Tensor& scales, int64_t block_n, int64_t block_k,
                    Tensor& y) {
  const auto* in = static_cast<const uint8_t*>(codes.const_data_ptr());
  const auto* scale = static_cast<const scale_t*>(scales.const_data_ptr());
  auto* out = static_cast<out_t*>(y.mutable_data_ptr());
  for_each_block(codes.size(0), codes.size(1), block_n, block_k,
                 [&](int64_t b, int64_t at, Block block) {
                   dequantise(in + at, block, as_float(scale[b]), out + at);
                 });
}

// codes e4m3 [N, K], scales f32|bf16 [ceil(N / block_n), ceil(K / block_k)] -> out_dtype [N, K]
Tensor fp8_block_dequant_cpu(const Tensor& codes, const Tensor& scales, int64_t block_n,
                             int64_t block_k, ScalarType out_dtype) {
  check_fp8_block_dequant(codes, scales, block_n, block_k, out_dtype);
  Tensor y = torch::stable::new_empty(codes, {codes.size(0), codes.size(1)}, out_dtype);
  advise_large_pages(y);
  if (codes.numel() == 0) return y;

  const Tensor q = torch::stable::contiguous(codes), s = torch::stable::contiguous(scales);
  const bool wide = out_dtype == ScalarType::Float;
  if (scales.scalar_type() == ScalarType::Float) {
    (wide ? dequantise_all<float, float> : dequantise_all<float, uint16_t>)(q, s, block_n, block_k, y);
  } else {
    (wide ? dequantise_all<uint16_t, float> : dequantise_all<uint16_t, uint16_t>)(q, s, block_n,
                                                                                  block_k, y);
  }
  return y;
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CPU, m) {
  m.impl("fp8_block_quant", TORCH_BOX(&megarl::fp8_block_quant_cpu));
  m.impl("fp8_block_dequant", TORCH_BOX(&megarl::fp8_block_dequant_cpu));
}
