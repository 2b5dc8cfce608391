// A filling of rows as microbatches and ranks, and what makes it even.
#include "pack.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

namespace megarl {

namespace {

constexpr size_t kMostRounds = 256;  // of evening one microbatch
constexpr size_t kMostTransfers = 100000;  // between ranks; see the reference

size_t index_of_max(const Numbers& x) { return std::max_element(x.begin(), x.end()) - x.begin(); }
size_t index_of_min(const Numbers& x) { return std::min_element(x.begin(), x.end()) - x.begin(); }

// 0..n-1 sorted by `key`, equal ones by index.
template <typename Key>
std::vector<size_t> sorted_by(size_t n, const Key& key) {
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a) < key(b); });
  return order;
}

int64_t sum_of(const Row& row, const Numbers& values) {
  int64_t sum = 0;
  for (const size_t p : row) sum += values[p];
  return sum;
}

}  // namespace

Plan::Plan(const Problem& problem, const Numbers& sizes, Rows filled, size_t count)
    : problem_(problem),
      num_(count / problem.dp),
      dp_(problem.dp),
      nothing_(sizes.size()),
      sizes_(sizes) {
  sizes_.push_back(0);
  for (const int64_t n : sizes_) costs_.push_back(problem.linear * n + problem.quadratic * n * n);
  filled.resize(count);
  Numbers totals;
  for (const Row& row : filled) totals.push_back(sum_of(row, costs_));
  const std::vector<size_t> order = sorted_by(count, [&](size_t k) { return -totals[k]; });
  rows.resize(num_, Rows(dp_));
  loads_.resize(num_, Numbers(dp_));
  row_costs_.resize(num_, Numbers(dp_));
  for (size_t k = 0; k < count; ++k) {
    const Row& row = filled[order[k]];
    const size_t m = k / dp_, r = k % dp_;
    rows[m][r].push_back(nothing_);
    rows[m][r].insert(rows[m][r].end(), row.rbegin(), row.rend());
    loads_[m][r] = sum_of(row, sizes_);
    row_costs_[m][r] = totals[order[k]];
  }
  set_lengths();
}

void Plan::set_lengths() {
  const int64_t unit = problem_.row_multiple;
  Numbers needed;
  for (const Numbers& loads : loads_) {
    const int64_t longest = *std::max_element(loads.begin(), loads.end());
    needed.push_back(ceil_div(std::max<int64_t>(longest, 1), unit) * unit);
  }
  lengths = bucket_lengths(needed, problem_.buckets, unit);
}

int64_t Plan::wanted() const {
  int64_t total = 0;
  for (size_t m = 0; m < num_; ++m) {
    int64_t attention = 0;
    for (size_t r = 0; r < dp_; ++r) {
      attention = std::max(attention, row_costs_[m][r] - problem_.linear * loads_[m][r]);
    }
    total += problem_.linear * lengths[m] + attention;
  }
  return total;
}

int64_t Plan::space(Place at) const {
  return std::min(lengths[at.m], problem_.row_tokens) - loads_[at.m][at.r];
}

void Plan::even_microbatches() {
  for (size_t m = 0; m < num_; ++m) {
    const Numbers& costs = row_costs_[m];
    for (size_t round = 0; round < std::min(4 * dp_, kMostRounds); ++round) {
      const size_t high = index_of_max(costs), low = index_of_min(costs);
      const int64_t gap = costs[high] - costs[low];
      if (transfer({m, high}, {m, low}, gap, gap) == 0) break;
    }
  }
}

void Plan::deal() {
  Numbers totals(dp_), spread;
  for (const Numbers& costs : row_costs_) {
    spread.push_back(costs[index_of_max(costs)] - costs[index_of_min(costs)]);
  }
  for (const size_t m : sorted_by(num_, [&](size_t i) { return -spread[i]; })) {
    const Numbers costs = row_costs_[m], loads = loads_[m];
    Rows here = std::move(rows[m]);
    rows[m] = Rows(dp_);
    const std::vector<size_t> by_cost = sorted_by(dp_, [&](size_t r) { return -costs[r]; });
    const std::vector<size_t> ranks = sorted_by(dp_, [&](size_t r) { return totals[r]; });
    for (size_t i = 0; i < dp_; ++i) {
      const size_t k = by_cost[i], r = ranks[i];
      totals[r] += costs[k];
      rows[m][r] = std::move(here[k]);
      loads_[m][r] = loads[k];
      row_costs_[m][r] = costs[k];
    }
  }
}

void Plan::even_ranks(bool keep_slowest) {
  Numbers totals(dp_);
  for (const Numbers& costs : row_costs_) {
    for (size_t r = 0; r < dp_; ++r) totals[r] += costs[r];
  }
  size_t attempts = std::min(16 * dp_, (kMostTransfers + num_ - 1) / num_);
  int64_t moved = 1;
  while (moved != 0 && attempts > 0) {
    const size_t high = index_of_max(totals);
    for (const size_t low : sorted_by(dp_, [&](size_t r) { return totals[r]; })) {
      if (attempts == 0) return;
      --attempts;
      moved = between_ranks(high, low, totals[high] - totals[low], keep_slowest);
      if (moved == 0) continue;
      totals[high] -= moved;
      totals[low] += moved;
      break;
    }
  }
}

int64_t Plan::between_ranks(size_t high, size_t low, int64_t gap, bool keep_slowest) {
  int64_t left = gap;
  for (size_t m = 0; m < num_; ++m) {
    const Numbers& costs = row_costs_[m];
    const int64_t most = keep_slowest ? costs[index_of_max(costs)] - costs[low] : left;
    left -= 2 * transfer({m, high}, {m, low}, left, most);
  }
  for (size_t m = 0; m < num_; ++m) {
    const int64_t moved = row_costs_[m][high] - row_costs_[m][low];
    if (moved <= 0 || moved >= left) continue;
    swap_rows(m, high, low);
    left -= 2 * moved;
  }
  if (!keep_slowest && left > 0) {
    Numbers spaces;
    for (size_t m = 0; m < num_; ++m) spaces.push_back(space({m, low}));
    const size_t roomy = index_of_max(spaces);
    for (size_t m = 0; m < num_; ++m) {
      left -= 2 * transfer({m, high}, {roomy, low}, left, left);
    }
  }
  return (gap - left) / 2;
}

}  // namespace megarl
