// policy_loss and policy_sums on the CPU: a sequence at a time, in blocks that stay in the L1 cache.
//
// 1. Memory is read once.  A token's gradient follows at once where nothing about its whole sequence is
//    needed, or is given.  Else an objective of whole sequences writes seeds of gradients and finishes
//    them when the sequence's ratio is known (Finish); and what is left (a divergence beside such an
//    objective, off-policy masking) takes a second pass over the sequence, then in the L2 cache.
// 2. A sequence is one thread's; its sums are lane sums (simd.h) and rows' totals are added up in the
//    order of the sequences: neither threads nor vector width change a bit.
#include "bounds.h"
#include "pages.h"
#include "policy_stages.h"

namespace megarl {
namespace policy {
namespace {

// --- the same as functions, one for each type, compiled for each kind of CPU ------------------------

#define MEGARL_STAGES(T)                                                                            \
  MEGARL_SIMD void stage_load(Block<T>& b, const View<T>& v, int64_t at, int n) {                    \
    load(b, v, at, n);                                                                              \
  }                                                                                                 \
  MEGARL_SIMD void stage_ratios(Block<T>& b, int n) { find_ratios(b, n); }                          \
  MEGARL_SIMD void stage_near(Block<T>& b, int n) { find_near(b, n); }                              \
  MEGARL_SIMD void stage_decisive(Lanes* sums, Block<T>& b, const Choices& c,                       \
                                  const Parameters& p, int n) {                                     \
    add_decisive(sums, b, c, p, n);                                                                 \
  }                                                                                                 \
  MEGARL_SIMD void stage_reported(Lanes* sums, const Block<T>& b, int n) {                          \
    add_reported(sums, b, n);                                                                       \
  }                                                                                                 \
  MEGARL_SIMD void stage_kl(Block<T>& b, const Choices& c, const Sequence& s, const Parameters& p,    \
                            int n) {                                                                \
    add_kl(b, c, s, p, n);                                                                          \
  }                                                                                                 \
  MEGARL_SIMD void stage_totals(RowLanes& totals, Block<T>& b, const View<T>& v,                    \
                                const Choices& c, int n) {                                          \
    add_totals(totals, b, v, c, n);                                                                 \
  }
MEGARL_STAGES(float)
MEGARL_STAGES(double)

MEGARL_SIMD void stage_finish(float* grad, int64_t n, float down, float up) {
  finish_seeds(grad, n, down, up);
}
MEGARL_SIMD void stage_finish(double* grad, int64_t n, double down, double up) {
  finish_seeds(grad, n, down, up);
}

#define MEGARL_OBJECTIVE(name, id)                                                                  \
  MEGARL_SIMD void stage_##name(Block<float>& b, const Sequence& s, const Parameters& p, int n) {    \
    apply<id>(b, s, p, n, [](const auto&... of) { return name<float>(of...); });                    \
  }                                                                                                 \
  MEGARL_SIMD void stage_##name(Block<double>& b, const Sequence& s, const Parameters& p, int n) {   \
    apply<id>(b, s, p, n, [](const auto&... of) { return name<double>(of...); });                   \
  }
MEGARL_OBJECTIVE(reinforce, kReinforce)
MEGARL_OBJECTIVE(sft, kSft)
MEGARL_OBJECTIVE(ppo_clip, kPpoClip)
MEGARL_OBJECTIVE(cispo, kCispo)
MEGARL_OBJECTIVE(sapo, kSapo)
MEGARL_OBJECTIVE(aspo, kAspo)
MEGARL_OBJECTIVE(minirl, kMinirl)
MEGARL_OBJECTIVE(kl_cov, kKlCov)
MEGARL_OBJECTIVE(gspo, kGspo)
MEGARL_OBJECTIVE(gspo_token, kGspoToken)
MEGARL_OBJECTIVE(gmpo, kGmpo)

MEGARL_OBJECTIVE(gspo_seed, kGspo)
MEGARL_OBJECTIVE(gspo_token_seed, kGspoToken)
MEGARL_OBJECTIVE(gmpo_seed, kGmpo)

template <typename T>
using Stage = void (*)(Block<T>&, const Sequence&, const Parameters&, int);

// In the order of Objective.
template <typename T>
constexpr Stage<T> kStages[kNumObjectives] = {
    stage_reinforce, stage_sft,    stage_ppo_clip, stage_cispo, stage_sapo,      stage_aspo,
    stage_minirl,    stage_kl_cov, stage_gspo,     stage_gspo_token, stage_gmpo};
template <typename T>
constexpr Stage<T> kSeeds[kNumObjectives] = {
    nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
    stage_gspo_seed, stage_gspo_token_seed, stage_gmpo_seed};

// --- a sequence --------------------------------------------------------------------------------------

// What is known of its sequence when a token comes.
enum class Known { kAll, kNothingYet, kAfterFirstPass };

inline Known known_of(const Choices& c, bool given) {
  const bool whole = is_of_whole_sequences(c.objective);
  if (given || (!whole && c.opsm == kNoOpsm)) return Known::kAll;
  return whole && c.kl_type == kNoKl ? Known::kNothingYet : Known::kAfterFirstPass;
}

template <typename T>
class SequenceKernel {
 public:
  SequenceKernel(const View<T>& view, const Choices& choices, const Parameters& parameters)
      : v_(view), c_(choices), p_(parameters) {}

  // Sums of the sequence [begin, end), with what is only reported where `all`.
  void sum(int64_t begin, int64_t end, bool all, Lanes* sums) {
    for (int64_t at = begin; at < end; at += kBlock) {
      const int n = fill(at, end);
      stage_decisive(sums, block_, c_, p_, n);
      if (all) {
        stage_ratios(block_, n);
        stage_reported(sums, block_, n);
      }
    }
  }

  // Gradients, or seeds of them, with all sums; `s` is not read where `stage` makes seeds.
  void apply(int64_t begin, int64_t end, const Sequence& s, Stage<T> stage, Lanes* sums,
             RowLanes& totals, T* grad, T* grad_entropy) {
    const bool needs_ratio =
        c_.all_metrics || has_ratio_in_loss(c_.objective) || c_.kl_weight == kWeightOld;
    for (int64_t at = begin; at < end; at += kBlock) {
      const int n = fill(at, end), count = static_cast<int>(std::min<int64_t>(kBlock, end - at));
      stage_decisive(sums, block_, c_, p_, n);
      if (!s.alive) clear(block_, 0, n);
      if (!s.kept) std::fill_n(block_.coef, n, T(0));
      needs_ratio ? stage_ratios(block_, n) : stage_near(block_, n);
      stage(block_, s, p_, n);
      if (v_.ref_logprobs != nullptr) stage_kl(block_, c_, s, p_, n);
      std::copy_n(block_.grad, count, grad + at);
      if (c_.all_metrics) stage_reported(sums, block_, n);
      stage_totals(totals, block_, v_, c_, n);
      if (grad_entropy != nullptr) {
        const T coef = T(-p_.entropy_coef);
        for (int i = 0; i < count; ++i) grad_entropy[at + i] = coef * block_.weight[i];
      }
    }
  }

 private:
  // Tokens from `at` on; the count, up to a whole number of lanes.
  int fill(int64_t at, int64_t end) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - at));
    const int n = (count + kLanes - 1) / kLanes * kLanes;
    stage_load(block_, v_, at, count);
    if (count < n) {
      clear(block_, count, n);
      std::fill(block_.dropped + count, block_.dropped + n, T(0));
    }
    return n;
  }

  const View<T> v_;
  const Choices c_;
  const Parameters p_;
  Block<T> block_ = {};
};

void write_sums(const Lanes* lanes, int from, int to, double* out, int64_t stride) {
  for (int k = from; k < to; ++k) out[k * stride] = fold(lanes[k].part);
}

// Row k of `totals` [kNumTotals]: over all sequences, in their order.
void add_up(const std::vector<double>& of_sequences, double* totals) {
  std::fill_n(totals, int(kNumTotals), 0.0);
  totals[kRatioMin] = HUGE_VAL;
  totals[kRatioMax] = -HUGE_VAL;
  for (size_t at = 0; at < of_sequences.size(); at += kNumTotals) {
    for (int k = 0; k < kRatioMin; ++k) totals[k] += of_sequences[at + k];
    totals[kRatioMin] = std::min(totals[kRatioMin], of_sequences[at + kRatioMin]);
    totals[kRatioMax] = std::max(totals[kRatioMax], of_sequences[at + kRatioMax]);
  }
}

// Of one sequence, in the order of Total.  `sums`: of its tokens here.
void write_totals(const RowLanes& lanes, const double* sums, const Sequence& s, const Choices& c,
                  double* out) {
  for (int k = 0; k < kRatioMin; ++k) out[k] = fold(lanes.of[k].part);
  out[kTokens] = s.alive ? sums[kCount] : 0;
  out[kNegLogRatio] = 0.0 - out[kNegLogRatio];
  out[kDroppedTokens] = sums[kDropped];
  if (is_of_whole_sequences(c.objective) && s.alive && s.kept) {
    out[kPgLoss] = -(sums[kPositive] * s.above + sums[kNegative] * s.below);
  }
  const double *low = lanes.of[kRatioMin].part, *high = lanes.of[kRatioMax].part;
  out[kRatioMin] = *std::min_element(low, low + kLanes);
  out[kRatioMax] = *std::max_element(high, high + kLanes);
}

// Seeds of gradients to gradients, and totals to what they are with the sequence known.
template <typename T>
void finish_sequence(const Sequence& s, const Choices& c, int64_t begin, int64_t end, T* grad,
                     T* grad_entropy, double* totals) {
  const Finish finish = finish_of(s, c.objective);
  stage_finish(grad + begin, end - begin, T(finish.down), T(finish.up));
  totals[kFlag0] *= finish.flag0;
  totals[kFlag1] *= finish.flag1;
  if (s.alive) return;
  if (grad_entropy != nullptr) std::fill(grad_entropy + begin, grad_entropy + end, T(0));
  const double dropped = totals[kDroppedTokens];
  std::fill_n(totals, int(kNumTotals), 0.0);
  totals[kDroppedTokens] = dropped;
  totals[kRatioMin] = HUGE_VAL;
  totals[kRatioMax] = -HUGE_VAL;
}

// --- a row -------------------------------------------------------------------------------------------

template <typename T>
void sum_row(const Arguments& a, const std::vector<int64_t>& bounds, double* sums) {
  const View<T> view = view_of<T>(a);
  const int64_t num_segments = static_cast<int64_t>(bounds.size()) - 1;
  for_each_sequence(bounds, [&](int64_t s) {
    SequenceKernel<T> kernel(view, a.choices, a.parameters);
    Lanes lanes[kNumSums];
    kernel.sum(bounds[s], bounds[s + 1], a.choices.all_metrics, lanes);
    write_sums(lanes, 0, kNumSums, sums + s, num_segments);
  });
}

// `given`: whether `sums` holds those of whole sequences; else they are found here, and written there.
template <typename T>
void apply_row(const Arguments& a, const std::vector<int64_t>& bounds, bool given, double* sums,
               double* totals, T* grad, T* grad_entropy) {
  const View<T> view = view_of<T>(a);
  const Choices& c = a.choices;
  const int64_t num_segments = static_cast<int64_t>(bounds.size()) - 1;
  const Known known = known_of(c, given);
  const Stage<T> stage = known == Known::kNothingYet ? kSeeds<T>[c.objective]
                                                     : kStages<T>[c.objective];
  std::vector<double> of_sequences(num_segments * kNumTotals);
  for_each_sequence(bounds, [&](int64_t i) {
    const int64_t begin = bounds[i], end = bounds[i + 1];
    SequenceKernel<T> kernel(view, c, a.parameters);
    double whole[kNumSums] = {};  // as long as nothing is known: alive and kept
    for (int k = 0; k < kNumSums && given; ++k) whole[k] = sums[k * num_segments + i];
    if (known == Known::kAfterFirstPass) {
      Lanes first[kNumSums];
      kernel.sum(begin, end, false, first);
      write_sums(first, 0, kNumDecisive, whole, 1);
    }
    Sequence sequence = sequence_of(whole, c, a.parameters);
    Lanes lanes[kNumSums];
    RowLanes row;
    std::fill_n(row.of[kRatioMin].part, kLanes, HUGE_VAL);
    std::fill_n(row.of[kRatioMax].part, kLanes, -HUGE_VAL);
    kernel.apply(begin, end, sequence, stage, lanes, row, grad, grad_entropy);
    double here[kNumSums];
    write_sums(lanes, 0, kNumSums, here, 1);
    if (known == Known::kNothingYet) sequence = sequence_of(here, c, a.parameters);
    double* of_sequence = &of_sequences[i * kNumTotals];
    write_totals(row, here, sequence, c, of_sequence);
    if (known == Known::kNothingYet) {
      finish_sequence(sequence, c, begin, end, grad, grad_entropy, of_sequence);
    }
    for (int k = 0; k < kNumSums && !given; ++k) sums[k * num_segments + i] = here[k];
  });
  add_up(of_sequences, totals);
}

}  // namespace

Tensor policy_sums_cpu(MEGARL_POLICY_SIGNATURE) {
  const Arguments a = checked_arguments("policy_sums", MEGARL_POLICY_ARGUMENTS);
  const auto bounds = checked_bounds("policy_sums", a.cu_seqlens, a.logprobs.numel());
  const int64_t num_segments = a.cu_seqlens.numel() - 1;
  Tensor sums = torch::stable::new_zeros(a.logprobs, {kNumSums, num_segments}, ScalarType::Double);
  double* out = sums.mutable_data_ptr<double>();
  a.logprobs.scalar_type() == ScalarType::Float ? sum_row<float>(a, bounds, out)
                                                : sum_row<double>(a, bounds, out);
  return sums;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> policy_loss_cpu(
    MEGARL_POLICY_SIGNATURE, const std::optional<Tensor>& sequence_sums) {
  const Arguments a = checked_arguments("policy_loss", MEGARL_POLICY_ARGUMENTS);
  const auto bounds = checked_bounds("policy_loss", a.cu_seqlens, a.logprobs.numel());
  Output out = new_output("policy_loss", a, sequence_sums);
  advise_large_pages(out.grad);
  advise_large_pages(out.grad_entropy);
  double *sums = out.sums.mutable_data_ptr<double>(), *totals = out.totals.mutable_data_ptr<double>();
  const bool given = sequence_sums.has_value();
  if (a.logprobs.scalar_type() == ScalarType::Float) {
    apply_row<float>(a, bounds, given, sums, totals, out.grad.mutable_data_ptr<float>(),
                     out.entropy_gradient<float>());
  } else {
    apply_row<double>(a, bounds, given, sums, totals, out.grad.mutable_data_ptr<double>(),
                      out.entropy_gradient<double>());
  }
  return {out.grad, out.grad_entropy, out.sums, out.totals};
}

}  // namespace policy
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CPU, m) {
  m.impl("policy_sums", TORCH_BOX(&megarl::policy::policy_sums_cpu));
  m.impl("policy_loss", TORCH_BOX(&megarl::policy::policy_loss_cpu));
}
