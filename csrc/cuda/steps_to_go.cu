// steps_to_go on CUDA: one thread a sequence, with the CPU's arithmetic in the CPU's order.
#include "../advantages.h"
#include "device.cuh"

namespace megarl {
namespace {

constexpr int kThreads = 32;

template <typename step_t, typename index_t>
__global__ void steps_to_go_kernel(const double* rewards, const int64_t* ends, const step_t* steps,
                                   const index_t* cu, int64_t num_segments, int64_t num_steps,
                                   int64_t num_tokens, double* to_go) {
  const int64_t s = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (s >= num_segments) return;
  const long long begin = cu[s], end = cu[s + 1], first = steps[s], last = steps[s + 1];
  const bool starts = s > 0 || (begin == 0 && first == 0);
  const bool finishes = s + 1 < num_segments || (end == num_tokens && last == num_steps);
  const bool inside = begin >= 0 && begin <= end && end <= num_tokens && first >= 0 &&
                      first <= last && last <= num_steps;
  if (!starts || !finishes || !inside) {
    printf("steps_to_go: cu_seqlens and step_offsets must start at 0, not decrease, and end at the "
           "%lld tokens and %lld steps; got tokens %lld to %lld and steps %lld to %lld for sequence "
           "%lld of %lld\n",
           (long long)num_tokens, (long long)num_steps, begin, end, first, last, (long long)s,
           (long long)num_segments);
    __trap();
  }
  for (int64_t j = first; j < last; ++j) {
    if (ends[j] < 0 || ends[j] >= end - begin) {
      printf("steps_to_go: step_ends must be in [0, %lld), the tokens of sequence %lld, got %lld at "
             "entry %lld\n",
             end - begin, (long long)s, (long long)ends[j], (long long)j);
      __trap();
    }
    to_go[begin + ends[j]] += rewards[j];
  }
  double later = 0.0;
  for (int64_t t = end - 1; t >= begin; --t) to_go[t] = later = later + to_go[t];
}

template <typename step_t, typename index_t>
void launch(const Tensor& rewards, const Tensor& ends, const Tensor& steps, const Tensor& cu,
            Tensor& out) {
  const int64_t num_segments = cu.numel() - 1;
  steps_to_go_kernel<<<(num_segments + kThreads - 1) / kThreads, kThreads, 0,
                       current_stream(rewards)>>>(
      rewards.const_data_ptr<double>(), ends.const_data_ptr<int64_t>(),
      steps.const_data_ptr<step_t>(), cu.const_data_ptr<index_t>(), num_segments, rewards.numel(),
      out.numel(), out.mutable_data_ptr<double>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// step_rewards f64 [P], step_ends i64 [P], step_offsets i32|i64 [S+1], cu_seqlens i32|i64 [S+1]
//   -> f64 [T]
Tensor steps_to_go_cuda(const Tensor& step_rewards, const Tensor& step_ends,
                        const Tensor& step_offsets, const Tensor& cu_seqlens, int64_t num_tokens) {
  check_steps_to_go(step_rewards, step_ends, step_offsets, cu_seqlens, num_tokens);
  const torch::stable::accelerator::DeviceGuard guard(step_rewards.get_device_index());
  Tensor out = torch::stable::new_zeros(step_rewards, {num_tokens});
  if (cu_seqlens.numel() == 1) return out;

  const Tensor r = torch::stable::contiguous(step_rewards);
  const Tensor e = torch::stable::contiguous(step_ends);
  const Tensor steps = torch::stable::contiguous(step_offsets);
  const Tensor cu = torch::stable::contiguous(cu_seqlens);
  const bool narrow = cu.scalar_type() == ScalarType::Int;
  if (steps.scalar_type() == ScalarType::Int) {
    narrow ? launch<int32_t, int32_t>(r, e, steps, cu, out)
           : launch<int32_t, int64_t>(r, e, steps, cu, out);
  } else {
    narrow ? launch<int64_t, int32_t>(r, e, steps, cu, out)
           : launch<int64_t, int64_t>(r, e, steps, cu, out);
  }
  return out;
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) {
  m.impl("steps_to_go", TORCH_BOX(&megarl::steps_to_go_cuda));
}
