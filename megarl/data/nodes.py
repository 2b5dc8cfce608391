"""Bytes between trainer ranks: messages between nodes, memory inside a node.

The first rank of a node leads it. Leaders send each other what their nodes need, point to point
over a gloo group of theirs alone (a rank a node: 128 for 1,024 GPUs of 8 a node), so that bytes
cross the network once a node, whoever uses them there, and pass through no rank that is neither
their source nor their destination's leader. What the other ranks of a node need, its leader writes
into memory that has no name (memfd) and lives as long as somebody has it open: nothing is left
behind by a process that is killed. The others read their parts of it through /proc.

Every wait ends after ``timeout_s``, with an error that names the ranks that did not come, or whose
message did not.
"""

import datetime
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from megarl.data.moves import leaders_of
from megarl.errors import RunError
from megarl.hostcomm import agree, gather_and_share

T = TypeVar("T")


@dataclass(frozen=True)
class Nodes:
    """``of_rank``: the node of every trainer rank, counted from 0; the ranks of a node follow one
    another. ``host``: gloo, all ranks. ``leading``: gloo, the leaders; None on other ranks and
    where there is one node.
    """

    of_rank: tuple[int, ...]
    rank: int
    host: dist.ProcessGroup
    leading: dist.ProcessGroup | None
    timeout_s: float

    @property
    def leaders(self) -> list[int]:
        """The first rank of every node."""
        return leaders_of(self.of_rank)

    @property
    def mine(self) -> list[int]:
        """The ranks of this node, its leader first."""
        return [r for r, node in enumerate(self.of_rank) if node == self.of_rank[self.rank]]

    def exchange(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, int]
    ) -> dict[int, torch.Tensor]:
        """``outgoing``: bytes for other leaders, u8 by rank. ``incoming``: how many are to come
        from which. Returns the latter. For leaders, each of which knows what the others send it.
        Raises RunError after ``timeout_s``.
        """
        found = {source: torch.empty(n, dtype=torch.uint8) for source, n in incoming.items()}
        works = [
            (dist.irecv(into, src=source, group=self.leading), f"{len(into)} bytes from", source)
            for source, into in found.items()
        ]
        works += [
            (dist.isend(data, dst=to, group=self.leading), f"{len(data)} bytes to reach", to)
            for to, data in outgoing.items()
        ]
        for work, what, other in works:
            assert work is not None
            try:
                work.wait(datetime.timedelta(seconds=self.timeout_s))
            except RuntimeError as e:
                raise RunError(
                    f"rank {self.rank} waited up to {self.timeout_s:g} s (run.timeout_s) for "
                    f"{what} rank {other}: {e}"
                ) from e
        return found

    def share(
        self, prepare: Callable[[], Iterable[bytes | memoryview]], read: Callable[[memoryview], T]
    ) -> T | None:
        """``prepare`` on every leader: the bytes for the others of its node, in parts that lie end
        to end there. ``read(those)`` on the others, which copies what it wants; None on leaders.
        Collective over ``host``: what fails anywhere fails everywhere.
        """
        error: Exception | None = None
        place: list[int] = []
        leads = self.mine[0] == self.rank
        if leads:
            try:
                place = [os.getpid(), _in_memory(prepare())]
            except Exception as e:
                error = e
        found: T | None = None
        try:
            self._meet()
            agree(error, self.host, "collecting what the ranks of a node use")
            places = gather_and_share(place, self.host)
            if not leads:
                try:
                    pid, descriptor = places[self.mine[0]]
                    found = _read(self.mine[0], pid, descriptor, read)
                except Exception as e:
                    error = e
            agree(error, self.host, "reading what the leader of a node collected")
        finally:
            if place:
                os.close(place[1])
        return found

    def _meet(self) -> None:
        """All ranks are here. Rank 0 learns which are not, and says so."""
        timeout = datetime.timedelta(seconds=self.timeout_s)
        try:
            dist.monitored_barrier(self.host, timeout, wait_all_ranks=True)
        except RuntimeError as e:
            raise RunError(
                f"rank {self.rank} waited up to {self.timeout_s:g} s (run.timeout_s) for other "
                f"ranks to exchange samples: {e}"
            ) from e


def find_nodes(local_rank: int, host: dist.ProcessGroup, timeout_s: float) -> Nodes:
    """Collective over ``host``. ``local_rank``: 0 on the first rank of a node."""
    of_rank: list[int] = []
    for first in gather_and_share(local_rank == 0, host):
        of_rank.append((of_rank[-1] if of_rank else -1) + int(first))
    leaders = leaders_of(of_rank)
    leading = None
    if len(leaders) > 1:
        timeout = datetime.timedelta(seconds=timeout_s)
        group = dist.new_group(leaders, backend="gloo", timeout=timeout)
        leading = group if dist.get_rank() in leaders else None
    return Nodes(tuple(of_rank), dist.get_rank(), host, leading, timeout_s)


def _in_memory(parts: Iterable[bytes | memoryview]) -> int:
    """A file descriptor of memory that holds ``parts``; no more than one is in memory twice."""
    descriptor = os.memfd_create("megarl")
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _read(leader: int, pid: int, descriptor: int, read: Callable[[memoryview], T]) -> T:
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:  # which cannot be mapped
                return read(memoryview(b""))
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            with mapped, memoryview(mapped) as whole:
                return read(whole)
    except OSError as e:
        raise RunError(
            f"no access to the memory of rank {leader} ({path}: {e.strerror}); the ranks of a node "
            "have to run as one user in one container"
        ) from e
