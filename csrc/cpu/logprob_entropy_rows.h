// Rows of logits on the CPU: their sums, and their gradient in place (logprob_entropy.cpp).
//
// A row goes by in words of 32 bits or more.  One of bf16 has two logits, which become float32 by a
// shift and by a mask, and go back likewise: to spread and pack 16-bit numbers takes shuffles.
#pragma once

#include "../logprob_entropy_math.h"
#include "simd.h"

#include <algorithm>

namespace megarl {
namespace {

constexpr int64_t kBlockWords = 1024;  // 4 KB, of float64 8: it stays in the first cache

template <typename storage_t>
struct Word {
  using word_t = storage_t;
  static constexpr int kLogits = 1;
  MEGARL_INLINE storage_t first(word_t w) { return w; }
};
template <>
struct Word<uint16_t> {
  using word_t = uint32_t;
  static constexpr int kLogits = 2;
  MEGARL_INLINE float first(word_t w) { return bit_cast<float>(w << 16); }
  MEGARL_INLINE float second(word_t w) { return bit_cast<float>(w & 0xffff0000u); }
  // Of numbers that are not NaN, or NaN as arithmetic makes it: its lower half is 0.
  MEGARL_INLINE word_t pack(float first, float second) {
    return (rounded_to_bf16(first) >> 16) | (rounded_to_bf16(second) & 0xffff0000u);
  }
};

template <typename word_t, typename storage_t>
MEGARL_INLINE word_t read_word(const storage_t* x) {
  word_t word;
  std::memcpy(&word, x, sizeof(word));  // a row may begin in the middle of one
  return word;
}

// The largest of `words` words, a multiple of kLanes.
template <typename storage_t>
MEGARL_INLINE double largest(const storage_t* x, int64_t words) {
  using real_t = typename Logit<storage_t>::real_t;
  using word = Word<storage_t>;
  real_t lanes[kLanes], top = minus_infinity<real_t>();
  for (int j = 0; j < kLanes; ++j) lanes[j] = top;
  for (int64_t i = 0; i < words; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const auto w = read_word<typename word::word_t>(x + word::kLogits * (i + j));
      real_t value = word::first(w);
      if constexpr (word::kLogits == 2) value = word::second(w) > value ? word::second(w) : value;
      lanes[j] = value > lanes[j] ? value : lanes[j];
    }
  }
  for (int j = 0; j < kLanes; ++j) top = lanes[j] > top ? lanes[j] : top;
  return static_cast<double>(top);
}

// kLanes partial sums, and the largest s of each lane as its rounded_order.
template <typename real_t>
struct Lanes {
  using order_t = decltype(rounded_order(real_t()));
  real_t sum[kLanes], weighted[kLanes];
  order_t highest[kLanes];
};

template <typename real_t>
MEGARL_INLINE void clear(Lanes<real_t>& lanes) {
  for (int j = 0; j < kLanes; ++j) {
    lanes.sum[j] = lanes.weighted[j] = real_t(0);
    lanes.highest[j] = rounded_order(-real_t(1000));
  }
}

template <typename real_t>
MEGARL_INLINE void add_logit(Lanes<real_t>& lanes, int j, real_t x, real_t shift,
                             real_t per_logit) {
  const real_t s = (x - shift) * per_logit, e = power_of_two(s);
  const auto order = rounded_order(s);
  lanes.highest[j] = order > lanes.highest[j] ? order : lanes.highest[j];
  lanes.sum[j] += e;
  lanes.weighted[j] = fused(zero_like_power(s, s), e, lanes.weighted[j]);
}

template <typename real_t>
MEGARL_INLINE void add_lanes(Lanes<real_t>& lanes, const Lanes<real_t>& more) {
  for (int j = 0; j < kLanes; ++j) {
    lanes.sum[j] += more.sum[j];
    lanes.weighted[j] += more.weighted[j];
    lanes.highest[j] = std::max(lanes.highest[j], more.highest[j]);
  }
}

// Adds to `sums`; whether no logit is above kHeadroom.
template <typename real_t>
MEGARL_INLINE bool fold_into(RowSums& sums, const Lanes<real_t>& lanes) {
  sums.sum += static_cast<double>(fold(lanes.sum));
  sums.weighted += static_cast<double>(fold(lanes.weighted));
  auto highest = lanes.highest[0];
  for (int j = 1; j < kLanes; ++j) highest = std::max(highest, lanes.highest[j]);
  return highest <= rounded_order(real_t(kHeadroom - 0.5));
}

// Adds `words` words, a multiple of kLanes, to `sums`; whether no logit is above kHeadroom.
template <typename storage_t>
MEGARL_INLINE bool block_sums(RowSums& sums, const storage_t* x, int64_t words, double per_logit) {
  using real_t = typename Logit<storage_t>::real_t;
  using word = Word<storage_t>;
  const real_t shift = static_cast<real_t>(sums.shift), factor = static_cast<real_t>(per_logit);
  Lanes<real_t> first, second;
  clear(first);
  clear(second);
  for (int64_t i = 0; i < words; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const auto w = read_word<typename word::word_t>(x + word::kLogits * (i + j));
      add_logit(first, j, word::first(w), shift, factor);
      if constexpr (word::kLogits == 2) add_logit(second, j, word::second(w), shift, factor);
    }
  }
  add_lanes(first, second);
  return fold_into(sums, first);
}

template <typename storage_t>
MEGARL_INLINE RowSums add_block(const RowSums& row, const storage_t* x, int64_t words,
                                double per_logit) {
  RowSums sums = row;
  if (row.shift > minus_infinity<double>() && block_sums(sums, x, words, per_logit)) return sums;
  const double top = std::max(row.shift, largest(x, words));
  sums = raised(row, finite_or_zero(top), per_logit);
  block_sums(sums, x, words, per_logit);
  if (top == minus_infinity<double>()) sums.shift = top;
  return sums;
}

template <typename storage_t>
MEGARL_INLINE RowSums sums_of(const storage_t* x, int64_t width, double per_logit) {
  using real_t = typename Logit<storage_t>::real_t;
  constexpr int64_t kLogits = Word<storage_t>::kLogits, kStep = kLogits * kLanes;
  RowSums row = no_logits();
  const int64_t whole = width / kStep * kStep, words = whole / kLogits;
  for (int64_t i = 0; i < words; i += kBlockWords) {
    row = add_block(row, x + kLogits * i, std::min(kBlockWords, words - i), per_logit);
  }
  if (whole < width) {
    storage_t rest[kStep];  // filled up with logits that add nothing
    for (int j = 0; j < kStep; ++j) rest[j] = Logit<storage_t>::store(minus_infinity<real_t>());
    for (int64_t i = whole; i < width; ++i) rest[i - whole] = x[i];
    row = add_block(row, rest, kLanes, per_logit);
  }
  return row;
}

// Writes of(x) over every logit x.
template <typename storage_t, typename Gradient>
MEGARL_INLINE void write_each(storage_t* x, int64_t width, const Gradient& of) {
  using word = Word<storage_t>;
  if constexpr (word::kLogits == 1) {
    for (int64_t i = 0; i < width; ++i) x[i] = of(x[i]);
  } else {
    for (int64_t i = 0; i < width / 2; ++i) {
      const auto w = read_word<typename word::word_t>(x + 2 * i);
      const auto packed = word::pack(of(word::first(w)), of(word::second(w)));
      std::memcpy(x + 2 * i, &packed, sizeof(packed));
    }
    if (width % 2) {
      storage_t& last = x[width - 1];
      last = Logit<storage_t>::store(of(Logit<storage_t>::load(last)));
    }
  }
}

template <typename storage_t, typename real_t>
MEGARL_INLINE void write_gradient(storage_t* x, int64_t width, const RowGradient<real_t>& given) {
  const RowGradient<real_t> row = given;  // x cannot point into a copy
  if (is_nan(row)) {
    std::fill(x, x + width, Logit<storage_t>::store(row.shift + row.mean + row.a + row.b));
  } else if (row.b == real_t(0)) {
    write_each(x, width, [row](real_t v) __attribute__((always_inline)) {
      return gradient_without_entropy<storage_t>(row, v);
    });
  } else {
    write_each(x, width, [row](real_t v) __attribute__((always_inline)) {
      return gradient<storage_t>(row, v);
    });
  }
}

}  // namespace
}  // namespace megarl
