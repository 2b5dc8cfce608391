"""What workers do in tests of host messages. Every function is called on all ranks."""

import time
from typing import Any

import torch.distributed as dist

from megarl.errors import DataError, MegarlError
from megarl.hostcomm import (
    agree,
    any_rank,
    broadcast_bytes,
    broadcast_json,
    gather_and_share,
    gather_bytes,
    gather_json,
)


def broadcasts(rank: int, payloads: list[bytes]) -> list[list[bytes]]:
    """Every payload from every source."""
    group = dist.group.WORLD
    return [
        [broadcast_bytes(p if rank == src else None, src, group) for p in payloads]
        for src in range(dist.get_world_size())
    ]


def broadcast_values(rank: int, values: list[Any]) -> list[Any]:
    return [broadcast_json(v if rank == 1 else "not mine", 1, dist.group.WORLD) for v in values]


def gathers(rank: int, payloads: list[list[bytes]]) -> list[Any]:
    """``payloads[k][rank]``; every destination."""
    return [
        [gather_bytes(p[rank], dist.group.WORLD, dst) for p in payloads]
        for dst in range(dist.get_world_size())
    ]


def gathers_of_groups(rank: int, payloads: list[bytes]) -> tuple[list[Any], dict[int, Any]]:
    """By destination: among all ranks, and among all but rank 0."""
    world = dist.get_world_size()
    everyone = [gather_bytes(payloads[rank], dist.group.WORLD, dst) for dst in range(world)]
    group = dist.new_group(list(range(1, world)), backend="gloo")
    others = {}
    if rank:
        others = {dst: gather_bytes(payloads[rank], group, dst) for dst in range(1, world)}
    return everyone, others


def shared_values(rank: int, values: list[Any]) -> list[Any]:
    return gather_and_share(values[rank], dist.group.WORLD)


def gathered_values(rank: int, values: list[Any]) -> Any:
    at_one = gather_json(values[rank], dist.group.WORLD, dst=1)
    return at_one, gather_and_share(values[rank], dist.group.WORLD)


def flags(rank: int, cases: list[list[bool]]) -> list[bool]:
    return [any_rank(case[rank], dist.group.WORLD) for case in cases]


def agreements(rank: int, failing: list[list[int]]) -> list[Any]:
    """For every list of failing ranks: (error type, text) as this rank saw it, None for none."""
    seen: list[Any] = []
    for case in failing:
        error = DataError(f"disk {rank} is full") if rank in case else None
        try:
            agree(error, dist.group.WORLD, "saving")
            seen.append(None)
        except MegarlError as e:
            seen.append((type(e).__name__, str(e)))
    return seen


def agreement_after_a_wait(rank: int, seconds: float) -> tuple[str, float]:
    """Rank 1 fails late: the other waits for its word, and has it then."""
    start = time.monotonic()
    if rank == 1:
        time.sleep(seconds)
    try:
        agree(DataError("late") if rank == 1 else None, dist.group.WORLD, "working")
    except MegarlError as e:
        return str(e), time.monotonic() - start
    return "", 0.0
