// What the operators share: names from torch's stable ABI, and argument checks whose messages carry
// what was found.  An op reads: shape comment, checks, early return, contiguous, one loop, return.
//
// Bounds of packed sequences, `cu_seqlens` i32|i64 [S+1], mean the same everywhere: they start at 0,
// do not decrease, and end at the row's T tokens.  Their entries are checked by the implementation,
// since on a GPU they cannot be read here without stalling the stream.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

namespace megarl {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline bool is_one_of(ScalarType type) { return false; }
template <typename... Rest>
bool is_one_of(ScalarType type, ScalarType first, Rest... rest) {
  return type == first || is_one_of(type, rest...);
}

// `accepted` is the message's wording of the types that are.
template <typename... Types>
void check_type(const char* op, const char* name, const Tensor& x, const char* accepted,
                Types... types) {
  STD_TORCH_CHECK(is_one_of(x.scalar_type(), types...), op, ": ", name, " must be ", accepted,
                  ", got ", x.scalar_type());
}

inline void check_dim(const char* op, const char* name, const Tensor& x, int64_t dim) {
  STD_TORCH_CHECK(x.dim() == dim, op, ": ", name, " must have ", dim, " dimension(s), got ",
                  x.dim());
}

inline void check_device(const char* op, const char* name, const Tensor& x, const Tensor& like) {
  STD_TORCH_CHECK(x.device() == like.device(), op, ": ", name,
                  " must be on the device of the others");
}

// A row of the op's `num_tokens` tokens.
inline void check_row(const char* op, const char* name, const Tensor& x, const Tensor& like) {
  check_dim(op, name, x, 1);
  STD_TORCH_CHECK(x.numel() == like.numel(), op, ": ", name, " must have ", like.numel(),
                  " tokens like the others, got ", x.numel());
  check_device(op, name, x, like);
}

inline void check_real(const char* op, const char* name, const Tensor& x) {
  check_type(op, name, x, "float32 or float64", ScalarType::Float, ScalarType::Double);
}

inline void check_cu_seqlens(const char* op, const Tensor& cu_seqlens, const Tensor& like) {
  check_dim(op, "cu_seqlens", cu_seqlens, 1);
  check_type(op, "cu_seqlens", cu_seqlens, "int32 or int64", ScalarType::Int, ScalarType::Long);
  STD_TORCH_CHECK(cu_seqlens.numel() >= 1, op, ": cu_seqlens must have at least 1 entry, got 0");
  check_device(op, "cu_seqlens", cu_seqlens, like);
}

inline void check_segment_sum(const Tensor& values, const Tensor& cu_seqlens) {
  check_dim("segment_sum", "values", values, 1);
  check_real("segment_sum", "values", values);
  check_cu_seqlens("segment_sum", cu_seqlens, values);
}

}  // namespace megarl
