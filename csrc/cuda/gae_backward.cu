// The adjoint of gae on CUDA: one block a sequence, walked by thread 0 as in gae.cu, from its first
// token to its last.
#include "../advantages.h"
#include "../gae_math.h"
#include "device.cuh"
#include "dispatch.cuh"

#include <tuple>

namespace megarl {
namespace {

constexpr int kThreads = 256;

template <typename index_t>
__global__ void gae_backward_kernel(const double* grad_advantages, const double* grad_returns,
                                    const bool* mask, const index_t* cu, GaeSettings settings,
                                    int64_t num_tokens, double* grad_rewards, double* grad_values,
                                    double* grad_bootstrap) {
  check_bounds("gae_backward", cu, gridDim.x, blockIdx.x, num_tokens);
  __shared__ double a[kThreads], b[kThreads];  // then the gradients of rewards and of values
  __shared__ bool trained[kThreads];
  const int64_t begin = cu[blockIdx.x], end = cu[blockIdx.x + 1];
  AdjointState state;
  for (int64_t first = begin; first < end; first += kThreads) {
    const int64_t last = first + kThreads < end ? first + kThreads : end;
    const int64_t t = first + threadIdx.x;
    if (t < last) {
      a[threadIdx.x] = grad_advantages[t];
      b[threadIdx.x] = grad_returns[t];
      trained[threadIdx.x] = mask[t];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int64_t slot = 0; slot < last - first; ++slot) {
        const double of_advantage = a[slot], of_return = b[slot];
        adjoint_step(settings, state, of_advantage, of_return, trained[slot], a[slot], b[slot]);
      }
    }
    __syncthreads();
    if (t < last) {
      grad_rewards[t] = a[threadIdx.x];
      grad_values[t] = b[threadIdx.x];
    }
    __syncthreads();  // the next chunk is brought to the same memory
  }
  if (threadIdx.x == 0) grad_bootstrap[blockIdx.x] = settings.gamma * state.before;
}

// grad_advantages, grad_returns f64 [T], mask bool [T], cu_seqlens i32|i64 [S+1]
//   -> grad_rewards, grad_values f64 [T], grad_bootstrap f64 [S]
std::tuple<Tensor, Tensor, Tensor> gae_backward_cuda(const Tensor& grad_advantages,
                                                     const Tensor& grad_returns, const Tensor& mask,
                                                     const Tensor& cu_seqlens, double gamma,
                                                     double lam, bool credit_previous) {
  check_gae_backward(grad_advantages, grad_returns, mask, cu_seqlens, gamma, lam);
  const torch::stable::accelerator::DeviceGuard guard(grad_advantages.get_device_index());
  const int64_t num_tokens = grad_advantages.numel(), num_segments = cu_seqlens.numel() - 1;
  Tensor of_rewards = torch::stable::new_empty(grad_advantages, {num_tokens});
  Tensor of_values = torch::stable::new_empty(grad_advantages, {num_tokens});
  Tensor of_bootstrap = torch::stable::new_empty(grad_advantages, {num_segments});
  if (num_segments == 0) return {of_rewards, of_values, of_bootstrap};

  const Tensor a = torch::stable::contiguous(grad_advantages);
  const Tensor b = torch::stable::contiguous(grad_returns);
  const Tensor m = torch::stable::contiguous(mask), cu = torch::stable::contiguous(cu_seqlens);
  const GaeSettings settings{gamma, gamma * lam, credit_previous};
  with_index(cu, [&](auto* index) {
    gae_backward_kernel<<<num_segments, kThreads, 0, current_stream(a)>>>(
        a.const_data_ptr<double>(), b.const_data_ptr<double>(), m.const_data_ptr<bool>(),
        cu.const_data_ptr<Pointee<decltype(index)>>(), settings, num_tokens,
        of_rewards.mutable_data_ptr<double>(), of_values.mutable_data_ptr<double>(),
        of_bootstrap.mutable_data_ptr<double>());
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {of_rewards, of_values, of_bootstrap};
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) {
  m.impl("gae_backward", TORCH_BOX(&megarl::gae_backward_cuda));
}
