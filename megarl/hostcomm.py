"""Small host messages between trainer ranks, over a gloo group: JSON and bytes, never pickles.

Every function is collective over ``group`` and reached by all its ranks on every path; ``agree`` is
how a failure on one rank becomes the same error on all of them instead of a hang.
"""

import json
from typing import Any

import torch
import torch.distributed as dist

from megarl.errors import RunError


def broadcast_bytes(payload: bytes | None, src: int, group: dist.ProcessGroup) -> bytes:
    """``payload`` of global rank ``src`` on every rank; the others pass None."""
    mine = dist.get_rank() == src
    size = torch.tensor([len(payload) if mine and payload is not None else 0])
    dist.broadcast(size, src=src, group=group)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if mine and payload:
        buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if int(size):
        dist.broadcast(buffer, src=src, group=group)
    return buffer.numpy().tobytes()


def broadcast_json(value: Any, src: int, group: dist.ProcessGroup) -> Any:
    """A JSON value of global rank ``src`` on every rank."""
    payload = json.dumps(value).encode() if dist.get_rank() == src else None
    return json.loads(broadcast_bytes(payload, src, group))


def gather_json(value: Any, group: dist.ProcessGroup, dst: int = 0) -> list[Any] | None:
    """Every rank's JSON value, in rank order, on global rank ``dst``; None elsewhere."""
    parts = gather_bytes(json.dumps(value).encode(), group, dst)
    return None if parts is None else [json.loads(part) for part in parts]


def gather_bytes(data: bytes, group: dist.ProcessGroup, dst: int = 0) -> list[bytes] | None:
    """Every rank's bytes, in rank order, on global rank ``dst``; None elsewhere."""
    payload = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    world = group.size()
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(payload)]), group=group)
    width = int(torch.stack(sizes).max())
    padded = torch.zeros(width, dtype=torch.uint8)
    padded[: len(payload)] = payload
    here = dist.get_rank() == dst
    parts = [torch.zeros(width, dtype=torch.uint8) for _ in range(world)] if here else None
    dist.gather(padded, parts, dst=dst, group=group)
    if parts is None:
        return None
    return [p[: int(n)].numpy().tobytes() for p, n in zip(parts, sizes, strict=True)]


def any_rank(flag: bool, group: dist.ProcessGroup) -> bool:
    """Whether the flag is set on any rank: the same answer, at the same step, everywhere."""
    value = torch.tensor([int(flag)])
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return bool(value)


def agree(error: BaseException | None, group: dist.ProcessGroup, what: str) -> None:
    """Raise on every rank if any rank failed at ``what``: its own error there, a RunError naming it
    elsewhere.
    """
    failed = gather_and_share(None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    for rank, text in enumerate(failed):
        if text is not None:
            raise RunError(f"{what} failed on rank {rank}: {text}")


def gather_and_share(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's JSON value on every rank."""
    shared: list[Any] = broadcast_json(gather_json(value, group), 0, group)
    return shared
