"""Two usual ways to pack, which ``pack_rows`` is compared with where samples are few.

Differencing (Karmarkar-Karp): by cost over the ranks, then by size over the rows of each, with more
rows until all fit. First fit: longest first into the first row with room; rows of an optimizer step
are dealt to microbatches in turn, those of a microbatch to the ranks that have least.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from megarl.ops._pack_ref import Problem, bucket_lengths

Rows = list[list[list[int]]]  # [rank][microbatch] of sample indices


def usual_plans(problem: Problem) -> Iterator[tuple[Rows, list[int]]]:
    """(rows, lengths) as ``pack_rows`` gives them."""
    for rows in (_differencing(problem), _first_fit(problem)):
        missing = -max(1, len(rows[0])) % problem.rows_multiple + (not rows[0])
        rows = [[sorted(row) for row in rank] + [[]] * missing for rank in rows]
        unit = problem.row_multiple
        needed = [
            -(-max(1, *(sum(problem.sizes[i] for i in row) for row in group)) // unit) * unit
            for group in zip(*rows, strict=True)
        ]
        yield rows, bucket_lengths(needed, problem.buckets, unit)


def wanted(problem: Problem, rows: Rows, lengths: Sequence[int]) -> int:
    """What a plan is to have least of (``pack.py``)."""
    total = 0
    for length, group in zip(lengths, zip(*rows, strict=True), strict=True):
        squares = max(sum(problem.sizes[i] ** 2 for i in row) for row in group)
        total += problem.linear * length + problem.quadratic * squares
    return total


def _differencing(problem: Problem) -> Rows:
    sizes, costs = problem.sizes, _costs(problem)
    ranks = _partition(costs, list(range(len(sizes))), problem.dp)
    count = max(-(-sum(sizes[i] for i in rank) // problem.row_tokens) for rank in ranks)
    while True:
        rows = [_partition(sizes, rank, count) for rank in ranks]
        if all(_fits(problem, row) for rank in rows for row in rank):
            break
        count += 1
    return [sorted(rank, key=lambda row: -sum(costs[i] for i in row)) for rank in rows]


def _partition(weights: Sequence[int], members: Sequence[int], parts: int) -> list[list[int]]:
    """The two partial partitions that are most uneven are joined, heaviest part to lightest."""
    empty: list[tuple[int, list[int]]] = [(0, [])] * (parts - 1)
    heap = [(-weights[i], k, [(weights[i], [i]), *empty]) for k, i in enumerate(members)]
    if not heap or not parts:
        return [[] for _ in range(parts)]
    heapify(heap)
    while len(heap) > 1:
        (_, number, one), (_, _, two) = heappop(heap), heappop(heap)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(two), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
    return [part for _, part in heap[0][2]]


def _first_fit(problem: Problem) -> Rows:
    sizes, costs, dp = problem.sizes, _costs(problem), problem.dp
    rows: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        row = next((row for row in rows if _fits(problem, [*row, i])), None)
        if row is None:
            rows.append([i])
        else:
            row.append(i)
    rows += [[] for _ in range(-len(rows) % dp)]
    dealt: Rows = [[] for _ in range(dp)]
    totals = [0] * dp
    for first in range(0, len(rows), dp):
        group = [(sum(costs[i] for i in row), row) for row in rows[first : first + dp]]
        ranks = sorted(range(dp), key=lambda r: totals[r])
        for rank, (cost, row) in zip(ranks, sorted(group, key=lambda x: -x[0]), strict=True):
            dealt[rank].append(row)
            totals[rank] += cost
    return dealt


def _fits(problem: Problem, row: Sequence[int]) -> bool:
    return sum(problem.sizes[i] for i in row) <= problem.row_tokens


def _costs(problem: Problem) -> list[int]:
    return [problem.linear * n + problem.quadratic * n * n for n in problem.sizes]
