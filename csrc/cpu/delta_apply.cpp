// delta_apply_ on the CPU: all of a payload is checked before any of it is applied.
#include "delta_parts.h"

#include <vector>

namespace megarl {
namespace {


// Whether these are places of a block of `size` elements, as the code announces them.
MEGARL_INLINE bool are_places(uint8_t code, const uint8_t* places, int64_t size) {
  const uint8_t kind = kind_of(code);
  if (kind == kAll) return true;
  if (kind == kBitmap) return size % 8 == 0 || places[size / 8] >> (size % 8) == 0;
  for (int64_t k = 0; k < kind; ++k) {
    if (places[k] >= size || (k > 0 && places[k] <= places[k - 1])) return false;
  }
  return true;
}

MEGARL_INLINE int64_t count_places(uint8_t code, const uint8_t* places, int64_t size) {
  const uint8_t kind = kind_of(code);
  if (kind != kBitmap) return kind == kAll ? size : kind;
  int64_t count = 0;
  for (int64_t k = 0; k < (size + 7) / 8; ++k) count += kByteBits.counts[places[k]];
  return count;
}

// What is wrong with the `num_bytes` bytes of a chunk of `size` elements.
MEGARL_SIMD int fault_of(const uint8_t* chunk, int64_t num_bytes, int64_t size, int64_t item) {
  const int64_t blocks = blocks_in(size);
  if (num_bytes < blocks) return kBadLength;
  int64_t length = blocks;
  for (int64_t b = 0; b < blocks; ++b) {
    if (!is_code(chunk[b])) return kBadCode;
    length += place_bytes(chunk[b], size_of(b, size, kDeltaBlock));
  }
  if (length > num_bytes) return kBadLength;
  const uint8_t* places = chunk + blocks;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t here = size_of(b, size, kDeltaBlock);
    if (!are_places(chunk[b], places, here)) return kBadPlace;
    length += value_bytes(chunk[b], count_places(chunk[b], places, here), item);
    places += place_bytes(chunk[b], here);
  }
  return length == num_bytes ? kNoFault : kBadLength;
}

MEGARL_INLINE void get_narrow(const uint8_t* values, int64_t count, uint8_t* steps) {
  for (int64_t k = 0; k < (count + 1) / 2; ++k) {
    steps[2 * k] = widened<uint8_t>(values[k]);
    steps[2 * k + 1] = widened<uint8_t>(values[k] >> 4);
  }
}
MEGARL_INLINE void get_narrow(const uint8_t* values, int64_t count, uint16_t* steps) {
  for (int64_t k = 0; k < count; ++k) steps[k] = widened<uint16_t>(values[k]);
}
MEGARL_INLINE void get_narrow(const uint8_t* values, int64_t count, uint32_t* steps) {
  for (int64_t k = 0; k < count; ++k) {
    uint16_t low;
    std::memcpy(&low, values + 2 * k, 2);
    steps[k] = widened<uint32_t>(low);
  }
}

// Returns how many elements were changed.
template <typename T>
MEGARL_INLINE int64_t apply_block(T* x, int64_t size, uint8_t code, const uint8_t* places,
                                  const uint8_t* values) {
  const uint8_t kind = kind_of(code);
  int64_t count = kind == kAll ? size : kind;
  Places listed;
  if (kind == kBitmap) {
    Bitmap bitmap;
    std::memcpy(bitmap.bytes, places, (size + 7) / 8);
    count = list_places(bitmap, &listed);
    places = listed.at;
  }
  T picked[kDeltaBlock];
  if (!(code & kNarrow)) {
    std::memcpy(picked, values, count * sizeof(T));
    if (kind == kAll) {
      std::memcpy(x, picked, size * sizeof(T));
    } else {
      for (int64_t k = 0; k < count; ++k) x[places[k]] = picked[k];
    }
    return count;
  }
  get_narrow(values, count, picked);
  if (kind == kAll) {
    for (int64_t i = 0; i < size; ++i) x[i] = static_cast<T>(x[i] + picked[i]);
  } else {
    for (int64_t k = 0; k < count; ++k) {
      x[places[k]] = static_cast<T>(x[places[k]] + picked[k]);
    }
  }
  return count;
}

// A chunk that has no fault.
template <typename T>
MEGARL_INLINE void apply_elements(T* base, int64_t size, const uint8_t* chunk) {
  const int64_t blocks = blocks_in(size);
  const uint8_t *places = chunk + blocks, *values = places;
  for (int64_t b = 0; b < blocks; ++b) values += place_bytes(chunk[b], size_of(b, size, kDeltaBlock));
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t code = chunk[b];
    if (code == 0) continue;
    const int64_t here = size_of(b, size, kDeltaBlock);
    const int64_t count = apply_block(base + b * kDeltaBlock, here, code, places, values);
    places += place_bytes(code, here);
    values += value_bytes(code, count, sizeof(T));
  }
}

MEGARL_SIMD void apply_chunk(uint8_t* base, int64_t size, const uint8_t* chunk) {
  apply_elements(base, size, chunk);
}
MEGARL_SIMD void apply_chunk(uint16_t* base, int64_t size, const uint8_t* chunk) {
  apply_elements(base, size, chunk);
}
MEGARL_SIMD void apply_chunk(uint32_t* base, int64_t size, const uint8_t* chunk) {
  apply_elements(base, size, chunk);
}

// Where each chunk begins, and the end of the last, from the payload's first byte on.
std::vector<int64_t> chunk_bounds(const uint8_t* payload, int64_t chunks, int64_t num_bytes) {
  std::vector<int64_t> bounds(chunks + 1, kDeltaEntry * chunks);
  for (int64_t c = 0; c < chunks; ++c) {
    bounds[c + 1] = bounds[c] + payload[2 * c] + 256 * payload[2 * c + 1];
  }
  check_delta_table(bounds[chunks] - bounds[0], num_bytes - bounds[0]);
  return bounds;
}

void check_chunks(const uint8_t* payload, const std::vector<int64_t>& bounds, int64_t numel,
                  int64_t item) {
  const int64_t chunks = num_chunks(numel);
  std::vector<uint8_t> faults(chunks, kNoFault);
  for_each_part(chunks, [&](int64_t, int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      const int64_t num_bytes = bounds[c + 1] - bounds[c];
      if (num_bytes == 0) continue;
      const int64_t size = size_of(c, numel, kDeltaChunk);
      faults[c] = static_cast<uint8_t>(fault_of(payload + bounds[c], num_bytes, size, item));
    }
  });
  const auto bad = std::find_if(faults.begin(), faults.end(), [](uint8_t f) { return f != kNoFault; });
  if (bad != faults.end()) refuse_delta_chunk(bad - faults.begin(), *bad);
}

template <typename T>
void apply_all(void* base, const uint8_t* payload, const std::vector<int64_t>& bounds,
               int64_t numel) {
  for_each_part(num_chunks(numel), [&](int64_t, int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      if (bounds[c] == bounds[c + 1]) continue;
      apply_chunk(static_cast<T*>(base) + c * kDeltaChunk, size_of(c, numel, kDeltaChunk),
                  payload + bounds[c]);
    }
  });
}

// base [...] of 1, 2 or 4 bytes an element, payload u8 [P] of it; base becomes what was encoded
void delta_apply_cpu(Tensor base, const Tensor& payload) {
  check_delta_apply(base, payload);
  const int64_t numel = base.numel(), item = base.element_size(), given = payload.numel();
  if (given == 0) return;

  const Tensor in = torch::stable::contiguous(payload);
  const auto* bytes = static_cast<const uint8_t*>(in.const_data_ptr());
  void* out = base.mutable_data_ptr();
  if (given == numel * item) return copy_bytes(out, bytes, given);
  const std::vector<int64_t> bounds = chunk_bounds(bytes, num_chunks(numel), given);
  check_chunks(bytes, bounds, numel, item);
  const auto run = item == 1 ? apply_all<uint8_t> : item == 2 ? apply_all<uint16_t> : apply_all<uint32_t>;
  run(out, bytes, bounds, numel);
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CPU, m) {
  m.impl("delta_apply_", TORCH_BOX(&megarl::delta_apply_cpu));
}
