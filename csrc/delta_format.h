// The form of a delta, the same on CPU and GPU.  megarl/ops/delta.py defines it.
//
//   A payload of 0 bytes: nothing changed.  As many as the tensor has: its new bytes.  Fewer:
//     table   u16 of every chunk, 4,096 elements: how many bytes it has; 0 where nothing changed
//     chunks  a code for every block of 256 elements; then the places of every block; then the values
//
// The last block and the last chunk hold what is left.  All is little-endian.
#pragma once

#include "common.h"

#include <cstdlib>
#include <string>

#ifdef __CUDACC__
#define MEGARL_DELTA __host__ __device__ inline
#else
#define MEGARL_DELTA inline __attribute__((always_inline))
#endif

namespace megarl {

constexpr int64_t kDeltaBlock = 256, kDeltaBlocks = 16, kDeltaChunk = kDeltaBlock * kDeltaBlocks;
constexpr int64_t kDeltaEntry = 2;  // bytes of the table
// The most that a chunk's places and values have.
constexpr int64_t kDeltaPlaces = kDeltaChunk / 8, kDeltaValues = kDeltaChunk * 4;

// A code's lower 7 bits: below kBitmap a number of positions.
constexpr uint8_t kBitmap = 32, kAll = 33, kNarrow = 128;

enum Fault : int { kNoFault = 0, kBadCode, kBadLength, kBadPlace, kNumFaults };

MEGARL_DELTA uint8_t kind_of(uint8_t code) { return code & 127; }

MEGARL_DELTA bool is_code(uint8_t code) {
  return code == 0 || (kind_of(code) >= 1 && kind_of(code) <= kAll);
}

// Of a block of `size` elements, of which `count` changed; `narrow`: by steps of half the width.
MEGARL_DELTA uint8_t code_of(int64_t count, int64_t size, bool narrow) {
  if (count == 0) return 0;
  const int64_t kind = count == size ? kAll : count < (size + 7) / 8 ? count : kBitmap;
  return static_cast<uint8_t>(kind | (narrow ? kNarrow : 0));
}

MEGARL_DELTA int64_t place_bytes(uint8_t code, int64_t size) {
  const uint8_t kind = kind_of(code);
  return kind < kBitmap ? kind : kind == kBitmap ? (size + 7) / 8 : 0;
}

// `item`: bytes of an element.  Steps of 1-byte elements are 4 bits, two a byte.
MEGARL_DELTA int64_t value_bytes(uint8_t code, int64_t count, int64_t item) {
  return code & kNarrow ? (count * item + 1) / 2 : count * item;
}

MEGARL_DELTA int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
MEGARL_DELTA int64_t num_chunks(int64_t numel) { return (numel + kDeltaChunk - 1) / kDeltaChunk; }
// Of chunk or block `index`, of `most` elements each.
MEGARL_DELTA int64_t size_of(int64_t index, int64_t numel, int64_t most) {
  return least(most, numel - index * most);
}
MEGARL_DELTA int64_t blocks_in(int64_t size) { return (size + kDeltaBlock - 1) / kDeltaBlock; }

// Whether a step of an unsigned T, as a signed number, has half of its bits.
template <typename T>
MEGARL_DELTA bool is_wide(T step) {
  constexpr int kHalf = 4 * sizeof(T);
  return static_cast<T>(step + (T{1} << (kHalf - 1))) >> kHalf != 0;
}

// The step whose lower half is `low`.
template <typename T>
MEGARL_DELTA T widened(T low) {
  constexpr int kHalf = 4 * sizeof(T);
  constexpr T kSign = T{1} << (kHalf - 1), kMask = static_cast<T>((kSign << 1) - 1);
  return static_cast<T>(static_cast<T>((low & kMask) ^ kSign) - kSign);
}

inline std::string shape_of(const Tensor& x) {
  std::string text;
  for (int64_t d = 0; d < x.dim(); ++d) text += (d ? ", " : "") + std::to_string(x.size(d));
  return "[" + text + "]";
}

inline void check_delta_base(const char* op, const Tensor& base) {
  const auto item = base.element_size();
  STD_TORCH_CHECK(item == 1 || item == 2 || item == 4, op,
                  ": elements must be of 1, 2 or 4 bytes, got ", item);
  STD_TORCH_CHECK(base.is_contiguous(), op, ": base must be contiguous");
}

inline void check_delta_encode(const Tensor& base, const Tensor& now) {
  const char* op = "delta_encode_";
  check_delta_base(op, base);
  STD_TORCH_CHECK(now.scalar_type() == base.scalar_type(), op, ": new must have base's dtype, ",
                  base.scalar_type(), ", got ", now.scalar_type());
  STD_TORCH_CHECK(shape_of(now) == shape_of(base), op, ": new must have base's shape, ",
                  shape_of(base), ", got ", shape_of(now));
  check_device(op, "new", now, base);
}

inline void check_delta_apply(const Tensor& base, const Tensor& payload) {
  const char* op = "delta_apply_";
  check_delta_base(op, base);
  check_dim(op, "payload", payload, 1);
  check_type(op, "payload", payload, "uint8", ScalarType::Byte);
  check_device(op, "payload", payload, base);
  const int64_t given = payload.numel(), most = base.numel() * base.element_size();
  STD_TORCH_CHECK(given <= most, op, ": payload must have at most the ", most,
                  " bytes of the tensor, got ", given);
  const int64_t table = kDeltaEntry * num_chunks(base.numel());
  STD_TORCH_CHECK(given == 0 || given == most || given >= table, op, ": payload must have at least the ",
                  table, " bytes of its table, got ", given);
}

inline void check_delta_table(int64_t found, int64_t left) {
  STD_TORCH_CHECK(found == left, "delta_apply_: payload has ", left,
                  " bytes behind its table, which says ", found);
}

// What is wrong with chunk `chunk`.
[[noreturn]] inline void refuse_delta_chunk(int64_t chunk, int fault) {
  const char* const what[kNumFaults] = {
      "nothing wrong", "a code that is none", "another length than its codes say",
      "places that are out of order, or beyond the block"};
  STD_TORCH_CHECK(false, "delta_apply_: chunk ", chunk, " of the payload has ", what[fault]);
  std::abort();  // not reached
}

}  // namespace megarl
