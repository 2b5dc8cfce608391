// logprob_entropy on the CPU: one pass over a row forward, one backward, a row one thread's.
//
// 1. Forward, a row goes by in blocks.  A block is summed relative to what the blocks before were, and
//    once more only where it has a much larger logit; then those before are scaled down to it.  Sums of
//    a block are kLanes partial ones in the logits' real type; blocks are added in float64.
// 2. Columns at or beyond the vocabulary's end are not read; their gradient is exactly 0.
// 3. Backward, a row whose two gradients are 0 is not read either.
// Nothing depends on how many threads there are.
#include "../logprob_entropy_checks.h"
#include "logprob_entropy_rows.h"

#include <algorithm>

namespace megarl {
namespace {

MEGARL_SIMD RowSums row_sums(const uint16_t* x, int64_t width, double per_logit) {
  return sums_of(x, width, per_logit);
}
MEGARL_SIMD RowSums row_sums(const float* x, int64_t width, double per_logit) {
  return sums_of(x, width, per_logit);
}
MEGARL_SIMD RowSums row_sums(const double* x, int64_t width, double per_logit) {
  return sums_of(x, width, per_logit);
}
MEGARL_SIMD void write_row(uint16_t* x, int64_t width, const RowGradient<float>& row) {
  write_gradient(x, width, row);
}
MEGARL_SIMD void write_row(float* x, int64_t width, const RowGradient<float>& row) {
  write_gradient(x, width, row);
}
MEGARL_SIMD void write_row(double* x, int64_t width, const RowGradient<double>& row) {
  write_gradient(x, width, row);
}

bool hold(const Columns& columns, int64_t target) {
  return target >= columns.first && target < columns.first + columns.width;
}

void check_targets(const char* op, const int64_t* targets, int64_t num_tokens,
                   const Columns& columns) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    STD_TORCH_CHECK(targets[t] >= 0 && targets[t] < columns.vocab_size, op,
                    ": targets must be in [0, ", columns.vocab_size, "), got ", targets[t],
                    " at token ", t);
  }
}

// Runs `work(first, last)` on ranges of the rows, several threads at a time.
template <typename Work>
void for_rows(const Tensor& logits, const Work& work) {
  constexpr int64_t kLogitsPerThread = 32768;  // below this a thread costs more than it saves
  const int64_t grain = kLogitsPerThread / std::max<int64_t>(1, logits.size(1)) + 1;
  torch::stable::parallel_for(0, logits.size(0), grain, work);
}

template <typename storage_t>
void forward_rows(const Tensor& logits, const int64_t* targets, const Columns& columns,
                  double temperature, double* stats) {
  const storage_t* data = static_cast<const storage_t*>(logits.data_ptr());
  const int64_t num_tokens = logits.size(0), stride = logits.stride(0);
  for_rows(logits, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const storage_t* x = data + t * stride;
      const RowSums row = row_sums(x, columns.width, kLog2E / temperature);
      stats[t] = row.shift;
      stats[num_tokens + t] = row.sum;
      stats[2 * num_tokens + t] = kLn2 * row.weighted;
      stats[3 * num_tokens + t] =
          hold(columns, targets[t]) ? Logit<storage_t>::load(x[targets[t] - columns.first]) : 0.0;
    }
  });
}

template <typename storage_t>
void backward_rows(const Tensor& logits, const int64_t* targets, const double* softmax,
                   const double* grads, const Columns& columns, double temperature) {
  using real_t = typename Logit<storage_t>::real_t;
  storage_t* data = static_cast<storage_t*>(logits.data_ptr());
  const int64_t num_tokens = logits.size(0), stride = logits.stride(0);
  for_rows(logits, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      storage_t* x = data + t * stride;
      const double g = grads[t], h = grads[num_tokens + t];
      if (g == 0.0 && h == 0.0) {
        std::fill(x, x + logits.size(1), storage_t(0));
        continue;
      }
      const RowInputs row = {softmax[t], softmax[num_tokens + t], softmax[2 * num_tokens + t], g, h};
      const int64_t target = targets[t] - columns.first;
      const bool here = hold(columns, targets[t]);
      const double y = here ? Logit<storage_t>::load(x[target]) : 0.0;
      write_row(x, columns.width, row_gradient<real_t>(row, temperature));
      std::fill(x + columns.width, x + logits.size(1), storage_t(0));
      if (here) {
        const double own = target_gradient(row, y, temperature);
        x[target] = Logit<storage_t>::store(static_cast<real_t>(own));
      }
    }
  });
}

// logits bf16|f32|f64 [T, W], targets i64 [T] -> f64 [4, T]: shift, sum, weighted, the target's logit
Tensor logprob_entropy_cpu(const Tensor& logits, const Tensor& targets, int64_t first_column,
                           int64_t vocab_size, double temperature) {
  const char* op = "logprob_entropy";
  check_logits(op, logits, targets);
  const Columns columns = checked_columns(op, logits, first_column, vocab_size, temperature);
  const Tensor y = torch::stable::contiguous(targets);
  check_targets(op, y.const_data_ptr<int64_t>(), y.numel(), columns);

  Tensor stats = torch::stable::new_empty(logits, {4, logits.size(0)}, ScalarType::Double);
  const auto run = logits.scalar_type() == ScalarType::BFloat16 ? forward_rows<uint16_t>
                   : logits.scalar_type() == ScalarType::Float  ? forward_rows<float>
                                                                : forward_rows<double>;
  run(logits, y.const_data_ptr<int64_t>(), columns, temperature, stats.mutable_data_ptr<double>());
  return stats;
}

// The same logits and targets, softmax f64 [3, T] of all columns (shift, sum, mean), grads f64 [2, T]
// (of log-prob and entropy); the logits' gradient takes the logits' place.
void logprob_entropy_backward_cpu(Tensor logits, const Tensor& targets, const Tensor& softmax,
                                  const Tensor& grads, int64_t first_column, int64_t vocab_size,
                                  double temperature) {
  const char* op = "logprob_entropy_backward_";
  check_logits(op, logits, targets);
  const Columns columns = checked_columns(op, logits, first_column, vocab_size, temperature);
  check_backward(op, logits, softmax, grads);
  const Tensor y = torch::stable::contiguous(targets), s = torch::stable::contiguous(softmax);
  const Tensor g = torch::stable::contiguous(grads);
  check_targets(op, y.const_data_ptr<int64_t>(), y.numel(), columns);

  const auto run = logits.scalar_type() == ScalarType::BFloat16 ? backward_rows<uint16_t>
                   : logits.scalar_type() == ScalarType::Float  ? backward_rows<float>
                                                                : backward_rows<double>;
  run(logits, y.const_data_ptr<int64_t>(), s.const_data_ptr<double>(), g.const_data_ptr<double>(),
      columns, temperature);
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CPU, m) {
  m.impl("logprob_entropy", TORCH_BOX(&megarl::logprob_entropy_cpu));
  m.impl("logprob_entropy_backward_", TORCH_BOX(&megarl::logprob_entropy_backward_cpu));
}
