// gae and discounted_returns on CUDA: one block a sequence.
//
// The block brings kThreads tokens to shared memory, thread 0 walks them with the CPU's arithmetic
// (gae_math.h) in the CPU's order, and the block writes the results: equal to the CPU's bit for bit.
// The walk costs tens of nanoseconds a token of the longest sequence, milliseconds a step.
#include "../advantages.h"
#include "../gae_math.h"
#include "device.cuh"
#include "dispatch.cuh"

#include <tuple>

namespace megarl {
namespace {

constexpr int kThreads = 256;

// Calls `bring(slot, t)`, then on thread 0 `walk(slot, t)` from the last token to the first, then
// `write(slot, t)`, for chunks of the sequence from its end.  All threads call it.
template <typename Bring, typename Walk, typename Write>
__device__ void backward_in_time(int64_t begin, int64_t end, Bring bring, Walk walk, Write write) {
  for (int64_t last = end; last > begin; last -= kThreads) {
    const int64_t first = last - kThreads > begin ? last - kThreads : begin;
    const int64_t t = first + threadIdx.x;
    if (t < last) bring(threadIdx.x, t);
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int64_t slot = last - first - 1; slot >= 0; --slot) walk(slot);
    }
    __syncthreads();
    if (t < last) write(threadIdx.x, t);
    __syncthreads();  // the next chunk is brought to the same memory
  }
}

template <typename reward_t, typename value_t, typename bootstrap_t, typename index_t>
__global__ void gae_kernel(const reward_t* rewards, const value_t* values, const bool* mask,
                           const index_t* cu, const bootstrap_t* bootstrap, GaeSettings settings,
                           int64_t num_tokens, double* advantages, double* returns) {
  check_bounds("gae", cu, gridDim.x, blockIdx.x, num_tokens);
  __shared__ double r[kThreads], v[kThreads];  // then the advantages and the returns
  __shared__ bool trained[kThreads];
  GaeState state{static_cast<double>(bootstrap[blockIdx.x])};
  backward_in_time(
      cu[blockIdx.x], cu[blockIdx.x + 1],
      [&](int64_t slot, int64_t t) {
        r[slot] = static_cast<double>(rewards[t]);
        v[slot] = static_cast<double>(values[t]);
        trained[slot] = mask[t];
      },
      [&](int64_t slot) {
        const double reward = r[slot], value = v[slot];
        gae_step(settings, state, reward, value, trained[slot], r[slot], v[slot]);
      },
      [&](int64_t slot, int64_t t) {
        advantages[t] = r[slot];
        returns[t] = v[slot];
      });
}

template <typename scalar_t, typename index_t>
__global__ void discounted_returns_kernel(const scalar_t* rewards, const bool* mask,
                                          const index_t* cu, double gamma, bool credit_previous,
                                          int64_t num_tokens, double* returns) {
  check_bounds("discounted_returns", cu, gridDim.x, blockIdx.x, num_tokens);
  __shared__ double r[kThreads];  // then the returns
  __shared__ bool trained[kThreads];
  ReturnsState state;
  backward_in_time(
      cu[blockIdx.x], cu[blockIdx.x + 1],
      [&](int64_t slot, int64_t t) {
        r[slot] = static_cast<double>(rewards[t]);
        trained[slot] = mask[t];
      },
      [&](int64_t slot) {
        r[slot] = returns_step(gamma, credit_previous, state, r[slot], trained[slot]);
      },
      [&](int64_t slot, int64_t t) { returns[t] = r[slot]; });
}

// rewards, values f32|f64 [T], mask bool [T], cu_seqlens i32|i64 [S+1], bootstrap f32|f64 [S]
//   -> advantages, returns f64 [T]
std::tuple<Tensor, Tensor> gae_cuda(const Tensor& rewards, const Tensor& values, const Tensor& mask,
                                    const Tensor& cu_seqlens, const Tensor& bootstrap, double gamma,
                                    double lam, bool credit_previous) {
  check_gae(rewards, values, mask, cu_seqlens, bootstrap, gamma, lam);
  const torch::stable::accelerator::DeviceGuard guard(rewards.get_device_index());
  const int64_t num_tokens = rewards.numel(), num_segments = bootstrap.numel();
  Tensor advantages = torch::stable::new_empty(rewards, {num_tokens}, ScalarType::Double);
  Tensor returns = torch::stable::new_empty(rewards, {num_tokens}, ScalarType::Double);
  if (num_segments == 0) return {advantages, returns};

  const Tensor r = torch::stable::contiguous(rewards), v = torch::stable::contiguous(values);
  const Tensor m = torch::stable::contiguous(mask), cu = torch::stable::contiguous(cu_seqlens);
  const Tensor after = torch::stable::contiguous(bootstrap);
  const GaeSettings settings{gamma, gamma * lam, credit_previous};
  with_real(r, [&](auto* reward) {
    with_real(v, [&](auto* value) {
      with_real(after, [&](auto* last) {
        with_index(cu, [&](auto* index) {
          gae_kernel<<<num_segments, kThreads, 0, current_stream(r)>>>(
              r.const_data_ptr<Pointee<decltype(reward)>>(),
              v.const_data_ptr<Pointee<decltype(value)>>(),
              m.const_data_ptr<bool>(),
              cu.const_data_ptr<Pointee<decltype(index)>>(),
              after.const_data_ptr<Pointee<decltype(last)>>(), settings, num_tokens,
              advantages.mutable_data_ptr<double>(), returns.mutable_data_ptr<double>());
        });
      });
    });
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {advantages, returns};
}

// rewards f32|f64 [T], mask bool [T], cu_seqlens i32|i64 [S+1] -> f64 [T]
Tensor discounted_returns_cuda(const Tensor& rewards, const Tensor& mask, const Tensor& cu_seqlens,
                               double gamma, bool credit_previous) {
  check_discounted_returns(rewards, mask, cu_seqlens, gamma);
  const torch::stable::accelerator::DeviceGuard guard(rewards.get_device_index());
  const int64_t num_tokens = rewards.numel(), num_segments = cu_seqlens.numel() - 1;
  Tensor returns = torch::stable::new_empty(rewards, {num_tokens}, ScalarType::Double);
  if (num_segments == 0) return returns;

  const Tensor r = torch::stable::contiguous(rewards), m = torch::stable::contiguous(mask);
  const Tensor cu = torch::stable::contiguous(cu_seqlens);
  with_real(r, [&](auto* reward) {
    with_index(cu, [&](auto* index) {
      discounted_returns_kernel<<<num_segments, kThreads, 0, current_stream(r)>>>(
          r.const_data_ptr<Pointee<decltype(reward)>>(), m.const_data_ptr<bool>(),
          cu.const_data_ptr<Pointee<decltype(index)>>(), gamma, credit_previous,
          num_tokens, returns.mutable_data_ptr<double>());
    });
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return returns;
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) {
  m.impl("gae", TORCH_BOX(&megarl::gae_cuda));
  m.impl("discounted_returns", TORCH_BOX(&megarl::discounted_returns_cuda));
}
