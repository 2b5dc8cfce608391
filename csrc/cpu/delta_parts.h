// What encoding and applying a delta share on the CPU: the bits of a block, and parts for threads.
#pragma once

#include "../delta_format.h"
#include "simd.h"

#include <algorithm>
#include <cstring>

namespace megarl {

constexpr int64_t kChunksPerPart = 64;

// Of every byte: the places of its set bits, one in each byte from the lowest on; and their number.
struct ByteBits {
  uint64_t places[256] = {};
  uint8_t counts[256] = {};
};
constexpr ByteBits make_byte_bits() {
  ByteBits bits{};
  for (int byte = 0; byte < 256; ++byte) {
    for (uint64_t bit = 0; bit < 8; ++bit) {
      if (byte >> bit & 1) bits.places[byte] |= bit << (8 * bits.counts[byte]++);
    }
  }
  return bits;
}
constexpr ByteBits kByteBits = make_byte_bits();

// Which elements of a block, one bit each; and room for their places.
struct Bitmap {
  uint8_t bytes[kDeltaBlock / 8] = {};
};
struct Places {
  uint8_t at[kDeltaBlock + 8];
};

// Their number.  Eight places are written a byte, whatever it has: no branch depends on the bits.
MEGARL_INLINE int64_t list_places(const Bitmap& bitmap, Places* places) {
  int64_t count = 0;
  for (uint64_t k = 0; k < kDeltaBlock / 8; ++k) {
    const uint64_t eight = kByteBits.places[bitmap.bytes[k]] + 8 * k * 0x0101010101010101u;
    std::memcpy(places->at + count, &eight, 8);
    count += kByteBits.counts[bitmap.bytes[k]];
  }
  return count;
}

// Runs `work(part, its first chunk, its last)` for parts of the chunks.
template <typename Work>
void for_each_part(int64_t chunks, const Work& work) {
  const int64_t parts = (chunks + kChunksPerPart - 1) / kChunksPerPart;
  torch::stable::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      work(p, p * kChunksPerPart, std::min((p + 1) * kChunksPerPart, chunks));
    }
  });
}

inline void copy_bytes(void* to, const void* from, int64_t num_bytes) {
  for_each_part(num_chunks(num_bytes), [&](int64_t, int64_t first, int64_t last) {
    const int64_t at = first * kDeltaChunk, end = std::min(last * kDeltaChunk, num_bytes);
    std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, end - at);
  });
}

}  // namespace megarl
