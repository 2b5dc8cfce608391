"""Memory of a machine that the tensor-parallel ranks on it share: one file that has no name.

1. Every rank makes such a file (`memfd`) and says where it is: process, descriptor, and a random
   number that is written into it. Each takes the file of the lowest rank that it can open under
   `/proc/PID/fd/FD` and that has that number in it: another machine, another container or another
   user has not, and ranks there share a file of their own.
2. It is gone with the last process that has it, whatever ended that, and no part of /dev/shm.
3. All of it that there could ever be is mapped once: what is not taken takes no memory. Whoever
   takes more takes it at once (`posix_fallocate`), after looking whether there is enough: a page
   that cannot be had when it is first written to would end the process.
4. A rank says how far it is by a number in the file's first bytes (`say`), by system calls, and
   others wait for that (`wait`).
"""

import contextlib
import mmap
import os
import secrets
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

_NAME = "megarl-shadow"
_HEADER = 2**16  # of the file; what ranks say begins at _SLOTS
_GRANTED, _REFUSED, _SLOTS = 16, 24, 32
_MOST = 2**42  # bytes
_SPARE = 2**30  # bytes of memory that are left to everybody else
_POLL_S = 0.0005


class NodeMemory:
    def __init__(self, descriptor: int, nonce: Sequence[int]) -> None:
        """The descriptor is its own now, also where there is an error (OSError)."""
        try:
            memory = mmap.mmap(descriptor, _MOST)
            memory.madvise(mmap.MADV_DONTDUMP)
        except BaseException:
            os.close(descriptor)
            raise
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._descriptor, self._nonce = descriptor, nonce
        self._size = _HEADER  # what this rank knows to be taken
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls) -> "NodeMemory":
        """Raises OSError."""
        descriptor, nonce = os.memfd_create(_NAME, os.MFD_CLOEXEC), (_random(), _random())
        os.ftruncate(descriptor, _MOST)
        memory = cls(descriptor, nonce)
        os.pwrite(descriptor, struct.pack("<2q", *nonce), 0)
        memory._write(_GRANTED, _HEADER)
        return memory

    @property
    def address(self) -> list[int]:
        """For `open` in another process: four numbers."""
        return [os.getpid(), self._descriptor, *self._nonce]

    @classmethod
    def open(cls, address: Sequence[int]) -> "NodeMemory | None":
        """None: it is not here."""
        pid, descriptor, *nonce = address
        path = f"/proc/{pid}/fd/{descriptor}"
        with contextlib.suppress(OSError):
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                return None  # who knows what opening it would do
            found = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if os.pread(found, 16, 0) == struct.pack("<2q", *nonce):
                return cls(found, nonce)
            os.close(found)
        return None

    def close(self) -> None:
        """What is mapped stays for as long as tensors there do."""
        self._close()

    def grow(self, num_bytes: int, *, takes: bool, deadline_s: float) -> torch.Tensor | None:
        """u8 [num_bytes] more of it; None: there is no memory for it. All ranks that share it ask
        alike, and one of them `takes` it for all. Raises TimeoutError.
        """
        start, end = self._size, self._size + num_bytes
        if takes and num_bytes:
            self._take(start, num_bytes)
        waited(lambda: self._read(_GRANTED) >= end or self._read(_REFUSED), deadline_s)
        if self._read(_GRANTED) < end:
            return None
        self._size = end
        return self._bytes[start:end]

    def say(self, rank: int, number: int) -> None:
        self._write(_SLOTS + 8 * rank, number)

    def wait(self, numbers: Iterable[tuple[int, int]], deadline_s: float) -> None:
        """For all (rank, what it has to have said at least). Raises TimeoutError, and RuntimeError
        where one has said a negative number: it has failed.
        """
        for rank, number in numbers:
            at = _SLOTS + 8 * rank
            waited(lambda at=at, n=number: not 0 <= self._read(at) < n, deadline_s)  # type: ignore[misc]
            if self._read(at) < 0:
                raise RuntimeError(f"rank {rank} has failed")

    def _take(self, start: int, size: int) -> None:
        if available() >= size + _SPARE and start + size <= _MOST:
            with contextlib.suppress(OSError):
                os.posix_fallocate(self._descriptor, start, size)
                self._write(_GRANTED, start + size)
                return
        self._write(_REFUSED, 1)

    def _read(self, at: int) -> int:
        return int(struct.unpack("<q", os.pread(self._descriptor, 8, at))[0])

    def _write(self, at: int, number: int) -> None:
        os.pwrite(self._descriptor, struct.pack("<q", number), at)


def waited(done: Callable[[], object], deadline_s: float) -> None:
    """Until it is done. Raises TimeoutError."""
    end = time.monotonic() + deadline_s
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"the other ranks are not as far after {deadline_s:g} s")
        time.sleep(_POLL_S)


def available(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may still take, by the machine and its control groups."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    most = [int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")]
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            top, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in kinds.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        group = top / path.strip("/")
        most += [_left(g, *files) for g in (group, *group.parents) if g.is_relative_to(top)]
    return min(most)


def _left(group: Path, limit: str, usage: str, cached: str) -> int:
    """Of a control group; what caches files counts as free. Without a limit, or not seen from here:
    any amount.
    """
    try:
        allowed, used = int((group / limit).read_text()), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return allowed - used + int(stat.get(cached, 0))
    except (OSError, ValueError):
        return 2**63


def _random() -> int:
    return secrets.randbits(62)
