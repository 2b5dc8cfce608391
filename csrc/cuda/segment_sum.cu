// segment_sum on CUDA: one block a sequence.
//
// 1. Thread i adds tokens i, i + kThreads, ... of its sequence in float64; the partial sums are then
//    folded in a fixed tree.  The order depends on the sequence's length alone, so equal inputs give
//    equal bits; it is not the CPU's order, so the two may differ in the last bits.
// 2. cu_seqlens is checked where it lies (device.cuh).
#include "device.cuh"

namespace megarl {
namespace {

constexpr int kThreads = 256;

template <typename scalar_t, typename index_t>
__global__ void segment_sum_kernel(const scalar_t* values, const index_t* cu, int64_t num_tokens,
                                   double* sums) {
  const int64_t segment = blockIdx.x;
  const int64_t begin = cu[segment], end = cu[segment + 1];
  check_bounds("segment_sum", cu, gridDim.x, segment, num_tokens);

  double sum = 0.0;
  for (int64_t t = begin + threadIdx.x; t < end; t += kThreads) sum += static_cast<double>(values[t]);

  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) sums[segment] = sum;
}

template <typename scalar_t, typename index_t>
void launch(const Tensor& row, const Tensor& cu, Tensor& sums) {
  segment_sum_kernel<<<sums.numel(), kThreads, 0, current_stream(row)>>>(
      row.const_data_ptr<scalar_t>(), cu.const_data_ptr<index_t>(), row.numel(),
      sums.mutable_data_ptr<double>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// values f32|f64 [T], cu_seqlens i32|i64 [S+1] -> f64 [S]
Tensor segment_sum_cuda(const Tensor& values, const Tensor& cu_seqlens) {
  check_segment_sum(values, cu_seqlens);
  const torch::stable::accelerator::DeviceGuard guard(values.get_device_index());
  Tensor sums = torch::stable::new_empty(values, {cu_seqlens.numel() - 1}, ScalarType::Double);
  if (sums.numel() == 0) return sums;

  const Tensor row = torch::stable::contiguous(values), cu = torch::stable::contiguous(cu_seqlens);
  const bool narrow = cu.scalar_type() == ScalarType::Int;
  if (row.scalar_type() == ScalarType::Float) {
    narrow ? launch<float, int32_t>(row, cu, sums) : launch<float, int64_t>(row, cu, sums);
  } else {
    narrow ? launch<double, int32_t>(row, cu, sums) : launch<double, int64_t>(row, cu, sums);
  }
  return sums;
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) {
  m.impl("segment_sum", TORCH_BOX(&megarl::segment_sum_cuda));
}
