// Bounds of packed sequences read on the host, and how sequences are shared among threads.
#pragma once

#include "../common.h"

#include <algorithm>
#include <vector>

namespace megarl {

template <typename index_t>
std::vector<int64_t> read_bounds(const Tensor& cu_seqlens) {
  const index_t* cu = cu_seqlens.const_data_ptr<index_t>();
  return std::vector<int64_t>(cu, cu + cu_seqlens.numel());
}

// The entries of `cu_seqlens`, which must start at 0, not decrease, and end at `num_tokens`.  `name`
// and `unit`: what the message calls bounds of something else than tokens.
inline std::vector<int64_t> checked_bounds(const char* op, const Tensor& cu_seqlens,
                                           int64_t num_tokens, const char* name = "cu_seqlens",
                                           const char* unit = "tokens") {
  const Tensor cu = torch::stable::contiguous(cu_seqlens);
  const std::vector<int64_t> bounds = cu.scalar_type() == ScalarType::Int
                                          ? read_bounds<int32_t>(cu)
                                          : read_bounds<int64_t>(cu);
  STD_TORCH_CHECK(bounds.front() == 0, op, ": ", name, " must start at 0, got ", bounds.front());
  for (size_t i = 1; i < bounds.size(); ++i) {
    STD_TORCH_CHECK(bounds[i - 1] <= bounds[i], op, ": ", name, " must not decrease, got ",
                    bounds[i - 1], " then ", bounds[i], " at entries ", i - 1, " and ", i);
  }
  STD_TORCH_CHECK(bounds.back() == num_tokens, op, ": ", name, " must end at the ", num_tokens, " ",
                  unit, ", got ", bounds.back(), " as its last entry");
  return bounds;
}

// Runs `work(s)` for every sequence.  A sequence is one thread's, so what it computes does not depend
// on how many threads there are; threads get neighbouring sequences of about as many tokens each.
template <typename Work>
void for_each_sequence(const std::vector<int64_t>& bounds, const Work& work) {
  constexpr int64_t kTokensPerThread = 16384;  // below this a thread costs more than it saves
  const int64_t num_segments = static_cast<int64_t>(bounds.size()) - 1;
  const int64_t num_parts =
      std::max<int64_t>(1, std::min(num_segments, bounds.back() / kTokensPerThread));
  // Part p begins with the first sequence that starts at or after its share of the tokens.
  const auto first_of = [&](int64_t part) {
    if (part == num_parts) return num_segments;
    const int64_t token = bounds.back() * part / num_parts;
    const auto at = std::lower_bound(bounds.begin(), bounds.end() - 1, token);
    return part == 0 ? int64_t{0} : static_cast<int64_t>(at - bounds.begin());
  };
  torch::stable::parallel_for(0, num_parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t s = first_of(first); s < first_of(last); ++s) work(s);
  });
}

}  // namespace megarl
