// delta_encode_ on the CPU.
//
// 1. Threads take parts of 64 chunks.  A chunk of both tensors is in the first two caches while it is
//    compared, packed and, for the base, replaced: memory is read once and written once.
// 2. Comparing is vector instructions, to a byte an element; eight of those bytes become eight bits by
//    one multiplication, and those the places of what differs by a table: no branch for an element.
#include "delta_parts.h"
#include "pages.h"

#include <vector>

namespace megarl {
namespace {

// steps = now - base; returns whether one of them is wide.
template <typename T>
MEGARL_INLINE bool compare(const T* __restrict__ base, const T* __restrict__ now,
                           T* __restrict__ steps, Bitmap* bitmap) {
  uint8_t changed[kDeltaBlock];
  T wide = 0;
  for (int64_t i = 0; i < kDeltaBlock; ++i) {
    steps[i] = static_cast<T>(now[i] - base[i]);
    changed[i] = steps[i] != 0;
    wide |= is_wide(steps[i]);
  }
  for (int64_t i = 0; i < kDeltaBlock / 8; ++i) {
    uint64_t eight;
    std::memcpy(&eight, changed + 8 * i, 8);
    bitmap->bytes[i] = static_cast<uint8_t>((eight * 0x0102040810204080u) >> 56);
  }
  return wide != 0;
}

// Those of 1-byte steps go two into a byte.
MEGARL_INLINE void put_narrow(const uint8_t* picked, int64_t count, uint8_t* out) {
  for (int64_t k = 0; k < count / 2; ++k) {
    out[k] = static_cast<uint8_t>((picked[2 * k] & 15) | (picked[2 * k + 1] << 4));
  }
  if (count % 2) out[count / 2] = picked[count - 1] & 15;
}
MEGARL_INLINE void put_narrow(const uint16_t* picked, int64_t count, uint8_t* out) {
  for (int64_t k = 0; k < count; ++k) out[k] = static_cast<uint8_t>(picked[k]);
}
MEGARL_INLINE void put_narrow(const uint32_t* picked, int64_t count, uint8_t* out) {
  for (int64_t k = 0; k < count; ++k) {
    const uint16_t low = static_cast<uint16_t>(picked[k]);
    std::memcpy(out + 2 * k, &low, 2);
  }
}

struct Output {
  uint8_t* places;
  uint8_t* values;
};

// A whole block, of which `size` elements are there; returns its code.
template <typename T>
MEGARL_INLINE uint8_t encode_block(const T* base, const T* now, int64_t size, Output* out) {
  T steps[kDeltaBlock], picked[kDeltaBlock];
  Bitmap bitmap;
  Places places;
  const bool narrow = !compare(base, now, steps, &bitmap);
  const int64_t count = list_places(bitmap, &places);
  const uint8_t code = code_of(count, size, narrow);
  if (count == 0) return code;
  const T* source = narrow ? steps : now;
  if (count == size) {
    std::memcpy(picked, source, size * sizeof(T));
  } else {
    for (int64_t k = 0; k < count; ++k) picked[k] = source[places.at[k]];
  }
  const bool mapped = kind_of(code) == kBitmap;
  std::memcpy(out->places, mapped ? bitmap.bytes : places.at, place_bytes(code, size));
  if (narrow) {
    put_narrow(picked, count, out->values);
  } else {
    std::memcpy(out->values, picked, count * sizeof(T));
  }
  out->places += place_bytes(code, size);
  out->values += value_bytes(code, count, sizeof(T));
  return code;
}

// The chunk's bytes go to `out`, the new elements to `base`; returns how many bytes.
template <typename T>
MEGARL_INLINE int64_t encode_elements(T* base, const T* now, int64_t size, uint8_t* out) {
  if (std::memcmp(base, now, size * sizeof(T)) == 0) return 0;
  const int64_t blocks = blocks_in(size);
  uint8_t values[kDeltaValues];
  Output to{out + blocks, values};
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = b * kDeltaBlock, here = size_of(b, size, kDeltaBlock);
    if (here == kDeltaBlock) {
      out[b] = encode_block(base + at, now + at, here, &to);
    } else {  // filled up with elements that are equal
      T old_tail[kDeltaBlock] = {}, new_tail[kDeltaBlock] = {};
      std::memcpy(old_tail, base + at, here * sizeof(T));
      std::memcpy(new_tail, now + at, here * sizeof(T));
      out[b] = encode_block(old_tail, new_tail, here, &to);
    }
    if (out[b] != 0) std::memcpy(base + at, now + at, here * sizeof(T));
  }
  const int64_t num_values = to.values - values;
  std::memcpy(to.places, values, num_values);
  return to.places + num_values - out;
}

MEGARL_SIMD int64_t encode_chunk(uint8_t* base, const uint8_t* now, int64_t size, uint8_t* out) {
  return encode_elements(base, now, size, out);
}
MEGARL_SIMD int64_t encode_chunk(uint16_t* base, const uint16_t* now, int64_t size, uint8_t* out) {
  return encode_elements(base, now, size, out);
}
MEGARL_SIMD int64_t encode_chunk(uint32_t* base, const uint32_t* now, int64_t size, uint8_t* out) {
  return encode_elements(base, now, size, out);
}

struct Encoded {
  std::vector<uint16_t> table;
  std::vector<std::vector<uint8_t>> parts;

  int64_t num_bytes() const {
    int64_t sum = kDeltaEntry * static_cast<int64_t>(table.size());
    for (const auto& part : parts) sum += part.size();
    return sum;
  }
};

template <typename T>
Encoded encode_all(void* base_data, const void* now_data, int64_t numel) {
  T* base = static_cast<T*>(base_data);
  const T* now = static_cast<const T*>(now_data);
  const int64_t chunks = num_chunks(numel);
  Encoded out{std::vector<uint16_t>(chunks), {}};
  out.parts.resize((chunks + kChunksPerPart - 1) / kChunksPerPart);
  for_each_part(chunks, [&](int64_t part, int64_t first, int64_t last) {
    uint8_t room[kDeltaBlocks + kDeltaPlaces + kDeltaValues];
    for (int64_t c = first; c < last; ++c) {
      const int64_t at = c * kDeltaChunk, size = size_of(c, numel, kDeltaChunk);
      const int64_t num_bytes = encode_chunk(base + at, now + at, size, room);
      out.table[c] = static_cast<uint16_t>(num_bytes);
      out.parts[part].insert(out.parts[part].end(), room, room + num_bytes);
    }
  });
  return out;
}

// base, new [...] of 1, 2 or 4 bytes an element -> payload u8 [P]; base becomes new
Tensor delta_encode_cpu(Tensor base, const Tensor& now) {
  check_delta_encode(base, now);
  const int64_t numel = base.numel(), whole = numel * static_cast<int64_t>(base.element_size());
  if (numel == 0) return torch::stable::new_empty(base, {0}, ScalarType::Byte);

  const Tensor x = torch::stable::contiguous(now);
  const auto run = base.element_size() == 1   ? encode_all<uint8_t>
                   : base.element_size() == 2 ? encode_all<uint16_t>
                                              : encode_all<uint32_t>;
  const Encoded found = run(base.mutable_data_ptr(), x.const_data_ptr(), numel);
  const int64_t table = kDeltaEntry * static_cast<int64_t>(found.table.size());
  int64_t size = found.num_bytes();
  size = size == table ? 0 : std::min(size, whole);
  Tensor payload = torch::stable::new_empty(base, {size}, ScalarType::Byte);
  advise_large_pages(payload);
  uint8_t* out = static_cast<uint8_t*>(payload.mutable_data_ptr());
  if (size == 0) return payload;
  if (size == whole) {
    copy_bytes(out, x.const_data_ptr(), whole);
    return payload;
  }
  std::memcpy(out, found.table.data(), table);
  out += table;
  for (const auto& part : found.parts) {
    if (!part.empty()) std::memcpy(out, part.data(), part.size());
    out += part.size();
  }
  return payload;
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CPU, m) {
  m.impl("delta_encode_", TORCH_BOX(&megarl::delta_encode_cpu));
}
