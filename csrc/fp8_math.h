// FP8 blocks: float32 to e4m3 and back, and the scale of a block, the same on CPU and GPU.
// megarl/ops/fp8_block.py says what they are for.
//
//   e4m3: sign, 4 bits of exponent with bias 7, 3 of mantissa; largest 448; no infinities; NaN is
//   0x7f and 0xff; the smallest positive is 2^-9.
//
// Bits and single IEEE operations only, so that every machine gives the same codes.
#pragma once

#include "common.h"

#include <cstring>

#ifdef __CUDACC__
#define MEGARL_FP8 __host__ __device__ __forceinline__
#else
#define MEGARL_FP8 static inline __attribute__((always_inline))
#endif

namespace megarl {

constexpr float kE4m3Max = 448.0f;
constexpr uint32_t kInfBits = 0x7f800000;
constexpr float kSmallestNormal = 1.17549435e-38f;  // 2^-126

MEGARL_FP8 uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

MEGARL_FP8 float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

MEGARL_FP8 float bf16_to_float(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

// To nearest, ties to even; a NaN becomes torch's.
MEGARL_FP8 uint16_t float_to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > kInfBits ? 0x7fc0 : rounded);
}

// The nearest e4m3, ties to even, saturating at +-448.  Of a finite x.
MEGARL_FP8 uint8_t float_to_e4m3(float x) {
  const uint32_t sign = bits_of(x) & 0x80000000;
  const uint32_t bits = bits_of(x) ^ sign;
  const uint32_t magnitude = bits < 0x43e00000 ? bits : 0x43e00000;  // 448
  // Adding 2^14 leaves 9 bits after the point, to which the addition rounds: for x below 2^-6.
  const uint32_t small = bits_of(float_of(magnitude) + 16384.0f) - 0x46800000;
  const uint32_t large = (magnitude + 0x7ffff + ((magnitude >> 20) & 1) - (120u << 23)) >> 20;
  return static_cast<uint8_t>((magnitude < 0x3c800000 ? small : large) | (sign >> 24));
}

MEGARL_FP8 float e4m3_to_float(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24, magnitude = code & 0x7f;
  const uint32_t large = (magnitude << 20) + (120u << 23);
  const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0.001953125f);
  const uint32_t finite = magnitude < 8 ? small : large;
  return float_of((magnitude == 0x7f ? 0x7fc00000 : finite) | sign);
}

// The scale of a block whose largest magnitude has the bits `amax_bits`:  max(amax, eps) / 448, with
// `power_of_two` rounded up to one.  1 where that is no normal number, as for zeros with eps = 0.
MEGARL_FP8 float block_scale(uint32_t amax_bits, float eps, bool power_of_two) {
  const float amax = float_of(amax_bits);
  float scale = (amax > eps ? amax : eps) / kE4m3Max;
  if (!(scale >= kSmallestNormal)) return 1.0f;
  if (power_of_two) scale = float_of((bits_of(scale) + 0x7fffff) & kInfBits);
  return scale;
}

inline int64_t num_blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

inline void check_block_sizes(const char* op, int64_t block_n, int64_t block_k) {
  STD_TORCH_CHECK(block_n >= 1 && block_k >= 1, op, ": blocks must be at least 1 x 1, got ", block_n,
                  " x ", block_k);
}

inline void check_fp8_block_quant(const Tensor& x, int64_t block_n, int64_t block_k, double eps) {
  const char* op = "fp8_block_quant";
  check_dim(op, "x", x, 2);
  check_type(op, "x", x, "float32 or bfloat16", ScalarType::Float, ScalarType::BFloat16);
  check_block_sizes(op, block_n, block_k);
  STD_TORCH_CHECK(eps >= 0 && eps < 1e30, op, ": eps must be in [0, 1e30), got ", eps);
}

inline void check_fp8_block_dequant(const Tensor& codes, const Tensor& scales, int64_t block_n,
                                    int64_t block_k, ScalarType out_dtype) {
  const char* op = "fp8_block_dequant";
  check_dim(op, "codes", codes, 2);
  check_type(op, "codes", codes, "float8_e4m3fn", ScalarType::Float8_e4m3fn);
  check_dim(op, "scales", scales, 2);
  check_type(op, "scales", scales, "float32 or bfloat16", ScalarType::Float, ScalarType::BFloat16);
  check_device(op, "scales", scales, codes);
  check_block_sizes(op, block_n, block_k);
  const int64_t rows = num_blocks(codes.size(0), block_n), columns = num_blocks(codes.size(1), block_k);
  STD_TORCH_CHECK(scales.size(0) == rows && scales.size(1) == columns, op, ": scales must be [", rows,
                  ", ", columns, "] for codes [", codes.size(0), ", ", codes.size(1), "], got [",
                  scales.size(0), ", ", scales.size(1), "]");
  STD_TORCH_CHECK(is_one_of(out_dtype, ScalarType::Float, ScalarType::BFloat16), op,
                  ": dtype must be float32 or bfloat16, got ", out_dtype);
}

}  // namespace megarl
