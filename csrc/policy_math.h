// The mathematics of a packed row's policy loss, token by token and sequence by sequence: what the CPU
// kernel (cpu/policy_loss.cpp) and the CUDA kernel (cuda/policy_loss.cu) both run.  The objectives
// themselves are in policy_objectives.h.
//
// The specification is megarl/algos/objective.py and its surrogates*.py; names are theirs.  A token that
// is not used has every field 0.  T is float or double, the type of what enters; sums are double.
#pragma once

#include "fast_math.h"

namespace megarl {
namespace policy {

// In the order of megarl/ops/policy_loss.py, which names them.
enum Objective { kReinforce, kSft, kPpoClip, kCispo, kSapo, kAspo, kMinirl, kKlCov, kGspo, kGspoToken,
                 kGmpo, kNumObjectives };
enum KlType { kNoKl, kK1, kK2, kK3, kK3StraightThrough, kNumKlTypes };
enum KlWeight { kUnweighted, kWeightOld, kWeightSelf, kNumKlWeights };
enum Opsm { kNoOpsm, kAgainstOld, kAgainstRollout, kNumOpsm };

// Sums over a whole sequence, which may lie on several context-parallel ranks.  The first kNumDecisive
// decide about its tokens, the others are reported only.
enum Sum { kCount, kLogRatio, kPositive, kNegative, kDropped, kGap, kAdvantage, kClippedLogRatio,
           kNumDecisive, kSquare = kNumDecisive, kDistance, kNumSums };
// Sums over a row's tokens on this rank; the last two are a minimum and a maximum.
enum Total { kTokens, kDroppedTokens, kPgLoss, kKlLoss, kEntropyLoss, kEntropy, kKl, kNegLogRatio, kK3Mean,
             kRatio, kRatioSquare, kRatioClamped, kFlag0, kFlag1, kFlag2, kFlag3, kMeanValue,
             kRatioMin, kRatioMax, kNumTotals };

constexpr double kLogRatioLimit = 20.0;

// In the order of PARAMETERS in megarl/ops/policy_loss.py; one that an objective does not read is 0.
struct Parameters {
  double low, high;            // the trust region of the ratio
  double log_low, log_high;    // the same of its logarithm
  double wide_low, wide_high;  // for selected tokens
  double cap, floor;           // bounds of a weight
  double tau_pos, tau_neg, penalty;
  double kl_coef, kl_input_clamp, kl_output_clamp, entropy_coef, opsm_delta;
};
constexpr int kNumParameters = 16;
static_assert(sizeof(Parameters) == kNumParameters * sizeof(double), "no padding");

// The same and a sequence's constants in the type of the row, so that loops hold no conversions.
template <typename T>
struct Constants {
  T low, high, log_low, log_high, wide_low, wide_high, cap, floor, tau_pos, tau_neg, penalty;
  T kl_coef, kl_input_clamp, kl_output_clamp;
  T ratio, above, below, grad;
  T over, under, moves;      // 1 or 0: s beyond its upper or its lower bound; s has a gradient
  T scale_pos, scale_neg;    // 4 / tau
};

struct Choices {
  int objective, kl_type, kl_weight, opsm;
  bool all_metrics;
};

MEGARL_MATH constexpr bool is_of_whole_sequences(int objective) {
  return objective == kGspo || objective == kGspoToken || objective == kGmpo;
}
MEGARL_MATH bool has_ratio_in_loss(int objective) {
  return objective == kPpoClip || objective == kCispo || objective == kSapo || objective == kAspo ||
         objective == kMinirl || objective == kKlCov;
}

template <typename T>
MEGARL_MATH T clamped(T x, T low, T high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}
template <typename T>
MEGARL_MATH T clamped_log_ratio(T d) {
  return clamped(d, T(-kLogRatioLimit), T(kLogRatioLimit));
}
template <typename T>
MEGARL_MATH bool is_inside(T d) {
  return (d <= T(kLogRatioLimit)) & (d >= T(-kLogRatioLimit));
}

// 0 where x is finite, else NaN: sums of it tell whether all are finite, by one comparison.
template <typename T>
MEGARL_MATH T unless_finite(T x) {
  return x - x;
}

// What a sequence's sums say about its tokens.
struct Sequence {
  double ratio, above, below, grad;
  bool low_ok, high_ok, alive, kept, moves;
};

MEGARL_MATH Sequence sequence_of(const double* sums, const Choices& c, const Parameters& p) {
  Sequence s;
  const double n = sums[kCount] > 1 ? sums[kCount] : 1;
  const bool lost = -sums[kGap] / n > p.opsm_delta;
  s.alive = !(is_of_whole_sequences(c.objective) && sums[kDropped] > 0);
  s.kept = !(c.opsm != kNoOpsm && sums[kAdvantage] < 0 && lost);
  const bool counted = s.alive && s.kept;
  const double positive = counted ? sums[kPositive] : 0, negative = counted ? sums[kNegative] : 0;
  const double mean = (c.objective == kGmpo ? sums[kClippedLogRatio] : sums[kLogRatio]) / n;
  const double z = s.alive ? mean : 0;
  s.ratio = exponential(clamped_log_ratio(z)).exp;
  s.moves = is_inside(z);
  s.low_ok = z >= p.log_low;
  s.high_ok = z <= p.log_high;
  s.above = s.high_ok || c.objective == kGmpo ? s.ratio : p.high;
  s.below = s.low_ok || c.objective == kGmpo ? s.ratio : p.low;
  const double pull = c.objective == kGmpo ? positive + negative
                                           : (s.high_ok ? positive : 0) + (s.low_ok ? negative : 0);
  s.grad = s.moves ? -s.ratio * pull / n : 0;
  return s;
}

template <typename T>
MEGARL_MATH Constants<T> constants_of(const Parameters& p, const Sequence& s) {
  return {T(p.low), T(p.high), T(p.log_low), T(p.log_high), T(p.wide_low), T(p.wide_high), T(p.cap),
          T(p.floor), T(p.tau_pos), T(p.tau_neg), T(p.penalty), T(p.kl_coef), T(p.kl_input_clamp),
          T(p.kl_output_clamp), T(s.ratio), T(s.above), T(s.below), T(s.grad),
          T(s.high_ok ? 0 : 1), T(s.low_ok ? 0 : 1), T(s.moves ? 1 : 0),
          T(p.tau_pos > 0 ? 4 / p.tau_pos : 0), T(p.tau_neg > 0 ? 4 / p.tau_neg : 0)};
}

// A token as its objective sees it.  `gap`: lp - lr; `used`, `selected`: 1 or 0.
template <typename T>
struct Token {
  T logprob, advantage, coef, log_ratio, ratio, gap, used, selected;
};

// l, its gradient in the log-prob with everything that multiplies it, and what is reported of it: flags
// are 1 or 0, and 0 where the token is not used.
template <typename T>
struct TokenLoss {
  T loss, grad, mean, flag0, flag1, flag2, flag3;
};

// Factors of negative and of positive seeds, and whether the sequence is clipped above or below.
struct Finish {
  double down, up, flag0, flag1;
};
MEGARL_MATH Finish finish_of(const Sequence& s, int objective) {
  if (!s.alive) return {0, 0, 0, 0};
  const double over = s.high_ok ? 0 : 1, under = s.low_ok ? 0 : 1;
  if (objective == kGmpo) return {0, s.grad, 1, 1};
  if (objective == kGspo) return {0, s.grad, over, under};
  const double ratio = s.moves && s.kept ? s.ratio : 0;
  return {s.high_ok ? ratio : 0, s.low_ok ? ratio : 0, over, under};
}

// gmpo's log-ratio of a token, clipped on the side its advantage pushes to.
template <typename T>
MEGARL_MATH T gmpo_clipped(T a, T d, T low, T high) {
  const T top = d < high ? d : high, bottom = d > low ? d : low;
  const T held = a > T(0) ? top : bottom;
  return a != T(0) ? held : T(0);
}

// k and dk/dlp of the divergence from the reference policy, without the coefficient.  `e`: of `x`
// brought into the input clamp; `ratio` of pi and pi_old.  Source: megarl/algos/kl.py.
template <typename T>
struct KlTerm {
  T value, grad;
};

template <int kType, int kWeight, typename T>
MEGARL_MATH KlTerm<T> kl_term(T raw, T log_ratio, T ratio, const Constants<T>& c) {
  const T input = c.kl_input_clamp, output = c.kl_output_clamp;
  const T x = clamped(raw, -input, input);
  const Exponential<T> e = exponential(x);
  const T half_square = x * x / T(2);
  // value, gradient, and their sum: it cancels where it is formed from rounded parts
  const T value = kType == kK1 ? -x : (kType == kK2 ? half_square : e.expm1_mx);
  const T grad = kType == kK1 ? T(1) : (kType == kK3 ? -e.expm1 : -x);
  const T both = kType == kK1   ? T(1) - x
                 : kType == kK2 ? half_square - x
                 : kType == kK3 ? -x
                                : e.expm1_mx - x;
  const bool over = (value > output) | (value < -output), frozen = (raw > input) | (raw < -input);
  const T held = clamped(value, -output, output);
  const T slope = over ? T(0) : grad, product = over ? held : both;
  const T weighted = is_inside(log_ratio) ? product : slope;
  const T weight = kWeight == kWeightOld ? ratio : T(1);
  const T g = kWeight == kWeightOld ? ratio * weighted : (kWeight == kWeightSelf ? product : slope);
  return {weight * held, frozen ? T(0) : g};
}

}  // namespace policy
}  // namespace megarl
