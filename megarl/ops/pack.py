"""Sequences -> rows, on the host: which sample lies in which row of which data-parallel rank.

N samples, R ranks (``dp``) of M rows each ("microbatches"); sizes and lengths in tokens.

    cost(sample) = linear * n + quadratic * n^2      n: its size; an estimate of its FLOPs
    wanted       = the least sum over m of  linear * length[m] + quadratic * squares[m]

``length[m]`` is the length of microbatch m on every rank and ``squares[m]`` the greatest sum of
squared sizes among its R rows: what the slowest rank computes, padding included.

1. M is what best-fit-decreasing needs for rows of at most ``row_tokens``, rounded up to
   ``rows_multiple``. Every rank gets M rows; some may be empty.
2. Three fillings are compared by what is wanted: each sample into the emptiest row; best fit into
   rows of the least capacity that does; best fit into rows as full as possible.
3. Rows of like cost become one microbatch: sorted by cost, R at a time. ``length[m]`` is the
   longest's, padded to ``row_multiple`` and raised to one of at most ``buckets`` lengths.
4. Where it helps, samples change places: between the costliest and the cheapest row of a
   microbatch, then between the costliest and the cheapest rank. No microbatch gets longer by it,
   and none of the second kind makes the costliest row of a microbatch costlier.

5. Of at most ``MOST_COMPARED`` samples, the plan is compared with what Karmarkar-Karp and first fit
   make of them (``_pack_usual.py``); the best of the three is taken.

Integers only, ties decided by an index: kernel (csrc/host/pack_*.cpp) and reference give one plan,
on every machine. Samples count by size, equal ones by index.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megarl.ops._native import host_function
from megarl.ops._pack_ref import Problem, pack
from megarl.ops._pack_usual import usual_plans, wanted

MOST_COMPARED = 512  # tens of milliseconds; of more samples every way makes rows that are full


class RowPlan(NamedTuple):
    """``rows[dp rank][microbatch]``: sample indices, ascending; ``lengths[microbatch]``: tokens of
    that row on every rank.
    """

    rows: list[list[list[int]]]
    lengths: list[int]


def pack_rows(
    sizes: Sequence[int],
    *,
    row_tokens: int,
    dp: int,
    rows_multiple: int = 1,
    row_multiple: int = 1,
    linear: int = 1,
    quadratic: int = 0,
    buckets: int = 1,
) -> RowPlan:
    """Place samples of ``sizes`` tokens, each from 1 to ``row_tokens``.

    ``linear``, ``quadratic``: FLOPs of a token and of a pair of tokens, in any unit. ValueError for
    numbers out of range, and for costs whose sum would not fit 63 bits.
    """
    problem = _checked(
        sizes, row_tokens, dp, rows_multiple, row_multiple, linear, quadratic, buckets
    )
    run = host_function("pack_rows", "pack_rows")
    return _best(problem, RowPlan(*(pack(problem) if run is None else run(*problem))))


def pack_rows_ref(
    sizes: Sequence[int],
    *,
    row_tokens: int,
    dp: int,
    rows_multiple: int = 1,
    row_multiple: int = 1,
    linear: int = 1,
    quadratic: int = 0,
    buckets: int = 1,
) -> RowPlan:
    """The specification of ``pack_rows``, in plain Python (``_pack_ref.py``)."""
    problem = _checked(
        sizes, row_tokens, dp, rows_multiple, row_multiple, linear, quadratic, buckets
    )
    return _best(problem, RowPlan(*pack(problem)))


def _best(problem: Problem, found: RowPlan) -> RowPlan:
    """``found``, unless samples are few and one of two usual ways has less of what is wanted."""
    if len(problem.sizes) > MOST_COMPARED:
        return found
    plans = [found, *(RowPlan(*plan) for plan in usual_plans(problem))]
    return min(plans, key=lambda plan: wanted(problem, *plan))  # the first of equals


def _checked(sizes: Sequence[int], *numbers: int) -> Problem:
    problem = Problem(list(sizes), *numbers)
    for name in ("row_tokens", "dp", "rows_multiple", "row_multiple", "buckets"):
        if getattr(problem, name) < 1:
            raise ValueError(f"pack_rows: {name} must be at least 1, got {getattr(problem, name)}")
    linear, quadratic = problem.linear, problem.quadratic
    if min(linear, quadratic) < 0 or linear + quadratic == 0:
        raise ValueError(
            "pack_rows: linear and quadratic must be 0 or more and not both 0, "
            f"got {linear} and {quadratic}"
        )
    for i, size in enumerate(sizes):
        if not 1 <= size <= problem.row_tokens:
            raise ValueError(f"pack_rows: size {i} must be 1 to {problem.row_tokens}, got {size}")
    longest = problem.row_tokens + problem.row_multiple
    rows = len(sizes) + problem.dp * problem.rows_multiple
    # Twice a sum over all rows is compared, of lengths that may have been raised.
    if 4 * rows * (linear * longest + quadratic * longest**2) >= 2**63:
        raise ValueError(
            f"pack_rows: linear={linear} and quadratic={quadratic} are too large for {len(sizes)} "
            f"samples in rows of {problem.row_tokens} tokens: divide both by one number"
        )
    return problem
