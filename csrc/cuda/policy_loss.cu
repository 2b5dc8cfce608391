// policy_loss and policy_sums on CUDA: one block a sequence.
//
// 1. Thread i takes tokens i, i + kThreads, ... in both passes; its sums are float64 and folded in a fixed
//    tree, so equal inputs give equal bits.  The order is not the CPU's: sums differ in the last bits.
// 2. Rows' totals are added up over the sequences, in their order, by a second kernel.
// 3. The mathematics is policy_math.h's, shared with the CPU.
#include "device.cuh"

#include "../policy_row.h"

#include <cmath>

namespace megarl {
namespace policy {
namespace {

constexpr int kThreads = 256;

// A token as loaded; all 0 where it is not used.
template <typename T>
struct Loaded {
  Token<T> token;
  T weight, reference, entropy;
  bool dropped;
};

template <typename T>
__device__ Loaded<T> load(const View<T>& v, int64_t i) {
  const T lp = v.logprobs[i], lo = v.old_logprobs[i], a = v.advantages[i], w = v.weight[i];
  const T lr = v.rollout_logprobs ? v.rollout_logprobs[i] : T(0);
  const T lf = v.ref_logprobs ? v.ref_logprobs[i] : T(0);
  const T correction = v.correction ? v.correction[i] : T(1);
  const T entropy = v.entropy ? v.entropy[i] : T(0);
  T bad = unless_finite(lp) + unless_finite(lo) + unless_finite(a) + unless_finite(w) +
          unless_finite(lr) + unless_finite(lf) + unless_finite(correction);
  if (v.checks_entropy) bad += unless_finite(entropy);
  Loaded<T> out = {};
  const bool trained = v.mask[i] != 0;
  out.dropped = trained && bad != T(0);  // a NaN is not 0
  if (!trained || out.dropped) return out;
  const T selected = v.selected && v.selected[i] ? T(1) : T(0);
  out.token = {lp, a, w * correction, lp - lo, T(1), lp - lr, T(1), selected};
  out.weight = w;
  out.reference = lf - lp;
  out.entropy = entropy;
  return out;
}

// Sums over this thread's tokens -> over the sequence, on all threads.
__device__ void fold_sums(const double* mine, int count, double* out) {
  __shared__ double whole[kNumTotals > kNumSums ? kNumTotals : kNumSums];
  for (int k = 0; k < count; ++k) {
    const double sum = block_sum<kThreads>(mine[k]);
    if (threadIdx.x == 0) whole[k] = sum;
  }
  __syncthreads();
  for (int k = 0; k < count; ++k) out[k] = whole[k];
  __syncthreads();
}

__device__ double block_max(double value) {
  __shared__ double partial[kThreads];
  partial[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    double* const mine = partial + threadIdx.x;
    if (threadIdx.x < half) *mine = fmax(*mine, mine[half]);
    __syncthreads();
  }
  const double result = partial[0];
  __syncthreads();
  return result;
}

// Pass 1: sums of whole sequences, as far as their tokens are here.
template <typename T>
__device__ void sum_sequence(const View<T>& v, const Choices& c, const Parameters& p, int64_t begin,
                             int64_t end, double* sums) {
  double mine[kNumSums] = {};
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const Loaded<T> x = load(v, i);
    const Token<T>& t = x.token;
    const double pull = static_cast<double>(t.coef) * t.advantage;
    mine[kCount] += t.used;
    mine[kDropped] += x.dropped ? 1 : 0;
    mine[kLogRatio] += t.log_ratio;
    mine[kPositive] += t.advantage > 0 ? pull : 0;
    mine[kNegative] += t.advantage < 0 ? pull : 0;
    const T gap = c.opsm == kAgainstOld ? t.log_ratio : t.gap;
    mine[kGap] += c.opsm != kNoOpsm ? gap : 0;
    mine[kAdvantage] += c.opsm != kNoOpsm ? t.advantage : 0;
    const T held = gmpo_clipped(t.advantage, t.log_ratio, T(p.log_low), T(p.log_high));
    mine[kClippedLogRatio] += c.objective == kGmpo ? held : 0;
    if (!c.all_metrics) continue;
    const T near = clamped_log_ratio(t.log_ratio);
    const T expm1 = exponential(near).expm1;
    mine[kSquare] += static_cast<double>(near) * near;
    mine[kDistance] += expm1 < 0 ? -expm1 : expm1;
  }
  fold_sums(mine, kNumSums, sums);
}

template <typename T>
__device__ TokenLoss<T> objective_of(int objective, const Token<T>& t, const Constants<T>& c) {
  switch (objective) {
    case kReinforce: return reinforce(t, c);
    case kSft: return sft(t, c);
    case kPpoClip: return ppo_clip(t, c);
    case kCispo: return cispo(t, c);
    case kSapo: return sapo(t, c);
    case kAspo: return aspo(t, c);
    case kMinirl: return minirl(t, c);
    case kKlCov: return kl_cov(t, c);
    case kGspo: return gspo(t, c);
    case kGspoToken: return gspo_token(t, c);
    default: return gmpo(t, c);
  }
}

template <int kType, typename T>
__device__ KlTerm<T> kl_of(const Loaded<T>& x, int weight, const Constants<T>& c) {
  const T raw = x.reference, d = x.token.log_ratio, r = x.token.ratio;
  if (weight == kWeightOld) return kl_term<kType, kWeightOld>(raw, d, r, c);
  if (weight == kWeightSelf) return kl_term<kType, kWeightSelf>(raw, d, r, c);
  return kl_term<kType, kUnweighted>(raw, d, r, c);
}

template <typename T>
__device__ KlTerm<T> kl_of(const Loaded<T>& x, const Choices& c, const Constants<T>& constants) {
  switch (c.kl_type) {
    case kK1: return kl_of<kK1>(x, c.kl_weight, constants);
    case kK2: return kl_of<kK2>(x, c.kl_weight, constants);
    case kK3: return kl_of<kK3>(x, c.kl_weight, constants);
    case kK3StraightThrough: return kl_of<kK3StraightThrough>(x, c.kl_weight, constants);
    default: return {};
  }
}

// One token of pass 2: its gradients, and what it adds to the thread's totals.
template <typename T>
__device__ void apply_token(const View<T>& v, const Choices& c, const Parameters& p,
                            const Sequence& s, const Constants<T>& constants, int64_t i, T* grad,
                            T* grad_entropy, double* totals) {
  Loaded<T> x = load(v, i);
  if (!s.alive) x = {};
  Token<T>& t = x.token;
  if (!s.kept) t.coef = 0;
  const T near = clamped_log_ratio(t.log_ratio);
  const Exponential<T> e = exponential(near);
  t.ratio = e.exp;
  const TokenLoss<T> out = objective_of(c.objective, t, constants);
  const KlTerm<T> kl = kl_of(x, c, constants);
  grad[i] = out.grad + (c.kl_type == kNoKl ? T(0) : constants.kl_coef * x.weight * kl.grad);
  if (grad_entropy != nullptr) grad_entropy[i] = T(-p.entropy_coef) * x.weight;
  const double ratio = static_cast<double>(t.ratio) * t.used;
  totals[kPgLoss] += static_cast<double>(t.coef) * out.loss;
  totals[kKlLoss] += static_cast<double>(x.weight) * kl.value;
  totals[kKl] += static_cast<double>(t.used) * kl.value;
  totals[kEntropyLoss] += v.checks_entropy ? static_cast<double>(x.weight) * x.entropy : 0;
  totals[kNegLogRatio] += near;
  totals[kFlag0] += out.flag0;
  totals[kFlag1] += out.flag1;
  totals[kFlag2] += out.flag2;
  totals[kFlag3] += out.flag3;
  if (!c.all_metrics) return;
  totals[kEntropy] += x.entropy;
  totals[kMeanValue] += out.mean;
  totals[kK3Mean] += e.expm1_mx;
  totals[kRatio] += ratio;
  totals[kRatioSquare] += ratio * ratio;
  totals[kRatioClamped] += t.log_ratio != near ? 1 : 0;
  if (t.used != T(0)) {
    totals[kRatioMin] = fmin(totals[kRatioMin], ratio);
    totals[kRatioMax] = fmax(totals[kRatioMax], ratio);
  }
}

template <typename T, typename index_t>
__global__ void sums_kernel(View<T> v, Choices c, Parameters p, const index_t* cu,
                            int64_t num_tokens, double* sums) {
  const int64_t s = blockIdx.x, num_segments = gridDim.x;
  check_bounds("policy_sums", cu, num_segments, s, num_tokens);
  double whole[kNumSums];
  sum_sequence(v, c, p, cu[s], cu[s + 1], whole);
  if (threadIdx.x < kNumSums) sums[threadIdx.x * num_segments + s] = whole[threadIdx.x];
}

template <typename T, typename index_t>
__global__ void loss_kernel(View<T> v, Choices c, Parameters p, const index_t* cu,
                            int64_t num_tokens, bool given, double* sums, double* of_sequences,
                            T* grad, T* grad_entropy) {
  const int64_t s = blockIdx.x, num_segments = gridDim.x;
  check_bounds("policy_loss", cu, num_segments, s, num_tokens);
  double here[kNumSums], whole[kNumSums];
  sum_sequence(v, c, p, cu[s], cu[s + 1], here);
  for (int k = 0; k < kNumSums; ++k) whole[k] = given ? sums[k * num_segments + s] : here[k];
  const Sequence sequence = sequence_of(whole, c, p);
  const Constants<T> constants = constants_of<T>(p, sequence);

  double mine[kNumTotals] = {}, out[kNumTotals];
  mine[kRatioMin] = HUGE_VAL;
  mine[kRatioMax] = -HUGE_VAL;
  for (int64_t i = cu[s] + threadIdx.x; i < cu[s + 1]; i += kThreads) {
    apply_token(v, c, p, sequence, constants, i, grad, grad_entropy, mine);
  }
  fold_sums(mine, kRatioMin, out);
  out[kRatioMin] = -block_max(-mine[kRatioMin]);
  out[kRatioMax] = block_max(mine[kRatioMax]);
  if (threadIdx.x != 0) return;
  out[kTokens] = sequence.alive ? here[kCount] : 0;
  out[kDroppedTokens] = here[kDropped];
  if (is_of_whole_sequences(c.objective)) {
    const double pulls = here[kPositive] * sequence.above + here[kNegative] * sequence.below;
    out[kPgLoss] = sequence.alive && sequence.kept ? -pulls : 0;
  }
  for (int k = 0; k < kNumTotals; ++k) of_sequences[s * kNumTotals + k] = out[k];
  for (int k = 0; k < kNumSums && !given; ++k) sums[k * num_segments + s] = here[k];
}

// Thread k adds up total k, sequence after sequence.
__global__ void totals_kernel(const double* of_sequences, int64_t num_segments, double* totals) {
  const int k = threadIdx.x;
  double total = k == kRatioMin ? HUGE_VAL : (k == kRatioMax ? -HUGE_VAL : 0);
  for (int64_t s = 0; s < num_segments; ++s) {
    const double x = of_sequences[s * kNumTotals + k];
    total = k == kRatioMin ? fmin(total, x) : (k == kRatioMax ? fmax(total, x) : total + x);
  }
  totals[k] = k == kNegLogRatio ? 0.0 - total : total;
}

template <typename T, typename index_t>
void launch_loss(const Arguments& a, bool given, Output& out) {
  const int64_t num_segments = a.cu_seqlens.numel() - 1;
  const cudaStream_t stream = current_stream(a.logprobs);
  Tensor each = torch::stable::new_empty(a.logprobs, {num_segments, kNumTotals}, ScalarType::Double);
  double* of_sequences = each.mutable_data_ptr<double>();
  if (num_segments > 0) {
    loss_kernel<T, index_t><<<num_segments, kThreads, 0, stream>>>(
        view_of<T>(a), a.choices, a.parameters, a.cu_seqlens.const_data_ptr<index_t>(),
        a.logprobs.numel(), given, out.sums.mutable_data_ptr<double>(), of_sequences,
        out.grad.mutable_data_ptr<T>(), out.entropy_gradient<T>());
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  totals_kernel<<<1, kNumTotals, 0, stream>>>(of_sequences, num_segments,
                                              out.totals.mutable_data_ptr<double>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename T, typename index_t>
void launch_sums(const Arguments& a, Tensor& sums) {
  if (sums.numel() == 0) return;
  sums_kernel<T, index_t><<<sums.size(1), kThreads, 0, current_stream(a.logprobs)>>>(
      view_of<T>(a), a.choices, a.parameters, a.cu_seqlens.const_data_ptr<index_t>(),
      a.logprobs.numel(), sums.mutable_data_ptr<double>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Calls `launch` with a number of the row's type and one of its bounds'.
template <typename Launch>
void dispatch(const char* op, const Arguments& a, const Launch& launch) {
  // bounds of no sequence are seen by no block
  STD_TORCH_CHECK(a.cu_seqlens.numel() > 1 || a.logprobs.numel() == 0, op, ": cu_seqlens must end ",
                  "at the ", a.logprobs.numel(), " tokens, got no sequence");
  const bool narrow = a.cu_seqlens.scalar_type() == ScalarType::Int;
  const bool single = a.logprobs.scalar_type() == ScalarType::Float;
  if (single) narrow ? launch(float(), int32_t()) : launch(float(), int64_t());
  if (!single) narrow ? launch(double(), int32_t()) : launch(double(), int64_t());
}

}  // namespace

Tensor policy_sums_cuda(MEGARL_POLICY_SIGNATURE) {
  const Arguments a = checked_arguments("policy_sums", MEGARL_POLICY_ARGUMENTS);
  const torch::stable::accelerator::DeviceGuard guard(logprobs.get_device_index());
  Tensor sums = torch::stable::new_zeros(a.logprobs, {kNumSums, a.cu_seqlens.numel() - 1},
                                         ScalarType::Double);
  dispatch("policy_sums", a, [&](auto number, auto bound) {
    launch_sums<decltype(number), decltype(bound)>(a, sums);
  });
  return sums;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> policy_loss_cuda(
    MEGARL_POLICY_SIGNATURE, const std::optional<Tensor>& sequence_sums) {
  const Arguments a = checked_arguments("policy_loss", MEGARL_POLICY_ARGUMENTS);
  const torch::stable::accelerator::DeviceGuard guard(logprobs.get_device_index());
  Output out = new_output("policy_loss", a, sequence_sums);
  dispatch("policy_loss", a, [&](auto number, auto bound) {
    launch_loss<decltype(number), decltype(bound)>(a, sequence_sums.has_value(), out);
  });
  return {out.grad, out.grad_entropy, out.sums, out.totals};
}

}  // namespace policy
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) {
  m.impl("policy_sums", TORCH_BOX(&megarl::policy::policy_sums_cuda));
  m.impl("policy_loss", TORCH_BOX(&megarl::policy::policy_loss_cuda));
}
