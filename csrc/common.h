// What the operators share: names from torch's stable ABI, and argument checks whose messages carry
// what was found.  An op reads: shape comment, checks, early return, contiguous, one loop, return.
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

// Packed rows: `values` f32|f64 [T] holds S sequences, sequence s being the half-open range
// [cu_seqlens[s], cu_seqlens[s+1]); `cu_seqlens` i32|i64 [S+1].  The entries are checked by the
// implementation, since on a GPU they cannot be read here without stalling the stream.
inline void check_packed(const char* op, const Tensor& values, const Tensor& cu_seqlens) {
  const ScalarType value_type = values.scalar_type(), bound_type = cu_seqlens.scalar_type();
  STD_TORCH_CHECK(values.dim() == 1 && cu_seqlens.dim() == 1, op,
                  ": values and cu_seqlens must have 1 dimension, got ", values.dim(), " and ",
                  cu_seqlens.dim());
  STD_TORCH_CHECK(value_type == ScalarType::Float || value_type == ScalarType::Double, op,
                  ": values must be float32 or float64, got ", value_type);
  STD_TORCH_CHECK(bound_type == ScalarType::Int || bound_type == ScalarType::Long, op,
                  ": cu_seqlens must be int32 or int64, got ", bound_type);
  STD_TORCH_CHECK(cu_seqlens.numel() >= 1, op, ": cu_seqlens must have at least 1 entry, got 0");
  STD_TORCH_CHECK(values.device() == cu_seqlens.device(), op,
                  ": values and cu_seqlens must be on the same device");
}

}  // namespace megarl
