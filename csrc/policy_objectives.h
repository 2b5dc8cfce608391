// The policy objectives: l, its gradient in the log-prob, and what is reported of a token.  Formulas and
// sources: megarl/algos/surrogates.py and sequence_surrogates.py.
//
// Both arms of a selection are computed before it: an arm that holds a computation the compiler turns
// into a jump, and a loop with jumps into no vector instructions.
#pragma once

#include "policy_math.h"

namespace megarl {
namespace policy {

template <typename T>
MEGARL_MATH T one_if(bool condition) {
  return condition ? T(1) : T(0);
}

template <typename T>
MEGARL_MATH TokenLoss<T> reinforce(const Token<T>& t, const Constants<T>&) {
  return {-t.advantage * t.logprob, -t.advantage * t.coef, 0, 0, 0, 0, 0};
}

template <typename T>
MEGARL_MATH TokenLoss<T> sft(const Token<T>& t, const Constants<T>&) {
  return {-t.logprob, -t.coef, 0, 0, 0, 0, 0};
}

// 1 where r is beyond the trust region on the side that the advantage pushes to.
template <typename T>
MEGARL_MATH T beyond_high(T a, T r, T high) {
  return one_if<T>((a > T(0)) & (r > high));
}
template <typename T>
MEGARL_MATH T beyond_low(T a, T r, T low) {
  return one_if<T>((a < T(0)) & (r < low));
}

// flags: clipfrac_high, clipfrac_low, clipfrac_dual (cap infinite: none)
template <typename T>
MEGARL_MATH TokenLoss<T> ppo_clip(const Token<T>& t, const Constants<T>& c) {
  const T a = t.advantage, r = t.ratio;
  const T over = beyond_high(a, r, c.high), under = beyond_low(a, r, c.low);
  const T dual = one_if<T>((a < T(0)) & (r > c.cap));
  const T low = a > T(0) ? T(0) : c.low, high = a > T(0) ? c.high : c.cap;
  const T held = clamped(r, low, high), pull = -a * r * t.coef;
  const T stopped = over + under + dual + one_if<T>(!is_inside(t.log_ratio));
  return {-a * held, stopped == T(0) ? pull : T(0), 0, over, under, dual, 0};
}

// flags: weight_capped, weight_raised, and with a mask clipfrac_high, clipfrac_low (an infinite trust
// region: none); mean: surrogate_loss
template <typename T>
MEGARL_MATH TokenLoss<T> cispo(const Token<T>& t, const Constants<T>& c) {
  const T a = t.advantage, r = t.ratio;
  const T over = beyond_high(a, r, c.high), under = beyond_low(a, r, c.low);
  const T weight = clamped(r, c.floor, c.cap);
  const T w = over + under == T(0) ? weight : T(0);
  const T capped = one_if<T>(r > c.cap), raised = one_if<T>(r < c.floor);
  return {-w * a * t.logprob, -w * a * t.coef, -w * a, capped * t.used, raised * t.used, over, under};
}

// flags: gatefrac_low; mean: gate
template <typename T>
MEGARL_MATH TokenLoss<T> sapo(const Token<T>& t, const Constants<T>& c) {
  const T a = t.advantage, r = t.ratio, tau = a > T(0) ? c.tau_pos : c.tau_neg;
  const T x = tau * (r - T(1)), size = x < T(0) ? -x : x;
  const T e = exponential(-size).exp, inverse = T(1) / (T(1) + e);
  const T gate = T(4) * e * inverse * inverse;
  const T sigmoid = (x < T(0) ? e : T(1)) * inverse;
  const T scale = a > T(0) ? c.scale_pos : c.scale_neg;
  const T g = is_inside(t.log_ratio) ? -a * r * gate : T(0);
  return {-scale * sigmoid * a, g * t.coef, gate * t.used, one_if<T>(gate < T(0.5)), 0, 0, 0};
}

// flags: clipfrac_high, clipfrac_low, clipfrac_dual, weight_capped
template <typename T>
MEGARL_MATH TokenLoss<T> aspo(const Token<T>& t, const Constants<T>& c) {
  const T a = t.advantage, r = t.ratio;
  const T low = t.selected != T(0) ? c.wide_low : c.low;
  const T high = t.selected != T(0) ? c.wide_high : c.high;
  const T over = beyond_high(a, r, high), under = beyond_low(a, r, low);
  const T top = r < high ? r : high, bottom = r > low ? r : low;
  const T inverse = T(1) / top, free = a > T(0) ? inverse : bottom;
  const T w = free < c.cap ? free : c.cap;
  const T g = over + under == T(0) ? -a * w : T(0);
  const T dual = one_if<T>((a < T(0)) & (r > c.cap));
  const T flipped = T(1) / r, capped = one_if<T>((a > T(0)) & (flipped > c.cap));
  return {-a * w, g * t.coef, 0, over, under, dual, capped};
}

// flags: clipfrac_high, clipfrac_low, weight_capped; mean: surrogate_loss
template <typename T>
MEGARL_MATH TokenLoss<T> minirl(const Token<T>& t, const Constants<T>& c) {
  const T a = t.advantage, r = t.ratio;
  const T over = beyond_high(a, r, c.high), under = beyond_low(a, r, c.low);
  const T behaviour = exponential(clamped_log_ratio(t.gap)).exp;
  const T weight = behaviour < c.cap ? behaviour : c.cap;
  const T w = over + under == T(0) ? weight : T(0);
  const T capped = one_if<T>(behaviour > c.cap);
  return {-w * a * t.logprob, -w * a * t.coef, -w * a, over, under, capped * t.used, 0};
}

// flags: selected
template <typename T>
MEGARL_MATH TokenLoss<T> kl_cov(const Token<T>& t, const Constants<T>& c) {
  const T a = t.advantage, r = t.ratio, d = t.log_ratio;
  const T penalty = t.selected * t.used * c.penalty;
  const T size = d < T(0) ? -d : d, sign = one_if<T>(d > T(0)) - one_if<T>(d < T(0));
  const T g = (is_inside(d) ? -a * r : T(0)) + penalty * sign;
  return {-a * r + penalty * size, g * t.coef, 0, t.selected, 0, 0, 0};
}

// flags of the three: clipfrac_high, clipfrac_low
template <typename T>
MEGARL_MATH TokenLoss<T> gspo(const Token<T>& t, const Constants<T>& c) {
  const T a = t.advantage;
  const T over = a > T(0) ? c.over : T(0), under = a < T(0) ? c.under : T(0);
  const T held = a > T(0) ? c.above : c.below;
  return {-a * held, t.used * c.grad, 0, over, under, 0, 0};
}

template <typename T>
MEGARL_MATH TokenLoss<T> gspo_token(const Token<T>& t, const Constants<T>& c) {
  const T a = t.advantage;
  const T over = a > T(0) ? c.over : T(0), under = a < T(0) ? c.under : T(0);
  const T held = a > T(0) ? c.above : c.below;
  const T pull = -a * t.coef * (c.ratio * c.moves);  // in the order of its seed and Finish
  return {-a * held, over + under == T(0) ? pull : T(0), 0, over, under, 0, 0};
}

template <typename T>
MEGARL_MATH TokenLoss<T> gmpo(const Token<T>& t, const Constants<T>& c) {
  const T a = t.advantage, d = t.log_ratio;
  const T over = beyond_high(a, d, c.log_high), under = beyond_low(a, d, c.log_low);
  const T moves = (over + under == T(0)) & (a != T(0)) ? t.used : T(0);
  return {-a * c.ratio, moves * c.grad, 0, over, under, 0, 0};
}

// What can be said of a token before its sequence's ratio is known: a seed of the gradient, which
// Finish turns into it, and flags that count if the sequence is clipped on their side.  GMPO's are final.
template <typename T>
MEGARL_MATH TokenLoss<T> gspo_seed(const Token<T>& t, const Constants<T>&) {
  return {0, t.used, 0, one_if<T>(t.advantage > T(0)), one_if<T>(t.advantage < T(0)), 0, 0};
}
template <typename T>
MEGARL_MATH TokenLoss<T> gspo_token_seed(const Token<T>& t, const Constants<T>&) {
  const T a = t.advantage;
  return {0, -a * t.coef, 0, one_if<T>(a > T(0)), one_if<T>(a < T(0)), 0, 0};
}
template <typename T>
MEGARL_MATH TokenLoss<T> gmpo_seed(const Token<T>& t, const Constants<T>& c) {
  TokenLoss<T> out = gmpo(t, c);
  out.grad = (out.flag0 + out.flag1 == T(0)) & (t.advantage != T(0)) ? t.used : T(0);
  return out;
}

}  // namespace policy
}  // namespace megarl
