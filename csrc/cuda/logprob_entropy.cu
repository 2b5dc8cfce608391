// logprob_entropy on CUDA: one block a row, the CPU's arithmetic for each element.
//
// 1. Forward, thread i goes over columns i, i + kThreads, ... with a shift of its own, which it raises
//    where a logit is far above; the threads' sums are then put on their largest shift and added in a
//    fixed tree.  Sums are float64 throughout: a row is bound by memory all the same.
// 2. Backward, each thread overwrites its columns; the target's logit is read before anything is.
// 3. A target outside of the vocabulary is printed and the kernel traps (device.cuh).
// The order depends on the row's width alone, so equal inputs give equal bits; it is not the CPU's.
#include "../logprob_entropy_checks.h"
#include "../logprob_entropy_math.h"
#include "device.cuh"

namespace megarl {
namespace {

constexpr int kThreads = 512;

__device__ bool hold(const Columns& columns, int64_t target) {
  return target >= columns.first && target < columns.first + columns.width;
}

// All threads call it.
__device__ void check_target(const char* op, int64_t target, int64_t vocab_size) {
  if (target >= 0 && target < vocab_size) return;
  if (threadIdx.x == 0) {
    printf("%s: targets must be in [0, %lld), got %lld at token %lld\n", op, (long long)vocab_size,
           (long long)target, (long long)blockIdx.x);
  }
  __syncthreads();  // the message is written before the trap ends the kernel
  __trap();
}

__device__ double block_max(double value) {
  __shared__ double partial[kThreads];
  partial[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      const double other = partial[threadIdx.x + half];
      if (other > partial[threadIdx.x]) partial[threadIdx.x] = other;
    }
    __syncthreads();
  }
  const double most = partial[0];
  __syncthreads();  // the buffer may be used again
  return most;
}

template <typename storage_t>
__global__ void forward_kernel(const storage_t* logits, const int64_t* targets, Columns columns,
                               int64_t stride, double temperature, double* stats) {
  using real_t = typename Logit<storage_t>::real_t;
  const int64_t token = blockIdx.x, num_tokens = gridDim.x, target = targets[token];
  check_target("logprob_entropy", target, columns.vocab_size);
  const storage_t* x = logits + token * stride;
  const double per_logit = kLog2E / temperature;
  const real_t factor = static_cast<real_t>(per_logit);

  RowSums row = no_logits();
  for (int64_t i = threadIdx.x; i < columns.width; i += kThreads) {
    const real_t value = Logit<storage_t>::load(x[i]);
    if ((value - row.shift) * per_logit > kHeadroom) row = raised(row, value, per_logit);
    const real_t s = (value - static_cast<real_t>(finite_or_zero(row.shift))) * factor;
    const double e = power_of_two(s);
    row.sum += e;
    row.weighted += e * zero_like_power(s, s);
  }
  const double shift = block_max(row.shift);
  row = raised(row, finite_or_zero(shift), per_logit);
  const double sum = block_sum<kThreads>(row.sum);
  const double weighted = block_sum<kThreads>(row.weighted);
  if (threadIdx.x == 0) {
    stats[token] = shift;
    stats[num_tokens + token] = sum;
    stats[2 * num_tokens + token] = kLn2 * weighted;
    stats[3 * num_tokens + token] =
        hold(columns, target) ? Logit<storage_t>::load(x[target - columns.first]) : 0.0;
  }
}

template <typename storage_t>
__global__ void backward_kernel(storage_t* logits, const int64_t* targets, const double* softmax,
                                const double* grads, Columns columns, int64_t size,
                                int64_t stride, double temperature) {
  using real_t = typename Logit<storage_t>::real_t;
  const int64_t token = blockIdx.x, num_tokens = gridDim.x, target = targets[token];
  check_target("logprob_entropy_backward_", target, columns.vocab_size);
  storage_t* x = logits + token * stride;
  const RowInputs row = {softmax[token], softmax[num_tokens + token],
                         softmax[2 * num_tokens + token], grads[token],
                         grads[num_tokens + token]};
  const bool zero = row.g == 0.0 && row.h == 0.0;
  const bool here = !zero && hold(columns, target);
  const double y = here ? Logit<storage_t>::load(x[target - columns.first]) : 0.0;
  __syncthreads();  // every thread has read the target's logit

  const RowGradient<real_t> constants = row_gradient<real_t>(row, temperature);
  for (int64_t i = threadIdx.x; i < size; i += kThreads) {
    real_t grad = 0;
    if (!zero && i < columns.width) {
      const real_t value = Logit<storage_t>::load(x[i]);
      if (here && i == target - columns.first) {
        grad = static_cast<real_t>(target_gradient(row, y, temperature));
      } else if (constants.b == real_t(0)) {
        grad = gradient_without_entropy<storage_t>(constants, value);
      } else {
        grad = gradient<storage_t>(constants, value);
      }
    }
    x[i] = Logit<storage_t>::store(grad);
  }
}

template <typename storage_t>
void forward(const Tensor& logits, const Tensor& targets, const Columns& columns,
             double temperature, Tensor& stats) {
  forward_kernel<<<logits.size(0), kThreads, 0, current_stream(logits)>>>(
      static_cast<const storage_t*>(logits.data_ptr()), targets.const_data_ptr<int64_t>(), columns,
      logits.stride(0), temperature, stats.mutable_data_ptr<double>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename storage_t>
void backward(const Tensor& logits, const Tensor& targets, const Tensor& softmax,
              const Tensor& grads, const Columns& columns, double temperature) {
  backward_kernel<<<logits.size(0), kThreads, 0, current_stream(logits)>>>(
      static_cast<storage_t*>(logits.data_ptr()), targets.const_data_ptr<int64_t>(),
      softmax.const_data_ptr<double>(), grads.const_data_ptr<double>(), columns, logits.size(1),
      logits.stride(0), temperature);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// As csrc/cpu/logprob_entropy.cpp has it.
Tensor logprob_entropy_cuda(const Tensor& logits, const Tensor& targets, int64_t first_column,
                            int64_t vocab_size, double temperature) {
  check_logits("logprob_entropy", logits, targets);
  const Columns columns =
      checked_columns("logprob_entropy", logits, first_column, vocab_size, temperature);
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  Tensor stats = torch::stable::new_empty(logits, {4, logits.size(0)}, ScalarType::Double);
  if (logits.size(0) == 0) return stats;
  const Tensor y = torch::stable::contiguous(targets);
  const auto run = logits.scalar_type() == ScalarType::BFloat16 ? forward<uint16_t>
                   : logits.scalar_type() == ScalarType::Float  ? forward<float>
                                                                : forward<double>;
  run(logits, y, columns, temperature, stats);
  return stats;
}

void logprob_entropy_backward_cuda(Tensor logits, const Tensor& targets, const Tensor& softmax,
                                   const Tensor& grads, int64_t first_column, int64_t vocab_size,
                                   double temperature) {
  const char* op = "logprob_entropy_backward_";
  check_logits(op, logits, targets);
  const Columns columns = checked_columns(op, logits, first_column, vocab_size, temperature);
  check_backward(op, logits, softmax, grads);
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  if (logits.numel() == 0) return;
  const Tensor y = torch::stable::contiguous(targets), s = torch::stable::contiguous(softmax);
  const Tensor g = torch::stable::contiguous(grads);
  const auto run = logits.scalar_type() == ScalarType::BFloat16 ? backward<uint16_t>
                   : logits.scalar_type() == ScalarType::Float  ? backward<float>
                                                                : backward<double>;
  run(logits, y, s, g, columns, temperature);
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) {
  m.impl("logprob_entropy", TORCH_BOX(&megarl::logprob_entropy_cuda));
  m.impl("logprob_entropy_backward_", TORCH_BOX(&megarl::logprob_entropy_backward_cuda));
}
