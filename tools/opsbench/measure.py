"""Times alternatives side by side: in turn, several rounds, the best of each.

These machines are shared. A time by itself says little, a ratio of two times taken in one round
says more, and the best of several rounds is what the code costs when nothing else runs.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """A line of the table. ``vs_*``: how many times faster than that alternative.
    ``copy_bandwidth_fraction``: bytes the op must touch over its time, as a share of what a copy
    moves; None where it does not apply.
    """

    op: str
    case: str
    tokens: int
    threads: int
    vs_padded: float | None = None
    vs_loop: float | None = None
    vs_reference: float | None = None
    copy_bandwidth_fraction: float | None = None
    seconds: float | None = None
    note: str = ""


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def best_times(calls: Mapping[str, Call], rounds: int, budget_s: float = 6.0) -> dict[str, float]:
    """Seconds of each, the best of up to ``rounds``, all of them once in every round. One that
    takes long is not repeated beyond ``budget_s``.
    """
    best = {name: math.inf for name in calls}
    spent = {name: 0.0 for name in calls}
    gc.collect()
    for k in range(rounds):
        for name, call in calls.items():
            if k and spent[name] > budget_s:
                continue
            start = time.perf_counter()
            call()
            took = time.perf_counter() - start
            best[name] = min(best[name], took)
            spent[name] += took
    return best


def copy_call(num_bytes: int) -> Call:
    """A copy that reads and writes ``num_bytes`` in all, well outside the caches."""
    half = max(num_bytes // 2, 1)
    source, target = torch.ones(half, dtype=torch.uint8), torch.empty(half, dtype=torch.uint8)
    return lambda: target.copy_(source)


def read_call(num_bytes: int) -> Call:
    """Reads ``num_bytes`` and writes nothing."""
    source = torch.ones(max(num_bytes // 8, 1), dtype=torch.int64)
    return source.sum


def ragged_lengths(
    num_tokens: int, *, seed: int = 0, low: int = 64, high: int = 16_384, sigma: float = 1.0
) -> list[int]:
    """Response lengths that sum to ``num_tokens``: log-normal between ``low`` and ``high``. Padded
    to the longest they fill about a quarter of the rectangle.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    left = num_tokens
    while left > 0:
        draw = float(torch.randn((), generator=generator)) * sigma + math.log(high / 6)
        lengths.append(min(max(int(math.exp(draw)), low), high, left))
        left -= lengths[-1]
    return lengths
