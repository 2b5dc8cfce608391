"""Buckets are written by a thread of their own while the next one is received.

1. They are written one after another, in the order in which they came.
2. Two buffers take turns: one is filled while the other is written from.
3. After the first that fails nothing is written. It is raised by what is called next, and by
   everything after that, until ``begin``.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megarl.errors import SyncError


class LateWrites:
    """For one thread, which receives."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._writes: list[Future[None]] = []  # of the last two buckets
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2  # as large as they had to be so far
        self._failed = ""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """u8 [num_bytes] on the CPU, from which nothing is written any more. It belongs to the next
        ``write``.
        """
        self._wait(left=1)
        self._buffers.reverse()
        if self._buffers[0].numel() < num_bytes:
            self._buffers[0] = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._buffers[0] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffers[0][:num_bytes]

    def write(self, write: Callable[[], None], what: str) -> None:
        """Begins to, once all before are written. ``what``: it is in words."""
        self._wait(left=1)
        if self._thread is None:
            # As many threads as here: a new one would use all cores.
            threads = (torch.get_num_threads(),)
            self._thread = ThreadPoolExecutor(1, "writes", torch.set_num_threads, threads)
        self._writes.append(self._thread.submit(self._write, write, what))

    def settle(self) -> None:
        """Returns when all is written. Raises SyncError where something was not."""
        self._wait(left=0)

    def rest(self) -> None:
        """Returns when nothing is being written any more."""
        while self._writes:
            self._writes.pop(0).result()

    def begin(self) -> None:
        """Forgets what failed."""
        self.rest()
        self._failed = ""

    def _write(self, write: Callable[[], None], what: str) -> None:
        if self._failed:
            return
        try:
            write()
        except Exception as error:
            self._failed = f"{what} could not be written: {error}"

    def _wait(self, left: int) -> None:
        while len(self._writes) > left:
            self._writes.pop(0).result()
        if self._failed:
            raise SyncError(self._failed)
