"""What workers do in ``tests/data/test_exchange.py``, as ranks of made-up nodes."""

import os
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from megarl.data.exchange import Collected, Exchange, everywhere, share_facts
from megarl.data.nodes import Nodes, find_nodes
from megarl.errors import MegarlError
from megarl.mesh import Mesh
from megarl.types import Sample


def facts(
    rank: int, collected: dict[int, list[Sample]], orders: list[list[int]]
) -> list[list[tuple[Any, int, bool]]]:
    """(facts, holder, whether the sample is here) of every order of collectors."""
    return [
        [
            (c.facts, c.holder, c.sample is not None)
            for c in share_facts(collected.get(rank, []), order, rank, dist.group.WORLD)
        ]
        for order in orders
    ]


def deliveries(rank: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every case of ``nodes`` (ranks of each), ``mesh``, ``layers``, ``samples``, ``holders``
    (an index of ``nodes`` for every sample, or None) and ``dp_ranks``.
    """
    found = []
    for case in cases:
        nodes = _nodes(rank, case["nodes"])
        collected = _collected(case["samples"], case["holders"], nodes)
        exchange = Exchange(Mesh(**case["mesh"]), nodes, case["layers"])
        before = len(os.listdir("/proc/self/fd"))
        delivery = exchange.deliver(collected, case["dp_ranks"])
        assert len(os.listdir("/proc/self/fd")) <= before, "memory of the node is still open"
        found.append({**vars(delivery), "payloads": delivery.payloads})
    return found


def late_leader(rank: int, nodes: list[int], samples: Sequence[Sample]) -> str:
    """Rank 0 expects a sample of the other node's leader, which sends nothing for a while."""
    found = _nodes(rank, nodes)
    error = ""
    if rank == 0:
        try:
            replace(found, timeout_s=0.3).exchange({}, {found.leaders[1]: 10})
        except MegarlError as e:
            error = f"{type(e).__name__}: {e}"
    return error


def late_rank(rank: int) -> str:
    """Rank 1 comes to ``share`` when rank 0 has given up."""
    nodes = replace(_nodes(rank, [dist.get_world_size()]), timeout_s=0.5)
    if rank == 1:
        time.sleep(1.0)
    try:
        nodes.share(lambda: [b""], bytes)
    except MegarlError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def failure(rank: int, where: str) -> str:
    """An error at one place of ``share``, as every rank sees it."""
    nodes = _nodes(rank, [dist.get_world_size()])

    def prepare() -> Iterator[bytes]:
        yield b"ab"
        if where == "prepare":
            raise MemoryError("no room")
        yield b""
        yield b"c"

    def read(memory: memoryview) -> bytes:
        if where == "read":
            raise ValueError("odd bytes")
        return bytes(memory)

    try:
        return repr(nodes.share(prepare, read))
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def memory_of_sharing(rank: int, parts: int, size: int) -> int:
    """Most bytes of this process's own memory during ``share``; what is shared is no part of it."""
    nodes = _nodes(rank, [dist.get_world_size()])
    tracemalloc.start()
    try:
        length = nodes.share(lambda: (bytes([k]) * size for k in range(parts)), len)
        assert length == (None if rank == 0 else parts * size)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def copied_here(rank: int, cases: list[dict[str, Any]]) -> list[bool]:
    """Whether this rank's routing of samples that it collected is memory of its own."""
    found = []
    for case in cases:
        nodes = _nodes(rank, [1, 1])
        collected = _collected(case["samples"], [0] * len(case["samples"]), nodes)
        exchange = Exchange(Mesh(pp=2), nodes, case["layers"])
        payloads = exchange.deliver(collected, [0] * len(case["samples"])).payloads
        pairs = zip(payloads.values(), case["samples"], strict=True)
        found += [not np.shares_memory(p.routing, s.routing) for p, s in pairs]
    return found


def _nodes(rank: int, sizes: Sequence[int]) -> Nodes:
    local = [k for size in sizes for k in range(size)]
    assert dist.group.WORLD is not None
    return find_nodes(local[rank], dist.group.WORLD, timeout_s=20)


def _collected(
    samples: Sequence[Sample], holders: Sequence[int] | None, nodes: Nodes
) -> list[Collected]:
    if holders is None:
        return everywhere(samples)
    ranks = [nodes.leaders[node] for node in holders]
    return [
        Collected(s.facts, r, s if r == nodes.rank else None)
        for s, r in zip(samples, ranks, strict=True)
    ]
