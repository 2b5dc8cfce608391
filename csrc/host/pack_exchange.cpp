// Samples that change places between two rows, and the whole of `pack_rows`.
#include "pack.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <stdexcept>

namespace megarl {

int64_t Plan::transfer(Place high, Place low, int64_t gap, int64_t most) {
  int64_t moved = 0;
  const Row& row = rows[high.m][high.r];
  for (size_t at = row.size(); at-- > 1;) {  // a move takes out what was already passed
    const int64_t cost = costs_[row[at]];
    const bool fits = sizes_[row[at]] <= space(low) && moved + cost <= most;
    if (!fits || 2 * (moved + cost) > gap) continue;
    move(row[at], high, low);
    moved += cost;
  }
  if (2 * moved < gap) {
    if (const auto found = exchange(high, low, gap - 2 * moved, most - moved)) {
      apply(high, low, found->from_high, found->from_low);
      moved += found->moved;
    }
  }
  return moved;
}

std::optional<Exchange> Plan::exchange(Place high, Place low, int64_t gap, int64_t most) const {
  const Row& others = rows[low.m][low.r];
  const Row& row = rows[high.m][high.r];
  const int64_t room = space(low);
  std::optional<Exchange> best;
  int64_t best_miss = gap, last = 0;
  for (size_t i = 1; i < row.size(); ++i) {
    const size_t a = row[i];
    if (sizes_[a] == last) continue;
    last = sizes_[a];
    const int64_t cost = costs_[a];
    // Both conditions hold from some sample on, since `others` rise in size.
    const auto first = std::partition_point(others.begin(), others.end(), [&](size_t b) {
      return last - sizes_[b] > room || cost - costs_[b] > most;
    });
    const auto ideal = std::partition_point(others.begin(), others.end(), [&](size_t b) {
      return 2 * (cost - costs_[b]) > gap;
    });
    const auto consider = [&](Row::const_iterator at) {
      const int64_t moved = cost - costs_[*at], miss = std::abs(2 * moved - gap);
      if (moved <= 0 || miss >= best_miss) return;
      best = Exchange{moved, a, *at};
      best_miss = miss;
    };
    const auto from = std::max(first, ideal);
    if (from != others.end()) consider(from);
    if (ideal > first) consider(ideal - 1);
  }
  return best;
}

void Plan::apply(Place high, Place low, size_t from_high, size_t from_low) {
  move(from_high, high, low);
  if (from_low != nothing_) move(from_low, low, high);
}

void Plan::move(size_t sample, Place from, Place to) {
  Row& source = rows[from.m][from.r];
  Row& target = rows[to.m][to.r];
  source.erase(std::lower_bound(source.begin(), source.end(), sample, std::greater<size_t>()));
  target.insert(std::lower_bound(target.begin(), target.end(), sample, std::greater<size_t>()),
                sample);
  loads_[from.m][from.r] -= sizes_[sample];
  loads_[to.m][to.r] += sizes_[sample];
  row_costs_[from.m][from.r] -= costs_[sample];
  row_costs_[to.m][to.r] += costs_[sample];
}

void Plan::swap_rows(size_t m, size_t one, size_t two) {
  std::swap(rows[m][one], rows[m][two]);
  std::swap(loads_[m][one], loads_[m][two]);
  std::swap(row_costs_[m][one], row_costs_[m][two]);
}

RowPlan pack(const Problem& problem) {
  for (const int64_t n : {problem.row_tokens, problem.dp, problem.rows_multiple,
                          problem.row_multiple, problem.buckets}) {
    if (n < 1) throw std::invalid_argument("pack_rows: a number below 1");
  }
  const Numbers& given = problem.sizes;
  for (const int64_t n : given) {
    if (n < 1 || n > problem.row_tokens) {
      throw std::invalid_argument("pack_rows: a size is not between 1 and row_tokens");
    }
  }
  std::vector<size_t> order(given.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return given[a] > given[b]; });
  Numbers sizes;
  for (const size_t i : order) sizes.push_back(given[i]);

  Rows full = *fill_best(sizes, problem.row_tokens, sizes.size());
  const int64_t step = problem.dp * problem.rows_multiple;
  const int64_t count = std::max<int64_t>(1, ceil_div(full.size(), step)) * step;
  std::vector<Rows> fillings = even_fillings(problem, sizes, count);
  fillings.push_back(std::move(full));
  std::optional<Plan> best;
  int64_t least = 0;
  for (Rows& filled : fillings) {
    Plan plan(problem, sizes, std::move(filled), count);
    plan.even_microbatches();
    plan.deal();
    plan.even_ranks(/*keep_slowest=*/true);
    plan.even_ranks(/*keep_slowest=*/false);
    plan.set_lengths();
    const int64_t wanted = plan.wanted();
    if (best && wanted >= least) continue;  // the first of equals
    least = wanted;
    best.emplace(std::move(plan));
  }

  RowPlan out;
  out.lengths = best->lengths;
  out.rows.assign(problem.dp, std::vector<Row>(best->rows.size()));
  for (size_t m = 0; m < best->rows.size(); ++m) {
    for (int64_t r = 0; r < problem.dp; ++r) {
      const Row& row = best->rows[m][r];
      Row& samples = out.rows[r][m];
      for (size_t i = 1; i < row.size(); ++i) samples.push_back(order[row[i]]);
      std::sort(samples.begin(), samples.end());
    }
  }
  return out;
}

}  // namespace megarl
