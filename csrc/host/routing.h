// Bits of routing indices.  megarl/ops/routing_codec.py says what the format is and checks everything
// around them; its numpy reference gives the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace megarl {

// The first of `count` ids, `topk` a token, that is not in 0..experts-1 or that an earlier one of its
// token equals; -1 if there is none.
template <typename Id>
int64_t find_bad_id(const Id* ids, int64_t count, int64_t topk, int64_t experts) {
  for (int64_t start = 0; start < count; start += topk) {
    for (int64_t i = start; i < start + topk && i < count; ++i) {
      const int64_t id = static_cast<int64_t>(ids[i]);
      bool bad = id < 0 || id >= experts;
      for (int64_t j = start; j < i; ++j) bad |= ids[j] == ids[i];
      if (bad) return i;
    }
  }
  return -1;
}

inline int64_t packed_bytes(int64_t count, int bits) { return (count * bits + 7) / 8; }

// Id i takes the bits from i * bits on, the lowest first; what is left of the last byte is 0.
template <typename Id>
void pack_bits(const Id* ids, int64_t count, int bits, uint8_t* out) {
  uint64_t held = 0;
  int num_held = 0;
  for (int64_t i = 0; i < count; ++i) {
    held |= static_cast<uint64_t>(ids[i]) << num_held;
    for (num_held += bits; num_held >= 8; num_held -= 8, held >>= 8) {
      *out++ = static_cast<uint8_t>(held);
    }
  }
  if (num_held > 0) *out = static_cast<uint8_t>(held);
}

// `in` holds packed_bytes(count, bits).
template <typename Id>
void unpack_bits(const uint8_t* in, int64_t count, int bits, Id* out) {
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  uint64_t held = 0;
  int num_held = 0;
  for (int64_t i = 0; i < count; ++i) {
    for (; num_held < bits; num_held += 8) held |= static_cast<uint64_t>(*in++) << num_held;
    out[i] = static_cast<Id>(held & mask);
    held >>= bits;
    num_held -= bits;
  }
}

}  // namespace megarl
