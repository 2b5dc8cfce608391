// Exponentials as plain arithmetic: loops that call them become vector instructions, and the CPU's
// AVX-512, AVX2 and baseline versions and the CUDA kernels compute the same bits (libm's differ from
// machine to machine).
//
//     2^x = 2^n 2^f,   n = round(x),          |f| <= 1/2,            2^f = 1 + f P(f)
//     e^x = 2^n e^r,   n = round(x / ln 2),   |r| <= ln(2) / 2,      e^r = 1 + r + q,  q = r^2 P(r)
//
// Error: below 1.5 units in the last place.  In float32 P is a minimax polynomial, whose own share is
// 0.03 units; in float64 it is Taylor's of degree 13.
//
// Fused multiplications and additions are written out where they are wanted (`fused`): unlike a
// contraction, which is up to the compiler, one is a single rounding everywhere.  Where a machine has
// no instruction for it libm computes the same bits, slowly.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// On a function that both CPU loops and CUDA kernels call.
#ifndef MEGARL_MATH
#ifdef __CUDACC__
#define MEGARL_MATH static __host__ __device__ inline
#else
#define MEGARL_MATH static inline __attribute__((always_inline))
#endif
#endif

namespace megarl {

template <typename To, typename From>
MEGARL_MATH To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits are kept");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// `x`, or 0 where not `keep`.  Bits and no condition: nested conditions the compiler turns into jumps,
// and a loop with jumps into no vector instructions.
MEGARL_MATH float where(bool keep, float x) {
  return bit_cast<float>(bit_cast<uint32_t>(x) & (0u - static_cast<uint32_t>(keep)));
}
MEGARL_MATH double where(bool keep, double x) {
  return bit_cast<double>(bit_cast<uint64_t>(x) & (uint64_t{0} - static_cast<uint64_t>(keep)));
}

// a b + c, rounded once.
MEGARL_MATH float fused(float a, float b, float c) { return ::fmaf(a, b, c); }
MEGARL_MATH double fused(double a, double b, double c) { return ::fma(a, b, c); }

// y 2^n of y in [1/2, 2), where `shifted` is n plus 1.5 times 2^23 (float64: 2^52): such a sum has n in
// its low bits, from where they go to y's exponent.
MEGARL_MATH float scaled(float y, float shifted) {
  return bit_cast<float>(bit_cast<uint32_t>(y) + (bit_cast<uint32_t>(shifted) << 23));
}
MEGARL_MATH double scaled(double y, double shifted) {
  return bit_cast<double>(bit_cast<uint64_t>(y) + (bit_cast<uint64_t>(shifted) << 52));
}

// A number that does not decrease with x from -2^22 on, one for all x that round to one integer, and
// less than those for x below; for NaN any.  The largest of many takes one instruction each, where the
// largest float, which has NaN to look after, takes several.
MEGARL_MATH int32_t rounded_order(float x) { return bit_cast<int32_t>(x + 12582912.0f); }
MEGARL_MATH int64_t rounded_order(double x) { return bit_cast<int64_t>(x + 6755399441055744.0); }

// 2^x for x in [-126, 127]; exactly 0 below; NaN for NaN.  Above: no meaning.
MEGARL_MATH float exp2_up_to_127(float x) {
  const float magic = 12582912.0f;
  const float shifted = x + magic;
  const float f = x - (shifted - magic);
  float p = 1.5353320323884247e-4f;
  p = fused(p, f, 1.3398926013890547e-3f);
  p = fused(p, f, 9.618437854639885e-3f);
  p = fused(p, f, 5.550332347964876e-2f);
  p = fused(p, f, 2.402264790694042e-1f);
  p = fused(p, f, 6.931472029069563e-1f);
  return where(!(x < -126.0f), scaled(fused(p, f, 1.0f), shifted));
}

// The same to 3e-6 of itself: a thousandth of what bfloat16 tells apart.
MEGARL_MATH float exp2_for_bf16(float x) {
  const float magic = 12582912.0f;
  const float shifted = x + magic;
  const float f = x - (shifted - magic);
  float p = 9.582822597073503e-3f;
  p = fused(p, f, 5.590673994439943e-2f);
  p = fused(p, f, 2.402410096957639e-1f);
  p = fused(p, f, 6.931241580194588e-1f);
  return where(!(x < -126.0f), scaled(fused(p, f, 1.0f), shifted));
}

// 2^x for x in [-1022, 1023]; exactly 0 below; NaN for NaN.  Above: no meaning.
MEGARL_MATH double exp2_up_to_1023(double x) {
  const double magic = 6755399441055744.0;
  const double shifted = x + magic;
  const double f = x - (shifted - magic);
  double p = 1.3691488853904124e-12;  // ln(2)^13 / 13!, and so on
  p = fused(p, f, 2.5678435993488196e-11);
  p = fused(p, f, 4.44553827187081e-10);
  p = fused(p, f, 7.054911620801121e-09);
  p = fused(p, f, 1.0178086009239696e-07);
  p = fused(p, f, 1.3215486790144305e-06);
  p = fused(p, f, 1.5252733804059838e-05);
  p = fused(p, f, 1.5403530393381606e-04);
  p = fused(p, f, 1.3333558146428441e-03);
  p = fused(p, f, 9.618129107628477e-03);
  p = fused(p, f, 5.5504108664821576e-02);
  p = fused(p, f, 2.402265069591007e-01);
  p = fused(p, f, 6.931471805599453e-01);
  return where(!(x < -1022.0), scaled(fused(p, f, 1.0), shifted));
}

// e^x and its small differences.  x is brought into the range whose exponentials are normal numbers:
// below it the result is about 1e-38 (f32) or 1e-308 (f64) instead of less.  NaN for NaN.
template <typename T>
struct Exponential {
  T exp;       // e^x
  T expm1;     // e^x - 1, with its digits also for small x
  T expm1_mx;  // e^x - 1 - x, likewise
};

// q = r^2 P(r) = e^r - 1 - r.
MEGARL_MATH float exp_tail(float r) {
  float p = 1.381458090055743e-3f;
  p = fused(p, r, 8.368725384408434e-3f);
  p = fused(p, r, 4.166838887247933e-2f);
  p = fused(p, r, 1.6666520561622944e-1f);
  p = fused(p, r, 4.9999993443067386e-1f);
  return p * (r * r);
}
MEGARL_MATH double exp_tail(double r) {
  double p = 1.1470745597729725e-11;  // 1 / 14!, and so on
  p = fused(p, r, 1.6059043836821613e-10);
  p = fused(p, r, 2.08767569878681e-09);
  p = fused(p, r, 2.505210838544172e-08);
  p = fused(p, r, 2.755731922398589e-07);
  p = fused(p, r, 2.7557319223985893e-06);
  p = fused(p, r, 2.48015873015873e-05);
  p = fused(p, r, 1.984126984126984e-04);
  p = fused(p, r, 1.388888888888889e-03);
  p = fused(p, r, 8.333333333333333e-03);
  p = fused(p, r, 4.1666666666666664e-02);
  p = fused(p, r, 1.6666666666666666e-01);
  p = fused(p, r, 0.5);
  return p * (r * r);
}

template <typename T>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  static constexpr float kLow = -87.0f, kHigh = 88.0f;
  static constexpr float kMagic = 12582912.0f;  // 1.5 times 2^23: a sum with it is rounded
  static constexpr float kLn2High = 0.693145752f, kLn2Low = 1.42860677e-6f;
};
template <>
struct ExpConstants<double> {
  static constexpr double kLow = -708.0, kHigh = 709.0;
  static constexpr double kMagic = 6755399441055744.0;  // 1.5 times 2^52
  static constexpr double kLn2High = 0.693147180369123816490, kLn2Low = 1.90821492927058770002e-10;
};

template <typename T>
MEGARL_MATH Exponential<T> exponential(T x) {
  using C = ExpConstants<T>;
  x = x < C::kLow ? C::kLow : x;
  x = x > C::kHigh ? C::kHigh : x;
  const T shifted = fused(x, T(1.4426950408889634), C::kMagic);
  const T n = shifted - C::kMagic;
  const T r = fused(n, -C::kLn2Low, fused(n, -C::kLn2High, x));
  const T q = exp_tail(r);
  const T small = r + q, whole = scaled(T(1) + small, shifted);
  const T less_one = n == T(0) ? small : whole - T(1);
  return {whole, less_one, n == T(0) ? q : less_one - x};
}

// bfloat16 is the upper half of a float32.
MEGARL_MATH float from_bf16(uint16_t bits) {
  return bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Float32 bits whose upper half is the nearest bfloat16, ties to even.  Not for a NaN whose lower half
// is not 0, which may carry over into the sign.
MEGARL_MATH uint32_t rounded_to_bf16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

MEGARL_MATH uint16_t to_bf16(float x) {
  return static_cast<uint16_t>(x != x ? 0x7fc0u : rounded_to_bf16(x) >> 16);
}

}  // namespace megarl
