"""Small host messages between trainer ranks, over a gloo group: JSON and bytes, never pickles.

Every function is collective over ``group`` and reached by all its ranks on every path; ``agree`` is
how a failure on one rank becomes the same error on all of them instead of a hang.
"""

import json
import resource
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megarl.errors import RunError


def allow_connections() -> None:
    """As many open files as this process may ask for. Every rank of a gloo group keeps a socket
    open to each of the others, of every group: with 1,024 ranks more than the 1,024 files that a
    shell usually allows at first.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
    """Every rank's bytes, in rank order, on global rank ``dst``; None elsewhere.

    Up a binomial tree: in its k-th round a rank takes over what 2^k others have gathered, or hands
    its own over and is done. Of n ranks none waits for more than log2 n messages one after another,
    and nothing is padded.
    """
    size, root = group.size(), dist.get_group_rank(group, dst)
    place = (group.rank() - root) % size  # in the tree
    parts, step = [data], 1  # of the places from here on
    while step < size:
        if place & step:
            _send_parts(parts, (group.rank() - step) % size, group)
            return None
        if place + step < size:
            count = min(step, size - place - step)
            parts += _receive_parts(count, (group.rank() + step) % size, group)
        step *= 2
    return [parts[(rank - root) % size] for rank in range(size)]


def _send_parts(parts: Sequence[bytes], to: int, group: dist.ProcessGroup) -> None:
    sizes = torch.tensor([len(part) for part in parts])
    dist.send(sizes, group=group, group_dst=to)
    if int(sizes.sum()):
        whole = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        dist.send(whole, group=group, group_dst=to)


def _receive_parts(count: int, source: int, group: dist.ProcessGroup) -> list[bytes]:
    sizes = torch.empty(count, dtype=torch.long)
    dist.recv(sizes, group=group, group_src=source)
    whole = torch.empty(int(sizes.sum()), dtype=torch.uint8)
    if len(whole):
        dist.recv(whole, group=group, group_src=source)
    return [part.numpy().tobytes() for part in whole.split(sizes.tolist())]


def any_rank(flag: bool, group: dist.ProcessGroup) -> bool:
    """Whether the flag is set on any rank: the same answer, at the same step, everywhere."""
    return any(gather_and_share(flag, group))


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
    parts = gather_bytes(json.dumps(value).encode(), group)
    together = None if parts is None else b"[%s]" % b",".join(parts)
    shared: list[Any] = json.loads(broadcast_bytes(together, 0, group))
    return shared
