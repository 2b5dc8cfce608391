// What happens to a block of tokens between loading and the next: ratios, the objective, the divergence
// from the reference, sums.  The mathematics is policy_math.h's and policy_objectives.h's.  Included by
// policy_loss.cpp alone.
#pragma once

#include "policy_block.h"

#include <cmath>

namespace megarl {
namespace policy {
namespace {

struct RowLanes {
  Lanes of[kNumTotals];
};

// How many flags an objective reports, and whether a mean (policy_objectives.h).
constexpr int kNumFlags[kNumObjectives] = {0, 0, 3, 4, 1, 4, 3, 1, 2, 2, 2};
constexpr bool kHasMean[kNumObjectives] = {false, false, false, true,  true, false,
                                           true,  false, false, false, false};

template <typename T>
MEGARL_INLINE void find_ratios(Block<T>& b, int n) {
  for (int i = 0; i < n; ++i) {
    const T near = clamped_log_ratio(b.log_ratio[i]);
    const Exponential<T> e = exponential(near);
    const T used_ratio = e.exp * b.used[i];
    b.near[i] = near;
    b.clamped[i] = b.log_ratio[i] != near ? T(1) : T(0);
    b.ratio[i] = e.exp;
    b.used_ratio[i] = used_ratio;
    b.ratio_square[i] = e.exp * used_ratio;
    b.k3[i] = e.expm1_mx;
    b.distance[i] = e.expm1 < T(0) ? -e.expm1 : e.expm1;
    b.square[i] = near * near;
  }
}

template <typename T>
MEGARL_INLINE void find_near(Block<T>& b, int n) {
  for (int i = 0; i < n; ++i) b.near[i] = clamped_log_ratio(b.log_ratio[i]);
}

// coef A by A's sign.
template <typename T>
MEGARL_INLINE void add_pulls(Lanes& positive, Lanes& negative, const Block<T>& b, int n) {
  T rise[kBlock], fall[kBlock];
  for (int i = 0; i < n; ++i) {
    const T a = b.advantage[i], pull = b.coef[i] * a;
    rise[i] = a > T(0) ? pull : T(0);
    fall[i] = a < T(0) ? pull : T(0);
  }
  add(positive, rise, n);
  add(negative, fall, n);
}

template <typename T>
MEGARL_INLINE void add_decisive(Lanes* sums, Block<T>& b, const Choices& c, const Parameters& p,
                                int n) {
  add_short(sums[kCount], b.used, n);
  add_short(sums[kDropped], b.dropped, n);
  add(sums[kLogRatio], b.log_ratio, n);
  add_pulls(sums[kPositive], sums[kNegative], b, n);
  if (c.opsm != kNoOpsm) {
    add(sums[kGap], c.opsm == kAgainstOld ? b.log_ratio : b.gap, n);
    add(sums[kAdvantage], b.advantage, n);
  }
  if (c.objective == kGmpo) {
    const T low = T(p.log_low), high = T(p.log_high);
    T* held = b.loss;
    for (int i = 0; i < n; ++i) held[i] = gmpo_clipped(b.advantage[i], b.log_ratio[i], low, high);
    add(sums[kClippedLogRatio], held, n);
  }
}

// Needs find_ratios.
template <typename T>
MEGARL_INLINE void add_reported(Lanes* sums, const Block<T>& b, int n) {
  add_short(sums[kSquare], b.square, n);
  add_short(sums[kDistance], b.distance, n);
}

template <int kObjective, typename T, typename Compute>
MEGARL_INLINE void apply(Block<T>& b, const Sequence& s, const Parameters& p, int n,
                         const Compute& compute) {
  const Constants<T> constants = constants_of<T>(p, s);
  for (int i = 0; i < n; ++i) {
    const Token<T> token{b.logprob[i], b.advantage[i], b.coef[i], b.log_ratio[i],
                         b.ratio[i],   b.gap[i],       b.used[i], b.selected[i]};
    const TokenLoss<T> out = compute(token, constants);
    if constexpr (!is_of_whole_sequences(kObjective)) b.loss[i] = out.loss;
    b.grad[i] = out.grad;
    if constexpr (kHasMean[kObjective]) b.mean[i] = out.mean;
    if constexpr (kNumFlags[kObjective] > 0) b.flag[0][i] = out.flag0;
    if constexpr (kNumFlags[kObjective] > 1) b.flag[1][i] = out.flag1;
    if constexpr (kNumFlags[kObjective] > 2) b.flag[2][i] = out.flag2;
    if constexpr (kNumFlags[kObjective] > 3) b.flag[3][i] = out.flag3;
  }
}

// Seeds to gradients; where a seed is 0 so is the gradient.
template <typename T>
MEGARL_INLINE void finish_seeds(T* __restrict grad, int64_t n, T down, T up) {
  for (int64_t i = 0; i < n; ++i) {
    const T factor = grad[i] < T(0) ? down : up, value = grad[i] * factor;
    grad[i] = grad[i] != T(0) ? value : T(0);
  }
}

template <int kType, int kWeight, typename T>
MEGARL_INLINE void add_kl_of(Block<T>& b, const Constants<T>& c, int n) {
  for (int i = 0; i < n; ++i) {
    const KlTerm<T> term = kl_term<kType, kWeight>(b.reference[i], b.log_ratio[i], b.ratio[i], c);
    b.kl[i] = term.value;
    b.grad[i] += c.kl_coef * b.weight[i] * term.grad;
  }
}

template <int kType, typename T>
MEGARL_INLINE void add_kl_of(Block<T>& b, const Choices& c, const Constants<T>& constants, int n) {
  if (c.kl_weight == kUnweighted) add_kl_of<kType, kUnweighted>(b, constants, n);
  if (c.kl_weight == kWeightOld) add_kl_of<kType, kWeightOld>(b, constants, n);
  if (c.kl_weight == kWeightSelf) add_kl_of<kType, kWeightSelf>(b, constants, n);
}

template <typename T>
MEGARL_INLINE void add_kl(Block<T>& b, const Choices& c, const Sequence& s, const Parameters& p,
                          int n) {
  const Constants<T> constants = constants_of<T>(p, s);
  if (c.kl_type == kK1) add_kl_of<kK1>(b, c, constants, n);
  if (c.kl_type == kK2) add_kl_of<kK2>(b, c, constants, n);
  if (c.kl_type == kK3) add_kl_of<kK3>(b, c, constants, n);
  if (c.kl_type == kK3StraightThrough) add_kl_of<kK3StraightThrough>(b, c, constants, n);
}

template <typename T>
MEGARL_INLINE void add_extremes(RowLanes& totals, Block<T>& b, int n) {
  T *down = b.loss, *up = b.grad;  // both have been used
  for (int i = 0; i < n; ++i) {
    down[i] = b.used[i] != T(0) ? b.ratio[i] : T(HUGE_VAL);
    up[i] = b.used[i] != T(0) ? b.ratio[i] : T(-HUGE_VAL);
  }
  for (int i = kLanes; i < n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) down[j] = down[i + j] < down[j] ? down[i + j] : down[j];
  }
  for (int i = kLanes; i < n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) up[j] = up[i + j] > up[j] ? up[i + j] : up[j];
  }
  double *lowest = totals.of[kRatioMin].part, *highest = totals.of[kRatioMax].part;
  for (int j = 0; j < kLanes; ++j) lowest[j] = down[j] < lowest[j] ? down[j] : lowest[j];
  for (int j = 0; j < kLanes; ++j) highest[j] = up[j] > highest[j] ? up[j] : highest[j];
}

// All but what follows from add_decisive's sums (write_totals).
template <typename T>
MEGARL_INLINE void add_totals(RowLanes& totals, Block<T>& b, const View<T>& v, const Choices& c,
                              int n) {
  Lanes* t = totals.of;
  if (!is_of_whole_sequences(c.objective)) add_product(t[kPgLoss], b.coef, b.loss, n);
  add_short(t[kNegLogRatio], b.near, n);
  for (int k = 0; k < kNumFlags[c.objective]; ++k) add_short(t[kFlag0 + k], b.flag[k], n);
  if (v.ref_logprobs != nullptr) {
    add_product(t[kKlLoss], b.weight, b.kl, n);
    add_product(t[kKl], b.used, b.kl, n);
  }
  if (v.checks_entropy) add_product(t[kEntropyLoss], b.weight, b.entropy, n);
  if (!c.all_metrics) return;
  if (v.entropy != nullptr) add_short(t[kEntropy], b.entropy, n);
  if (kHasMean[c.objective]) add_short(t[kMeanValue], b.mean, n);
  add_short(t[kK3Mean], b.k3, n);
  add_short(t[kRatio], b.used_ratio, n);
  add_short(t[kRatioSquare], b.ratio_square, n);
  add_short(t[kRatioClamped], b.clamped, n);
  add_extremes(totals, b, n);
}

}  // namespace
}  // namespace policy
}  // namespace megarl
