"""Buckets on their way into a server's weights, two at a time: each is received and then written by
a thread of its own, so that the next one comes meanwhile, or another sender's.

1. There are two buffers. A bucket has one from before its first byte comes until it is written; who
   announces a third waits.
2. One is written at a time.
3. After the first that cannot be written nothing is. It is raised by what is called next, and by
   everything after that, until ``begin``.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import Lock

import torch
from torch import Tensor

from megarl.errors import SyncError

_BUFFERS = 2


class Arrivals:
    """For one thread, which announces buckets."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._free: SimpleQueue[Tensor] = SimpleQueue()  # as large as they had to be so far
        for _ in range(_BUFFERS):
            self._free.put(torch.empty(0, dtype=torch.uint8))
        self._writing = Lock()
        self._failed = ""

    def take(
        self, num_bytes: int, receive: Callable[[Tensor], Callable[[], None]], what: str
    ) -> "Future[None]":
        """Begins to receive a bucket, ``what`` in words, once there is a buffer. ``receive`` fills
        it, u8 [num_bytes] on the CPU, and returns what writes it. Done when ``receive`` is, with
        its exception if it raises one.
        """
        buffer = self._free.get()
        try:
            self._raise_what_failed()
            if buffer.numel() < num_bytes:
                buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first
                buffer = torch.empty(num_bytes, dtype=torch.uint8)
        except BaseException:
            self._free.put(buffer)
            raise
        if self._threads is None:
            # As many threads as here: a new one would use all cores.
            threads = (torch.get_num_threads(),)
            self._threads = ThreadPoolExecutor(_BUFFERS, "buckets", torch.set_num_threads, threads)
        arrived: Future[None] = Future()
        self._threads.submit(self._take, buffer, num_bytes, receive, what, arrived)
        return arrived

    def settle(self) -> None:
        """Returns when all is written. Raises SyncError where something was not."""
        self.rest()
        self._raise_what_failed()

    def rest(self) -> None:
        """Returns when nothing is received or written any more."""
        for buffer in [self._free.get() for _ in range(_BUFFERS)]:
            self._free.put(buffer)

    def begin(self) -> None:
        """Forgets what failed."""
        self.rest()
        self._failed = ""

    def _take(
        self,
        buffer: Tensor,
        num_bytes: int,
        receive: Callable[[Tensor], Callable[[], None]],
        what: str,
        arrived: "Future[None]",
    ) -> None:
        try:
            try:
                write = receive(buffer[:num_bytes])
            except Exception as error:
                arrived.set_exception(error)
                return
            arrived.set_result(None)
            with self._writing:
                self._write(write, what)
        finally:
            self._free.put(buffer)

    def _write(self, write: Callable[[], None], what: str) -> None:
        if self._failed:
            return
        try:
            write()
        except Exception as error:
            self._failed = f"{what} could not be written: {error}"

    def _raise_what_failed(self) -> None:
        if self._failed:
            raise SyncError(self._failed)
