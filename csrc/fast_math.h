// exp and its small differences, as plain arithmetic: the same bits on every CPU, in every vector
// width, and (but for the compiler's own freedom there) on CUDA.  A library's exp is none of these.
//
// x = n ln2 + r with |r| <= ln2 / 2, and e^r = 1 + (r + q) with q = r^2 P(r):
//
//   e^x          2^n (1 + (r + q))
//   e^x - 1      r + q          where n = 0, which keeps its digits for small x
//   e^x - 1 - x  q              likewise
//
// Within about one unit in the last place.  A NaN gives NaN.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define MEGARL_MATH static __host__ __device__ __forceinline__
#else
#define MEGARL_MATH static inline __attribute__((always_inline))
#endif

namespace megarl {

template <typename To, typename From>
MEGARL_MATH To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}

template <typename T>
struct Exponential {
  T exp;       // e^x
  T expm1;     // e^x - 1
  T expm1_mx;  // e^x - 1 - x
};

// P(r) = (e^r - 1 - r) / r^2 on |r| <= ln2 / 2: its series, as far as the type has digits.
MEGARL_MATH float exp_tail(float r) {
  float p = 2.4801587e-5f;                 // 1/8!
  p = p * r + 1.9841270e-4f;               // 1/7!
  p = p * r + 1.3888889e-3f;
  p = p * r + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  return p * r + 0.5f;
}
MEGARL_MATH double exp_tail(double r) {
  double p = 1.1470745597729725e-11;       // 1/14!
  p = p * r + 1.6059043836821613e-10;
  p = p * r + 2.08767569878681e-9;
  p = p * r + 2.505210838544172e-8;
  p = p * r + 2.755731922398589e-7;
  p = p * r + 2.7557319223985893e-6;
  p = p * r + 2.48015873015873e-5;
  p = p * r + 1.984126984126984e-4;
  p = p * r + 1.388888888888889e-3;
  p = p * r + 8.333333333333333e-3;
  p = p * r + 4.1666666666666664e-2;
  p = p * r + 1.6666666666666666e-1;
  return p * r + 0.5;
}

template <typename T>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  using Bits = int32_t;
  static constexpr float kLow = -87.0f, kHigh = 88.0f;  // e^x is a normal number in between
  static constexpr float kRound = 12582912.0f;          // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr int kBias = 127, kMantissa = 23;
};
template <>
struct ExpConstants<double> {
  using Bits = int64_t;
  static constexpr double kLow = -708.0, kHigh = 709.0;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLn2High = 0.693145751953125, kLn2Low = 1.42860682030941723212e-6;
  static constexpr int kBias = 1023, kMantissa = 52;
};

// x is brought into the range whose exponentials are normal numbers: below it the result is about
// 1e-38 (f32) or 1e-308 (f64) instead of less, above it it is the largest one.
template <typename T>
MEGARL_MATH Exponential<T> exponential(T x) {
  using C = ExpConstants<T>;
  using Bits = typename C::Bits;
  x = x < C::kLow ? C::kLow : x;
  x = x > C::kHigh ? C::kHigh : x;
  const T shifted = x * T(1.4426950408889634) + C::kRound;
  const T n = shifted - C::kRound;
  const T r = (x - n * C::kLn2High) - n * C::kLn2Low;
  const T q = r * r * exp_tail(r);
  const Bits exponent = bits_as<Bits>(shifted) - bits_as<Bits>(C::kRound) + C::kBias;
  const T scale = bits_as<T>(static_cast<Bits>(exponent << C::kMantissa));
  const T small = r + q;
  const T whole = scale + scale * small;
  const bool near = n == T(0);
  const T less_one = near ? small : whole - T(1);
  return {whole, less_one, near ? q : less_one - x};
}

}  // namespace megarl
