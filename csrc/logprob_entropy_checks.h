// Argument checks of logprob_entropy, and which of the vocabulary's columns its logits have.
#pragma once

#include "common.h"

#include <algorithm>

namespace megarl {

// Columns [first, first + width) of the vocabulary; the row has more, of padding, if `width` is less
// than its size.
struct Columns {
  int64_t first, width, vocab_size;

  Columns(const Tensor& logits, int64_t first_column, int64_t vocab)
      : first(first_column),
        width(std::max<int64_t>(0, std::min(logits.size(1), vocab - first_column))),
        vocab_size(vocab) {}
};

// logits bf16|f32|f64 [T, W] whose rows are contiguous, targets i64 [T].
inline void check_logits(const char* op, const Tensor& logits, const Tensor& targets) {
  check_dim(op, "logits", logits, 2);
  check_type(op, "logits", logits, "bfloat16, float32 or float64", ScalarType::BFloat16,
             ScalarType::Float, ScalarType::Double);
  STD_TORCH_CHECK(logits.size(1) <= 1 || logits.stride(1) == 1, op,
                  ": logits must be contiguous along the vocabulary, got stride ", logits.stride(1));
  check_dim(op, "targets", targets, 1);
  check_type(op, "targets", targets, "int64", ScalarType::Long);
  STD_TORCH_CHECK(targets.numel() == logits.size(0), op, ": targets must have ", logits.size(0),
                  " tokens like logits, got ", targets.numel());
  check_device(op, "targets", targets, logits);
}

inline Columns checked_columns(const char* op, const Tensor& logits, int64_t first_column,
                               int64_t vocab_size, double temperature) {
  STD_TORCH_CHECK(first_column >= 0, op, ": first_column must not be negative, got ", first_column);
  STD_TORCH_CHECK(vocab_size >= 1, op, ": vocab_size must be at least 1, got ", vocab_size);
  STD_TORCH_CHECK(temperature > 0 && temperature < 1e30, op,
                  ": temperature must be positive and finite, got ", temperature);
  return Columns(logits, first_column, vocab_size);
}

// f64 [rows, T]
inline void check_token_rows(const char* op, const char* name, const Tensor& x, int64_t rows,
                             const Tensor& logits) {
  check_dim(op, name, x, 2);
  check_type(op, name, x, "float64", ScalarType::Double);
  STD_TORCH_CHECK(x.size(0) == rows && x.size(1) == logits.size(0), op, ": ", name, " must be [",
                  rows, ", ", logits.size(0), "], got [", x.size(0), ", ", x.size(1), "]");
  check_device(op, name, x, logits);
}

// What backward has beside the logits, which are written: rows must not share memory.
inline void check_backward(const char* op, const Tensor& logits, const Tensor& softmax,
                           const Tensor& grads) {
  check_token_rows(op, "softmax", softmax, 3, logits);
  check_token_rows(op, "grads", grads, 2, logits);
  STD_TORCH_CHECK(logits.size(0) <= 1 || logits.stride(0) >= logits.size(1), op,
                  ": rows of logits must not overlap, got ", logits.size(1), " columns at stride ",
                  logits.stride(0));
}

}  // namespace megarl
