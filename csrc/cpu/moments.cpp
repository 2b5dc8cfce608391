// masked_moments and whiten on the CPU.
//
// The row is cut into blocks of kMomentsBlock tokens, whatever the number of threads.  Of a block the
// mean comes first, then the squared deviations from it, by which time it lies in the cache.  Blocks merge
// in a tree of their order (moments_math.h).
#include "pages.h"
#include "../advantages.h"
#include "../moments_math.h"
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace megarl {
namespace {

// A bool is a byte of 0 or 1.
const uint8_t* bytes_of(const Tensor& mask) {
  return reinterpret_cast<const uint8_t*>(mask.const_data_ptr<bool>());
}

constexpr int64_t kTokensPerThread = 65536;  // below this a thread costs more than it saves

// x where `kept`, else 0, whatever x is: on its bits, since a branch keeps a loop from being vectorised.
MEGARL_INLINE double kept_or_zero(double x, uint8_t kept) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits &= -static_cast<uint64_t>(kept);
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

MEGARL_INLINE int64_t count_of(const uint8_t* mask, int64_t size) {
  int32_t count = 0;
  for (int64_t i = 0; i < size; ++i) count += mask[i];
  return count;
}

// Lane i % kLanes takes number i.
MEGARL_INLINE double sum_of(const double* numbers, int64_t size) {
  double lanes[kLanes] = {};
  const int64_t whole = size - size % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] += numbers[i + j];
  }
  for (int64_t i = whole; i < size; ++i) lanes[i - whole] += numbers[i];
  return fold(lanes);
}

// Select and sum are loops of their own: in one the compiler finds no vector instructions.
template <typename scalar_t>
MEGARL_INLINE MomentsPart of_block(const scalar_t* values, const uint8_t* mask, int64_t size) {
  double counted[kMomentsBlock];
  const double n = static_cast<double>(count_of(mask, size));
  if (n == 0) return {0.0, 0.0, 0.0};
  for (int64_t i = 0; i < size; ++i) {
    counted[i] = kept_or_zero(static_cast<double>(values[i]), mask[i]);
  }
  const double mean = sum_of(counted, size) / n;
  for (int64_t i = 0; i < size; ++i) {
    const double deviation = counted[i] - mean;
    counted[i] = kept_or_zero(deviation * deviation, mask[i]);
  }
  return {n, mean, sum_of(counted, size)};
}

MEGARL_SIMD MomentsPart of_block_f32(const float* values, const uint8_t* mask, int64_t size) {
  return of_block(values, mask, size);
}

MEGARL_SIMD MomentsPart of_block_f64(const double* values, const uint8_t* mask, int64_t size) {
  return of_block(values, mask, size);
}

// values f32|f64 [T], mask bool [T] -> f64 [3]
Tensor masked_moments_cpu(const Tensor& values, const Tensor& mask) {
  check_masked_moments(values, mask);
  const int64_t num_tokens = values.numel();
  const int64_t num_blocks = (num_tokens + kMomentsBlock - 1) / kMomentsBlock;
  std::vector<MomentsPart> parts(std::max<int64_t>(1, num_blocks), MomentsPart{0.0, 0.0, 0.0});

  const Tensor row = torch::stable::contiguous(values), m = torch::stable::contiguous(mask);
  const bool narrow = row.scalar_type() == ScalarType::Float;
  const uint8_t* trained = bytes_of(m);
  const auto work = [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      const int64_t at = b * kMomentsBlock, size = std::min(kMomentsBlock, num_tokens - at);
      parts[b] = narrow ? of_block_f32(row.const_data_ptr<float>() + at, trained + at, size)
                        : of_block_f64(row.const_data_ptr<double>() + at, trained + at, size);
    }
  };
  torch::stable::parallel_for(0, num_blocks, kTokensPerThread / kMomentsBlock, work);
  merge_tree(parts.data(), num_blocks);

  Tensor out = torch::stable::new_empty(values, {3}, ScalarType::Double);
  double* found = out.mutable_data_ptr<double>();
  found[0] = parts[0].n;
  found[1] = parts[0].mean;
  found[2] = parts[0].m2;
  return out;
}

template <typename scalar_t>
MEGARL_INLINE void scaled(const scalar_t* values, const uint8_t* mask, double mean, double deviation,
                          int64_t first, int64_t last, double* out) {
  for (int64_t t = first; t < last; ++t) {
    out[t] = kept_or_zero((static_cast<double>(values[t]) - mean) / deviation, mask[t]);
  }
}

MEGARL_SIMD void scaled_f32(const float* values, const uint8_t* mask, double mean, double deviation,
                            int64_t first, int64_t last, double* out) {
  scaled(values, mask, mean, deviation, first, last, out);
}

MEGARL_SIMD void scaled_f64(const double* values, const uint8_t* mask, double mean, double deviation,
                            int64_t first, int64_t last, double* out) {
  scaled(values, mask, mean, deviation, first, last, out);
}

// values f32|f64 [T], mask bool [T] -> f64 [T]
Tensor whiten_cpu(const Tensor& values, const Tensor& mask, double mean, double variance,
                  double eps) {
  check_whiten(values, mask, variance, eps);
  Tensor out = torch::stable::new_empty(values, {values.numel()}, ScalarType::Double);
  advise_large_pages(out);

  const Tensor row = torch::stable::contiguous(values), m = torch::stable::contiguous(mask);
  const double deviation = std::sqrt(variance + eps);
  const bool narrow = row.scalar_type() == ScalarType::Float;
  const uint8_t* trained = bytes_of(m);
  double* found = out.mutable_data_ptr<double>();
  torch::stable::parallel_for(
      0, values.numel(), kTokensPerThread, [&](int64_t first, int64_t last) {
        narrow ? scaled_f32(row.const_data_ptr<float>(), trained, mean, deviation, first, last, found)
               : scaled_f64(row.const_data_ptr<double>(), trained, mean, deviation, first, last,
                            found);
      });
  return out;
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CPU, m) {
  m.impl("masked_moments", TORCH_BOX(&megarl::masked_moments_cpu));
  m.impl("whiten", TORCH_BOX(&megarl::whiten_cpu));
}
