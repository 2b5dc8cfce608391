"""The specification of ``pack_rows`` (``pack.py``), in plain Python; csrc/host/pack_*.cpp are the
same, step by step.

A sample is named by its place in the order by size, longest first. A row is a list of places in
falling order, so that it can be searched by size, and begins with the place behind the last sample,
which stands for nothing, of size 0: exchanging a sample for nothing is moving it.
"""

from bisect import bisect_left, insort
from heapq import heapreplace
from typing import NamedTuple

MOST_LENGTHS = 256  # from which bucket lengths are chosen
MOST_ROUNDS = 256  # of evening one microbatch
MOST_TRANSFERS = 100_000  # tried between ranks, as attempts at two of them times microbatches

Place = tuple[int, int]  # (microbatch, rank)


class Problem(NamedTuple):
    """The arguments of ``pack_rows``."""

    sizes: list[int]
    row_tokens: int
    dp: int
    rows_multiple: int
    row_multiple: int
    linear: int
    quadratic: int
    buckets: int


def pack(problem: Problem) -> tuple[list[list[list[int]]], list[int]]:
    """(rows[rank][microbatch] of sample indices, lengths)."""
    order = sorted(range(len(problem.sizes)), key=lambda i: (-problem.sizes[i], i))
    sizes = [problem.sizes[i] for i in order]
    full = fill_best(sizes, problem.row_tokens, len(sizes))
    assert full is not None, "a sample is no longer than a row"
    step = problem.dp * problem.rows_multiple
    count = max(1, -(-len(full) // step)) * step
    fillings = [*even_fillings(problem, sizes, count), full]
    plans = [Plan(problem, sizes, rows, count) for rows in fillings]
    for plan in plans:
        plan.even_microbatches()
        plan.deal()
        plan.even_ranks(keep_slowest=True)
        plan.even_ranks(keep_slowest=False)
        plan.set_lengths()
    best = min(plans, key=Plan.wanted)  # the first of equals
    rows = [
        [sorted(order[p] for p in best.rows[m][r][1:]) for m in range(best.num)]
        for r in range(problem.dp)
    ]
    return rows, best.lengths


# --- filling --------------------------------------------------------------------------------------


def even_fillings(problem: Problem, sizes: list[int], count: int) -> list[list[list[int]]]:
    """``count`` rows as even as they get: by emptiest row, and by best fit where that is better."""
    row_tokens, unit = problem.row_tokens, problem.row_multiple
    found = []
    high = row_tokens
    emptiest = fill_emptiest(sizes, row_tokens, count)
    if emptiest is not None:
        found.append(emptiest)
        high = max(sum(sizes[p] for p in row) for row in emptiest)
    # The least capacity, in units, that best fit manages with: high always works.
    low = -(-max(-(-sum(sizes) // count), sizes[0] if sizes else 0) // unit)
    high = -(-high // unit)
    tight = None
    while low < high:
        middle = (low + high) // 2
        rows = fill_best(sizes, min(middle * unit, row_tokens), count)
        if rows is None:
            low = middle + 1
        else:
            tight, high = rows, middle
    return found if tight is None else [*found, tight]


def fill_emptiest(sizes: list[int], capacity: int, count: int) -> list[list[int]] | None:
    """Each sample into the emptiest row, the first of equals; None if one does not fit."""
    rows: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, k) for k in range(count)]
    for p, size in enumerate(sizes):
        load, k = heap[0]
        if load + size > capacity:
            return None
        rows[k].append(p)
        heapreplace(heap, (load + size, k))
    return rows


def fill_best(sizes: list[int], capacity: int, count: int) -> list[list[int]] | None:
    """Each sample into the fullest row that can take it, the first of equals, or else into a new
    one; None if there are more than ``count``.
    """
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for p, size in enumerate(sizes):
        at = bisect_left(space, (size, -1))
        if at < len(space):
            left, k = space.pop(at)
        else:
            left, k = capacity, len(rows)
            if k == count or size > capacity:
                return None
            rows.append([])
        rows[k].append(p)
        insort(space, (left - size, k))
    return rows


# --- balancing ------------------------------------------------------------------------------------


class Plan:
    """``rows[m][r]`` with their ``loads`` (tokens) and ``squares``; ``lengths[m]``."""

    def __init__(
        self, problem: Problem, sizes: list[int], rows: list[list[int]], count: int
    ) -> None:
        dp = problem.dp
        self.problem, self.num = problem, count // dp
        self.sizes = [*sizes, 0]
        self.costs = [problem.linear * n + problem.quadratic * n * n for n in self.sizes]
        rows = [*rows, *([] for _ in range(count - len(rows)))]
        totals = [sum(self.costs[p] for p in row) for row in rows]
        by_cost = sorted(range(count), key=lambda k: (-totals[k], k))
        chosen = [[len(sizes), *reversed(rows[k])] for k in by_cost]
        self.rows = [chosen[m * dp : (m + 1) * dp] for m in range(self.num)]
        self.loads = [[sum(self.sizes[p] for p in row) for row in group] for group in self.rows]
        self.row_costs = [[sum(self.costs[p] for p in row) for row in group] for group in self.rows]
        self.set_lengths()

    def set_lengths(self) -> None:
        unit = self.problem.row_multiple
        needed = [-(-max(1, *loads) // unit) * unit for loads in self.loads]
        self.lengths = bucket_lengths(needed, self.problem.buckets, unit)

    def wanted(self) -> int:
        total = 0
        for m, length in enumerate(self.lengths):
            attention = max(
                cost - self.problem.linear * load
                for cost, load in zip(self.row_costs[m], self.loads[m], strict=True)
            )
            total += self.problem.linear * length + attention
        return total

    def space(self, m: int, r: int) -> int:
        return min(self.lengths[m], self.problem.row_tokens) - self.loads[m][r]

    def even_microbatches(self) -> None:
        """Between the costliest and the cheapest row of every microbatch."""
        for m in range(self.num):
            costs = self.row_costs[m]
            for _ in range(min(4 * self.problem.dp, MOST_ROUNDS)):
                high, low = costs.index(max(costs)), costs.index(min(costs))
                gap = costs[high] - costs[low]
                if not self.transfer((m, high), (m, low), gap, gap):
                    break

    def deal(self) -> None:
        """The costliest row of a microbatch to the rank that has least, most uneven ones first."""
        totals = [0] * self.problem.dp
        spread = [max(costs) - min(costs) for costs in self.row_costs]
        for m in sorted(range(self.num), key=lambda m: (-spread[m], m)):
            costs = self.row_costs[m]
            here = sorted(range(self.problem.dp), key=lambda r: (-costs[r], r))
            ranks = sorted(range(self.problem.dp), key=lambda r: (totals[r], r))
            source = [0] * self.problem.dp
            for r, k in zip(ranks, here, strict=True):
                source[r] = k
                totals[r] += costs[k]
            self.rows[m] = [self.rows[m][k] for k in source]
            self.loads[m] = [self.loads[m][k] for k in source]
            self.row_costs[m] = [costs[k] for k in source]

    def even_ranks(self, keep_slowest: bool) -> None:
        """Between the costliest rank and the cheapest that can take something off it.
        ``keep_slowest``: nothing that makes a microbatch's costliest row costlier.
        """
        dp = self.problem.dp
        totals = [sum(costs[r] for costs in self.row_costs) for r in range(dp)]
        attempts, moved = min(16 * dp, -(-MOST_TRANSFERS // self.num)), 1
        while moved and attempts:
            high = totals.index(max(totals))
            for low in sorted(range(dp), key=lambda r: (totals[r], r))[:attempts]:
                attempts -= 1
                moved = self.between_ranks(high, low, totals[high] - totals[low], keep_slowest)
                if moved:
                    totals[high] -= moved
                    totals[low] += moved
                    break

    def between_ranks(self, high: int, low: int, gap: int, keep_slowest: bool) -> int:
        """The cost that goes from rank ``high`` to ``low``: of samples inside each microbatch, then
        of whole rows, then of samples into the row of ``low`` with the most space.
        """
        left = gap
        for m in range(self.num):
            costs = self.row_costs[m]
            most = max(costs) - costs[low] if keep_slowest else left
            left -= 2 * self.transfer((m, high), (m, low), left, most)
        for m in range(self.num):
            moved = self.row_costs[m][high] - self.row_costs[m][low]
            if 0 < moved < left:
                self.swap_rows(m, high, low)
                left -= 2 * moved
        if not keep_slowest and left > 0:
            spaces = [self.space(m, low) for m in range(self.num)]
            roomy = spaces.index(max(spaces))
            for m in range(self.num):
                left -= 2 * self.transfer((m, high), (roomy, low), left, left)
        return (gap - left) // 2

    def transfer(self, high: Place, low: Place, gap: int, most: int) -> int:
        """The cost, at most ``most``, that goes from row ``high`` to row ``low`` to bring ``gap``
        near 0: of samples that fit into half of it, then of one for another or for nothing.
        """
        moved, nothing = 0, len(self.sizes) - 1
        for p in reversed(self.rows[high[0]][high[1]][1:]):
            cost = self.costs[p]
            fits = self.sizes[p] <= self.space(*low) and moved + cost <= most
            if fits and 2 * (moved + cost) <= gap:
                self.apply(high, low, (p, nothing))
                moved += cost
        if 2 * moved < gap:
            found = self.exchange(high, low, gap - 2 * moved, most - moved)
            if found is not None:
                self.apply(high, low, found[1:])
                moved += found[0]
        return moved

    def exchange(self, high: Place, low: Place, gap: int, most: int) -> tuple[int, int, int] | None:
        """(cost moved, sample of row ``high``, sample of row ``low``) that comes nearest to moving
        half of ``gap``, moves at most ``most`` and fits; None where nothing leaves a smaller gap.
        """
        sizes, costs, others = self.sizes, self.costs, self.rows[low[0]][low[1]]
        space = self.space(*low)
        best, best_miss, last = None, gap, 0
        for a in self.rows[high[0]][high[1]][1:]:
            if sizes[a] == last:
                continue
            last, cost = sizes[a], costs[a]
            first = bisect_left(
                others,
                True,
                key=lambda b: last - sizes[b] <= space and cost - costs[b] <= most,
            )
            ideal = bisect_left(
                others,
                True,
                key=lambda b: 2 * (cost - costs[b]) <= gap,
            )
            for at in (max(first, ideal), ideal - 1):
                if first <= at < len(others):
                    moved = cost - costs[others[at]]
                    if moved > 0 and abs(2 * moved - gap) < best_miss:
                        best, best_miss = (moved, a, others[at]), abs(2 * moved - gap)
        return best

    def apply(self, high: Place, low: Place, pair: tuple[int, int]) -> None:
        """Exchange two samples of two rows."""
        nothing = len(self.sizes) - 1
        for p, (m, r), (n, s) in ((pair[0], high, low), (pair[1], low, high)):
            if p == nothing:
                continue
            self.rows[m][r].remove(p)
            insort(self.rows[n][s], p, key=lambda q: -q)
            for table, amount in ((self.loads, self.sizes[p]), (self.row_costs, self.costs[p])):
                table[m][r] -= amount
                table[n][s] += amount

    def swap_rows(self, m: int, one: int, two: int) -> None:
        rows, loads, costs = self.rows[m], self.loads[m], self.row_costs[m]
        rows[one], rows[two] = rows[two], rows[one]
        loads[one], loads[two] = loads[two], loads[one]
        costs[one], costs[two] = costs[two], costs[one]


def bucket_lengths(needed: list[int], buckets: int, unit: int) -> list[int]:
    """``needed`` raised to at most ``buckets`` different lengths, with the least sum."""
    longest = max(needed)
    rounded = needed
    while len(set(rounded)) > MOST_LENGTHS:
        unit *= 2
        rounded = [min(-(-n // unit) * unit, longest) for n in needed]
    lengths = sorted(set(rounded))
    upto = [0, *(sum(n <= length for n in rounded) for length in lengths)]
    # least[j]: the sum over the j shortest lengths with at most b buckets; cuts[b][j]: where the
    # last of b begins, 0 where fewer do as well
    count = len(lengths)
    least = [0, *(lengths[j - 1] * upto[j] for j in range(1, count + 1))]
    cuts = [[0] * (count + 1)]
    for _ in range(1, min(buckets, count)):
        before, cut = least, [0] * (count + 1)
        least = list(before)
        for j in range(1, count + 1):
            for i in range(1, j):
                total = before[i] + lengths[j - 1] * (upto[j] - upto[i])
                if total < least[j]:
                    least[j], cut[j] = total, i
        cuts.append(cut)
    chosen, end = [], count
    for cut in reversed(cuts):
        if cut[end] or cut is cuts[0]:
            chosen.append(lengths[end - 1])
            end = cut[end]
    chosen.reverse()
    return [chosen[bisect_left(chosen, n)] for n in needed]
