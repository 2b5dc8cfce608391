// Rows from sizes, before anything is balanced, and the lengths that rows are raised to.
#include "pack.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <set>
#include <tuple>

namespace megarl {

namespace {

constexpr size_t kMostLengths = 256;  // from which bucket lengths are chosen

using Load = std::pair<int64_t, size_t>;  // (tokens, row)

// Each sample into the emptiest row, the first of equals.
std::optional<Rows> fill_emptiest(const Numbers& sizes, int64_t capacity, size_t count) {
  Rows rows(count);
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> heap;
  for (size_t k = 0; k < count; ++k) heap.emplace(0, k);
  for (size_t p = 0; p < sizes.size(); ++p) {
    const auto [load, k] = heap.top();
    if (load + sizes[p] > capacity) return std::nullopt;
    rows[k].push_back(p);
    heap.pop();
    heap.emplace(load + sizes[p], k);
  }
  return rows;
}

int64_t fullest(const Rows& rows, const Numbers& sizes) {
  int64_t most = 0;
  for (const Row& row : rows) {
    int64_t load = 0;
    for (const size_t p : row) load += sizes[p];
    most = std::max(most, load);
  }
  return most;
}

Numbers distinct(Numbers values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

}  // namespace

// Each sample into the fullest row that can take it, the first of equals, or else into a new one.
std::optional<Rows> fill_best(const Numbers& sizes, int64_t capacity, size_t count) {
  Rows rows;
  std::set<Load> space;  // (tokens left, row)
  for (size_t p = 0; p < sizes.size(); ++p) {
    const auto at = space.lower_bound({sizes[p], 0});
    int64_t left = capacity;
    size_t k = rows.size();
    if (at != space.end()) {
      std::tie(left, k) = *at;
      space.erase(at);
    } else {
      if (k == count || sizes[p] > capacity) return std::nullopt;
      rows.emplace_back();
    }
    rows[k].push_back(p);
    space.emplace(left - sizes[p], k);
  }
  return rows;
}

std::vector<Rows> even_fillings(const Problem& problem, const Numbers& sizes, int64_t count) {
  std::vector<Rows> found;
  const int64_t row_tokens = problem.row_tokens, unit = problem.row_multiple;
  int64_t most = row_tokens;
  if (std::optional<Rows> emptiest = fill_emptiest(sizes, row_tokens, count)) {
    most = fullest(*emptiest, sizes);
    found.push_back(std::move(*emptiest));
  }
  // The least capacity, in units, that best fit manages with: high always works.
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  int64_t low = std::max(ceil_div(total, count), sizes.empty() ? 0 : sizes.front());
  low = ceil_div(low, unit);
  int64_t high = ceil_div(most, unit);
  std::optional<Rows> tight;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (std::optional<Rows> rows = fill_best(sizes, std::min(middle * unit, row_tokens), count)) {
      tight = std::move(rows);
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  if (tight) found.push_back(std::move(*tight));
  return found;
}

Numbers bucket_lengths(const Numbers& needed, int64_t buckets, int64_t unit) {
  const int64_t longest = *std::max_element(needed.begin(), needed.end());
  Numbers rounded = needed, lengths = distinct(needed);
  while (lengths.size() > kMostLengths) {
    unit *= 2;
    for (size_t m = 0; m < needed.size(); ++m) {
      rounded[m] = std::min(ceil_div(needed[m], unit) * unit, longest);
    }
    lengths = distinct(rounded);
  }
  const size_t count = lengths.size();
  std::sort(rounded.begin(), rounded.end());
  Numbers upto{0}, least{0};  // how many are at most the j-th length; see the reference
  for (const int64_t length : lengths) {
    upto.push_back(std::upper_bound(rounded.begin(), rounded.end(), length) - rounded.begin());
    least.push_back(length * upto.back());
  }
  std::vector<std::vector<size_t>> cuts{std::vector<size_t>(count + 1)};
  for (int64_t b = 1; b < std::min<int64_t>(buckets, count); ++b) {
    const Numbers before = least;
    std::vector<size_t> cut(count + 1);
    for (size_t j = 1; j <= count; ++j) {
      for (size_t i = 1; i < j; ++i) {
        const int64_t total = before[i] + lengths[j - 1] * (upto[j] - upto[i]);
        if (total < least[j]) {
          least[j] = total;
          cut[j] = i;
        }
      }
    }
    cuts.push_back(std::move(cut));
  }
  Numbers chosen;
  size_t end = count;
  for (size_t b = cuts.size(); b-- > 0;) {
    if (cuts[b][end] == 0 && b > 0) continue;
    chosen.push_back(lengths[end - 1]);
    end = cuts[b][end];
  }
  std::reverse(chosen.begin(), chosen.end());
  Numbers raised;
  for (const int64_t n : needed) {
    raised.push_back(*std::lower_bound(chosen.begin(), chosen.end(), n));
  }
  return raised;
}

}  // namespace megarl
