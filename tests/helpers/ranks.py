"""Ranks that only exchange values, as threads of this process: no process group, no devices."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

T = TypeVar("T")
Gather = Callable[[Any], list[Any]]  # every rank's JSON value, in rank order


def on_ranks(work: Sequence[Callable[[Gather], T]]) -> list[T]:
    """What every rank returns. A rank that fails, or exchanges less than the others, fails all."""
    barrier = Barrier(len(work), timeout=20)
    said: list[Any] = [None] * len(work)

    def gather_of(rank: int) -> Gather:
        def gather(value: Any) -> list[Any]:
            said[rank] = json.dumps(value)
            barrier.wait()  # all have said
            everything = [json.loads(text) for text in said]
            barrier.wait()  # all have read
            return everything

        return gather

    def run(rank: int) -> T:
        try:
            return work[rank](gather_of(rank))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(run, range(len(work))))
