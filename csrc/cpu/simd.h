// Loops that the compiler turns into vector instructions, with one result on every machine.
//
//   MEGARL_SIMD    on a plain function: compiled for AVX-512, AVX2 and the baseline; the loader picks
//   MEGARL_INLINE  on what it calls, templates included: becomes part of each of those versions
//
// 1. Sums run in kLanes partial sums, lane j taking entries j, j + kLanes, ..., and are folded in one
//    fixed tree.  The width is a constant and not the machine's, so every version adds in one order.
// 2. Multiplications and additions are never contracted (-ffp-contract=off): a fused one
//    rounds once where the baseline rounds twice.
// MEGARL_NO_CLONES leaves the baseline alone: for sanitizers, and to compile one version by -march.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(MEGARL_NO_CLONES)
#define MEGARL_SIMD \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MEGARL_SIMD
#endif
#define MEGARL_INLINE static inline __attribute__((always_inline))

namespace megarl {

constexpr int kLanes = 16;

// The sum of kLanes partial sums, as a tree.
template <typename T>
MEGARL_INLINE T fold(const T (&lanes)[kLanes]) {
  T a[kLanes];
  for (int j = 0; j < kLanes; ++j) a[j] = lanes[j];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) a[j] += a[j + half];
  }
  return a[0];
}

}  // namespace megarl
