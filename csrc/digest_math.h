// The arithmetic of digest, the same on CPU and GPU.  megarl/ops/digest.py says what it is for.
//
//   A tensor is its bytes in row-major order; word w is bytes 4w..4w+3, little-endian, and a block is
//   1,024 words.  Arithmetic is modulo the prime p = 2^61 - 1.
//
//   partial = sum over the bytes held, each at byte g of the whole tensor:
//               (byte + 1) * 256^(g mod 4) * C[w mod 1024] * R(w div 1024),  w = g div 4
//
// 1. C are 1,024 keys in [1, 2^32), so a block's sum is of 64-bit products, exact, and
//    the dear multiplication modulo p by R is done once a block.
// 2. Addition modulo p is exact in any order: threads, shards and devices agree bit for bit.
#pragma once

#include "common.h"

#include <vector>

#ifdef __CUDACC__
#define MEGARL_HOST_DEVICE __host__ __device__
#else
#define MEGARL_HOST_DEVICE
#endif

namespace megarl {

constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;
constexpr int64_t kBlockWords = 1024, kBlockBytes = 4 * kBlockWords;
constexpr uint64_t kByteOnes = 0x01010101;  // the + 1 of each byte of a word

using uint128_t = unsigned __int128;

MEGARL_HOST_DEVICE constexpr uint64_t splitmix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

MEGARL_HOST_DEVICE inline uint64_t add_mod(uint64_t a, uint64_t b) {
  const uint64_t sum = a + b;  // both below p
  return sum < kPrime ? sum : sum - kPrime;
}

MEGARL_HOST_DEVICE inline uint64_t mod_prime(uint128_t x) {
  const uint128_t once = (x & kPrime) + (x >> 61);
  const uint64_t twice = static_cast<uint64_t>(once & kPrime) + static_cast<uint64_t>(once >> 61);
  return twice < kPrime ? twice : twice - kPrime;
}

// R(block): in [1, p).  The two constants are "megarl_R" and, below, "megarl_C" in ASCII.
MEGARL_HOST_DEVICE inline uint64_t block_key(int64_t block) {
  return (splitmix64(0x6d656761726c5f52u + static_cast<uint64_t>(block)) >> 3) % (kPrime - 1) + 1;
}

MEGARL_HOST_DEVICE inline uint64_t times_block_key(uint128_t sum, int64_t block) {
  return mod_prime(static_cast<uint128_t>(mod_prime(sum)) * block_key(block));
}

struct WordKeys {
  uint32_t at[kBlockWords];
};

constexpr WordKeys make_word_keys() {
  WordKeys keys{};
  for (int64_t j = 0; j < kBlockWords; ++j) {
    keys.at[j] = static_cast<uint32_t>(splitmix64(0x6d656761726c5f43u + j) >> 32);
  }
  return keys;
}

// A slice as runs: `num_runs` stretches of `run_bytes`, each contiguous in the whole tensor.  Run r
// begins where its mixed-radix digits over `sizes`, innermost first, say: `begin` + digit * stride.
struct Runs {
  static constexpr int kMaxDims = 8;
  int64_t num_runs, run_bytes, begin;
  int dims;
  int64_t sizes[kMaxDims], strides[kMaxDims];

  MEGARL_HOST_DEVICE int64_t begin_of(int64_t run) const {
    int64_t at = begin;
    for (int d = 0; d < dims; ++d) {
      at += run % sizes[d] * strides[d];
      run /= sizes[d];
    }
    return at;
  }
};

// `x`, contiguous, at `offset` of a tensor of `full_shape`.  A dimension that the slice has whole
// joins its run with the next.
inline Runs runs_of(const Tensor& x, const std::vector<int64_t>& full_shape,
                    const std::vector<int64_t>& offset) {
  Runs runs{1, static_cast<int64_t>(x.element_size()), 0, 0, {}, {}};
  int64_t stride = runs.run_bytes;
  bool joined = true;
  for (int64_t d = x.dim() - 1; d >= 0; --d) {
    runs.begin += offset[d] * stride;
    if (joined) {
      runs.run_bytes *= x.size(d);
    } else if (x.size(d) != 1) {
      STD_TORCH_CHECK(runs.dims < Runs::kMaxDims, "digest_partial: a slice of more than ",
                      Runs::kMaxDims, " dimensions that are not whole");
      runs.sizes[runs.dims] = x.size(d);
      runs.strides[runs.dims++] = stride;
      runs.num_runs *= x.size(d);
    }
    joined = joined && x.size(d) == full_shape[d];
    stride *= full_shape[d];
  }
  return runs;
}

inline void check_digest_size(const char* op, const Tensor& x) {
  const auto size = x.element_size();
  STD_TORCH_CHECK(size == 1 || size == 2 || size == 4 || size == 8, op,
                  ": elements must have 1, 2, 4 or 8 bytes, got ", size);
}

inline void check_digest_copy(const Tensor& place, const Tensor& source) {
  check_digest_size("digest_copy_", source);
  STD_TORCH_CHECK(place.element_size() == source.element_size(), "digest_copy_: place must have ",
                  source.element_size(), " bytes an element like the source, got ",
                  place.element_size());
  check_device("digest_copy_", "place", place, source);
  bool same = place.dim() == source.dim();
  for (int64_t d = 0; same && d < source.dim(); ++d) same = place.size(d) == source.size(d);
  STD_TORCH_CHECK(same, "digest_copy_: place must have the source's shape of ", source.numel(),
                  " elements, got one of ", place.numel());
  STD_TORCH_CHECK(place.is_contiguous() && source.is_contiguous(),
                  "digest_copy_: place and source must be contiguous");
}

inline void check_digest_partial(const Tensor& x, const std::vector<int64_t>& full_shape,
                                 const std::vector<int64_t>& offset) {
  check_digest_size("digest_partial", x);
  const auto dim = static_cast<size_t>(x.dim());
  STD_TORCH_CHECK(full_shape.size() == dim && offset.size() == dim,
                  "digest_partial: full_shape and offset must have the tensor's ", dim,
                  " dimension(s), got ", full_shape.size(), " and ", offset.size());
  for (size_t d = 0; d < dim; ++d) {
    // Written so that no sum overflows.
    STD_TORCH_CHECK(offset[d] >= 0 && full_shape[d] >= x.size(d) &&
                        offset[d] <= full_shape[d] - x.size(d),
                    "digest_partial: dimension ", d, " of the slice is ", x.size(d), " from ",
                    offset[d], " on, which is not inside the whole tensor's ", full_shape[d]);
  }
}

}  // namespace megarl
