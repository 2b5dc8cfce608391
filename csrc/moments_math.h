// Count, mean and sum of squared deviations of parts, and how they merge (Chan et al. 1979): the same
// arithmetic for every device.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MEGARL_BOTH __host__ __device__ inline
#else
#define MEGARL_BOTH inline
#endif

namespace megarl {

constexpr int64_t kMomentsBlock = 4096;  // tokens of a row that are one part

struct MomentsPart {
  double n;
  double mean;
  double m2;
};

MEGARL_BOTH MomentsPart merge(const MomentsPart& a, const MomentsPart& b) {
  if (b.n == 0) return a;
  if (a.n == 0) return b;
  const double n = a.n + b.n;
  const double delta = b.mean - a.mean;
  return {n, a.mean + delta * b.n / n, a.m2 + b.m2 + delta * delta * a.n * b.n / n};
}

// Neighbours merge, then the merged ones, and so on: the tree depends on `count` alone.  Writes over
// `parts`, whose first entry is then the whole.
MEGARL_BOTH void merge_tree(MomentsPart* parts, int64_t count) {
  while (count > 1) {
    const int64_t pairs = count / 2;
    for (int64_t i = 0; i < pairs; ++i) parts[i] = merge(parts[2 * i], parts[2 * i + 1]);
    if (count % 2 == 1) parts[pairs] = parts[count - 1];
    count = pairs + count % 2;
  }
}

}  // namespace megarl
