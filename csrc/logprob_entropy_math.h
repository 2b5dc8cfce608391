// logprob_entropy, element by element: what the CPU and the CUDA kernels share.
//
// Powers of two throughout, which spares e's a multiplication and a range reduction of two parts.  With
// s = (x - shift) log2(e) / temperature for a logit x of a row:
//
//     sum = sum_v 2^s,   weighted = sum_v s 2^s,   p = 2^s / sum,   mean = weighted / sum
//     log p + H = ln(2) (s - mean)          (H = log sum - ln(2) mean)
//     d(g lp + h H)/dx = (1/temperature) [ g (1[v = y] - p) - h p ln(2) (s - mean) ]
//
// Inside a row's sums `weighted` is in these units; what the op gives and takes is in nats.
//
// 1. The difference x - shift comes first: between bf16 logits it is exact or nearly so, whatever
//    their size, where x / temperature would be rounded in proportion to x.
// 2. A row's shift is one of its logits, with none above s = kHeadroom.  It need not be the largest, so
//    that a block of a row needs no pass of its own to find that, but where it is far above all before.
// 3. Where 2^s is below the normal numbers it is exactly 0, and so is s 2^s: a logit of -infinity adds
//    nothing and has a gradient of 0.
// 4. NaN and +infinity make their row's sums NaN.
#pragma once

#include "fast_math.h"

namespace megarl {

constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;
constexpr double kHeadroom = 1.5;

// 2^s is exactly 0 where s is below this.
MEGARL_MATH float lowest_exponent(float) { return -126.0f; }
MEGARL_MATH double lowest_exponent(double) { return -1022.0; }
MEGARL_MATH float power_of_two(float s) { return exp2_up_to_127(s); }
MEGARL_MATH double power_of_two(double s) { return exp2_up_to_1023(s); }

// `x`, but 0 where 2^s is: there s may be infinite and 2^s times s NaN.
template <typename real_t>
MEGARL_MATH real_t zero_like_power(real_t s, real_t x) {
  return where(!(s < lowest_exponent(s)), x);
}

// float32 and float64 logits are computed as they are; bf16 (as bits) in float32, and a gradient that
// is rounded to bf16 takes the shorter 2^s.
template <typename storage_t>
struct Logit {
  using real_t = storage_t;
  MEGARL_MATH real_t load(storage_t x) { return x; }
  MEGARL_MATH storage_t store(real_t x) { return x; }
  MEGARL_MATH real_t power_for_gradient(real_t s) { return power_of_two(s); }
};
template <>
struct Logit<uint16_t> {
  using real_t = float;
  MEGARL_MATH float load(uint16_t x) { return from_bf16(x); }
  MEGARL_MATH uint16_t store(float x) { return to_bf16(x); }
  MEGARL_MATH float power_for_gradient(float s) { return exp2_for_bf16(s); }
};

template <typename real_t>
MEGARL_MATH real_t minus_infinity() {
  return -static_cast<real_t>(__builtin_inff());
}

// A shift of logits that may all be -infinity: not itself, from which their difference would be NaN.
MEGARL_MATH double finite_or_zero(double shift) {
  return shift == minus_infinity<double>() ? 0.0 : shift;
}

// Of a row, or of a part of it.
struct RowSums {
  double shift, sum, weighted;
};

MEGARL_MATH RowSums no_logits() { return {minus_infinity<double>(), 0.0, 0.0}; }

// The row relative to a larger shift.  One of -infinity is that of a row without finite logits: its
// sums are 0, or NaN, and stay so.
MEGARL_MATH RowSums raised(const RowSums& row, double shift, double per_logit) {
  if (row.shift == minus_infinity<double>()) return {shift, row.sum, row.weighted};
  const double s = (row.shift - shift) * per_logit, scale = power_of_two(s);
  return {shift, scale * row.sum, zero_like_power(s, scale * (row.weighted + s * row.sum))};
}

// Of one row: every gradient but the target's is 2^s (a + b (s - mean)).
template <typename real_t>
struct RowGradient {
  real_t shift, per_logit, mean, a, b;
};

// What backward needs of a row's softmax over all columns, wherever they are (mean in nats), and the
// gradients of its log-prob and entropy.
struct RowInputs {
  double shift, sum, mean, g, h;
};

// NaN in a row's logits or gradients is NaN here, and then in every gradient of the row.
template <typename real_t>
MEGARL_MATH bool is_nan(const RowGradient<real_t>& row) {
  const real_t any = row.shift + row.mean + row.a + row.b;
  return any != any;
}

template <typename real_t>
MEGARL_MATH RowGradient<real_t> row_gradient(const RowInputs& row, double temperature) {
  const double over = -1.0 / (row.sum * temperature);
  return {static_cast<real_t>(row.shift), static_cast<real_t>(kLog2E / temperature),
          static_cast<real_t>(row.mean * kLog2E), static_cast<real_t>(row.g * over),
          static_cast<real_t>(row.h * kLn2 * over)};
}

template <typename storage_t, typename real_t>
MEGARL_MATH real_t gradient_without_entropy(const RowGradient<real_t>& row, real_t x) {
  return Logit<storage_t>::power_for_gradient((x - row.shift) * row.per_logit) * row.a;
}

template <typename storage_t, typename real_t>
MEGARL_MATH real_t gradient(const RowGradient<real_t>& row, real_t x) {
  const real_t s = (x - row.shift) * row.per_logit;
  const real_t of_one = fused(row.b, s - row.mean, row.a);
  return zero_like_power(s, Logit<storage_t>::power_for_gradient(s) * of_one);
}

// The target's own, in float64.
MEGARL_MATH double target_gradient(const RowInputs& row, double x, double temperature) {
  const double s = (x - row.shift) * (kLog2E / temperature);
  const double p = power_of_two(s) / row.sum;
  const double of_entropy = zero_like_power(s, p * (s * kLn2 - row.mean));
  return (row.g * (1.0 - p) - row.h * of_entropy) / temperature;
}

}  // namespace megarl
