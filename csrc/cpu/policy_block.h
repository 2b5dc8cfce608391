// The tokens of a sequence in blocks, as plain arrays: how they are loaded and how they are summed.
//
// A block passes through short loops, one purpose each, over arrays of one type.  That is what the
// compiler turns into vector instructions, so every selection and every conversion is a loop of its own
// and masks are numbers, 1 or 0.  Included by policy_loss.cpp alone.
#pragma once

#include "simd.h"

#include "../policy_row.h"

namespace megarl {
namespace policy {
namespace {

constexpr int kBlock = 128;  // what the arrays of one take stays in the L1 cache
static_assert(kBlock % kLanes == 0, "whole lanes");

// Of up to kBlock tokens; what is beyond the last is 0.
template <typename T>
struct alignas(64) Block {
  // as loaded; 0 where a token is not used
  T used[kBlock], dropped[kBlock], logprob[kBlock], advantage[kBlock], weight[kBlock], coef[kBlock];
  T log_ratio[kBlock], gap[kBlock], reference[kBlock], entropy[kBlock], selected[kBlock];
  // of the ratio
  T near[kBlock], ratio[kBlock], k3[kBlock], distance[kBlock], square[kBlock];
  T used_ratio[kBlock], ratio_square[kBlock], clamped[kBlock];
  // of the objective
  T loss[kBlock], grad[kBlock], mean[kBlock], flag[4][kBlock], kl[kBlock];
};

struct Lanes {
  double part[kLanes] = {};
};

template <typename T>
MEGARL_INLINE void add(Lanes& sum, const T* __restrict x, int n) {
  double* __restrict part = sum.part;
#pragma GCC unroll 4
  for (int i = 0; i < n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) part[j] += static_cast<double>(x[i + j]);
  }
}

template <typename T>
MEGARL_INLINE void add_product(Lanes& sum, const T* __restrict x, const T* __restrict y, int n) {
  double* __restrict part = sum.part;
#pragma GCC unroll 4
  for (int i = 0; i < n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      part[j] += static_cast<double>(x[i + j]) * static_cast<double>(y[i + j]);
    }
  }
}

// The same with a block's terms of a lane, which are few (kBlock / kLanes), added in their own type
// first: exact for numbers that are 1 or 0, and within the rounding of the terms for what is reported.
template <typename T>
MEGARL_INLINE void add_short(Lanes& sum, const T* __restrict x, int n) {
  T leaf[kLanes] = {};
#pragma GCC unroll 4
  for (int i = 0; i < n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) leaf[j] += x[i + j];
  }
  for (int j = 0; j < kLanes; ++j) sum.part[j] += static_cast<double>(leaf[j]);
}

// 1 where the byte is not 0.
template <typename T>
MEGARL_INLINE void read_mask(T* __restrict out, const uint8_t* __restrict mask, int n) {
  for (int i = 0; i < n; ++i) out[i] = static_cast<T>(mask[i]);
  for (int i = 0; i < n; ++i) out[i] = out[i] != T(0) ? T(1) : T(0);
}

// What every loss reads, and which tokens are used: trained, and finite in everything that is read.
// `bad`: not 0 where one of the further rows is not finite; null where there are none.
template <typename T>
MEGARL_INLINE void load_always(Block<T>& b, const View<T>& v, const T* bad, int64_t at, int n) {
  const T *__restrict lp = v.logprobs + at, *__restrict lo = v.old_logprobs + at;
  const T *__restrict a = v.advantages + at, *__restrict w = v.weight + at;
  const uint8_t* __restrict mask = v.mask + at;
  T *__restrict used = b.used, *__restrict dropped = b.dropped;
  read_mask(dropped, mask, n);
  if (bad != nullptr) {
    for (int i = 0; i < n; ++i) used[i] = bad[i] == T(0) ? dropped[i] : T(0);
  } else {
    for (int i = 0; i < n; ++i) used[i] = dropped[i];
  }
  T *__restrict logprob = b.logprob, *__restrict log_ratio = b.log_ratio;
  T *__restrict advantage = b.advantage, *__restrict weight = b.weight, *__restrict coef = b.coef;
  for (int i = 0; i < n; ++i) {
    const T finite = (unless_finite(lp[i]) + unless_finite(lo[i])) +
                     (unless_finite(a[i]) + unless_finite(w[i]));
    const T d = lp[i] - lo[i], is_used = finite == T(0) ? used[i] : T(0);
    const T a_used = is_used != T(0) ? a[i] : T(0), w_used = is_used != T(0) ? w[i] : T(0);
    used[i] = is_used;
    dropped[i] -= is_used;
    logprob[i] = is_used != T(0) ? lp[i] : T(0);
    log_ratio[i] = is_used != T(0) ? d : T(0);
    advantage[i] = a_used;
    weight[i] = w_used;
    coef[i] = w_used;
  }
}

// Where one of the rows that only some losses read is not finite; null if this loss reads none.
template <typename T>
MEGARL_INLINE const T* find_bad(Block<T>& b, const View<T>& v, int64_t at, int n) {
  const T* further[] = {v.rollout_logprobs, v.ref_logprobs, v.correction,
                        v.checks_entropy ? v.entropy : nullptr};
  T* bad = nullptr;
  for (const T* row : further) {
    if (row == nullptr) continue;
    const T* x = row + at;
    if (bad == nullptr) {
      for (int i = 0; i < n; ++i) b.loss[i] = unless_finite(x[i]);
    } else {
      for (int i = 0; i < n; ++i) b.loss[i] += unless_finite(x[i]);
    }
    bad = b.loss;
  }
  return bad;
}

// `x - y` of used tokens, 0 elsewhere.
template <typename T>
MEGARL_INLINE void select_difference(T* __restrict out, const T* __restrict used, const T* x,
                                     const T* y, int n) {
  for (int i = 0; i < n; ++i) {
    const T difference = x[i] - y[i];
    out[i] = used[i] != T(0) ? difference : T(0);
  }
}

template <typename T>
MEGARL_INLINE void select(T* __restrict out, const T* __restrict used, const T* x, int n) {
  for (int i = 0; i < n; ++i) {
    const T value = x[i];
    out[i] = used[i] != T(0) ? value : T(0);
  }
}

template <typename T>
MEGARL_INLINE void load(Block<T>& b, const View<T>& v, int64_t at, int n) {
  load_always(b, v, find_bad(b, v, at, n), at, n);
  const T* lp = v.logprobs + at;
  if (v.correction != nullptr) {
    select(b.coef, b.used, v.correction + at, n);
    for (int i = 0; i < n; ++i) b.coef[i] *= b.weight[i];
  }
  if (v.rollout_logprobs != nullptr) {
    select_difference(b.gap, b.used, lp, v.rollout_logprobs + at, n);
  }
  if (v.ref_logprobs != nullptr) {
    select_difference(b.reference, b.used, v.ref_logprobs + at, lp, n);
  }
  if (v.entropy != nullptr) select(b.entropy, b.used, v.entropy + at, n);
  if (v.selected != nullptr) {
    const uint8_t* selected = v.selected + at;
    read_mask(b.selected, selected, n);
    for (int i = 0; i < n; ++i) b.selected[i] *= b.used[i];
  }
}

// Nothing of what was loaded is used, from token `from` to `to`; what was dropped stays so.
template <typename T>
void clear(Block<T>& b, int from, int to) {
  for (T* x : {b.used, b.logprob, b.advantage, b.weight, b.coef, b.log_ratio, b.gap,
               b.reference, b.entropy, b.selected}) {
    std::fill(x + from, x + to, T(0));
  }
}

}  // namespace
}  // namespace policy
}  // namespace megarl
