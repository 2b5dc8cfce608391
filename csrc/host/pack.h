// Sequences -> rows.  megarl/ops/pack.py says what is computed, megarl/ops/_pack_ref.py is the
// specification; the files here are the same step by step and under the same names, in integers, with
// the same choice among equals: both give one plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace megarl {

using Numbers = std::vector<int64_t>;
using Row = std::vector<size_t>;  // samples, by their place in the order by size
using Rows = std::vector<Row>;

struct Problem {
  Numbers sizes;
  int64_t row_tokens, dp, rows_multiple, row_multiple, linear, quadratic, buckets;
};

struct RowPlan {
  std::vector<std::vector<Row>> rows;  // [rank][microbatch] of sample indices, ascending
  Numbers lengths;                     // [microbatch]
};

// Throws std::invalid_argument where `problem` is not one; megarl/ops/pack.py says more.
RowPlan pack(const Problem& problem);

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// --- pack_fill.cpp: `sizes` fall -----------------------------------------------------------------------

std::vector<Rows> even_fillings(const Problem& problem, const Numbers& sizes, int64_t count);
std::optional<Rows> fill_best(const Numbers& sizes, int64_t capacity, size_t count);
Numbers bucket_lengths(const Numbers& needed, int64_t buckets, int64_t unit);

// --- pack_plan.cpp -------------------------------------------------------------------------------------

struct Place {
  size_t m, r;  // microbatch, rank
};

struct Exchange {
  int64_t moved;  // cost
  size_t from_high, from_low;
};

class Plan {
 public:
  Plan(const Problem& problem, const Numbers& sizes, Rows filled, size_t count);

  void even_microbatches();
  void deal();
  void even_ranks(bool keep_slowest);
  void set_lengths();
  int64_t wanted() const;

  std::vector<Rows> rows;  // [m][r]: falling places, behind `nothing_`
  Numbers lengths;

 private:
  int64_t between_ranks(size_t high, size_t low, int64_t gap, bool keep_slowest);
  int64_t transfer(Place high, Place low, int64_t gap, int64_t most);
  std::optional<Exchange> exchange(Place high, Place low, int64_t gap, int64_t most) const;
  void apply(Place high, Place low, size_t from_high, size_t from_low);
  void move(size_t sample, Place from, Place to);
  void swap_rows(size_t m, size_t one, size_t two);
  int64_t space(Place at) const;

  const Problem& problem_;
  size_t num_, dp_, nothing_;
  Numbers sizes_, costs_;  // the last one is of `nothing_`: 0
  std::vector<Numbers> loads_, row_costs_;  // [m][r]
};

}  // namespace megarl
