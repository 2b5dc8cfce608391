"""How the work of a conversion is shared: over processes (torchrun), and over threads in each.

Memory holds one large parameter at a time, whatever the number of threads, and a small one a
thread: their places are taken once and used again, since fresh memory costs more than to read into
it.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import RunError
from megarl.hostcomm import agree, gather_json

LARGE = 64 * 2**20  # bytes; larger parameters come one after another
Advance = Callable[[int], None]  # told of bytes that are done


@dataclass(frozen=True)
class Item:
    """Something to do, of so many bytes."""

    name: str
    num_bytes: int


class Memory:
    """Bytes that one thread at a time fills, kept for the next use."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    @contextmanager
    def of(self, num_bytes: int) -> Iterator[Tensor]:
        """u8 [num_bytes]"""
        with self._lock:
            if len(self._bytes) < num_bytes:
                self._bytes = torch.empty(0, dtype=torch.uint8)  # before the larger one is there
                self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
            yield self._bytes[:num_bytes]


@dataclass(frozen=True)
class Thread:
    """``number``: from 0."""

    number: int
    small: Memory
    large: Memory

    @contextmanager
    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
        """A tensor of any values; not for longer than the context."""
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        memory = self.large if num_bytes > LARGE else self.small
        with memory.of(num_bytes) as raw:
            yield raw.view(dtype).view(*shape)


@dataclass(frozen=True)
class Workers:
    """``rank`` of ``size`` processes, of gloo group ``group`` where there are several, with
    ``threads`` each. ``advance`` is told of what this process has done.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    threads: int = 1
    advance: Advance = field(default=lambda num_bytes: None)

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This process's: of every process about as many bytes. The same answer everywhere."""
        filled = [0] * self.size
        mine = []
        for item in items:
            least = filled.index(min(filled))
            filled[least] += item.num_bytes
            if least == self.rank:
                mine.append(item)
        return mine

    def run(self, items: Sequence[Item], do: Callable[[Item, Thread], None]) -> None:
        """``do`` every item, in the threads. Raises the first error; items that have begun are
        finished, others are left.
        """
        left, lock, large = iter(items), threading.Lock(), Memory()
        errors: list[BaseException] = []

        def work(thread: Thread) -> None:
            while not errors:
                with lock:
                    item = next(left, None)
                if item is None:
                    return
                try:
                    do(item, thread)
                    with lock:
                        self.advance(item.num_bytes)
                except BaseException as e:
                    errors.append(e)

        ended = [threading.Event() for _ in range(1, self.threads)]

        def work_beside(number: int) -> None:
            try:
                work(Thread(number, Memory(), large))
            finally:
                ended[number - 1].set()

        for number in range(1, self.threads):
            threading.Thread(target=work_beside, args=(number,)).start()
        try:
            work(Thread(0, Memory(), large))
            for end in ended:
                end.wait()
        except BaseException as e:  # a signal, between two items or while others end
            errors.append(e)
            for end in ended:  # a join() that follows an interrupted one would not wait
                end.wait()
        if errors:
            raise errors[0]

    def together(self, what: str, do: Callable[[], Any]) -> Any:
        """``do`` in every process; where one fails, all raise. RunError, too, where one has ended
        or does not answer in time.
        """
        error, value = None, None
        try:
            value = do()
        except BaseException as e:
            error = e
        if self.group is not None:
            self._meet(what, error)
        elif error is not None:
            raise error
        return value

    def _meet(self, what: str, error: BaseException | None) -> None:
        """The first process hears of every other, one by one: it can say which is missing."""
        assert self.group is not None
        here, at = torch.zeros(1), 0
        try:
            for at in range(1, self.size) if self.rank == 0 else ():
                dist.recv(here, src=at, group=self.group)
            if self.rank:
                dist.send(here, dst=0, group=self.group)
            agree(error, self.group, what)
        except RuntimeError as e:
            if e is error or isinstance(e, RunError):  # of this process, or of another that said so
                raise
            why = f"has ended or does not answer ({str(e).splitlines()[0]})"
            raise RunError(f"{what}: process {at} {why}") from e

    def first(self, what: str, do: Callable[[], Any]) -> Any:
        """``do`` in the first process alone; where it fails, all raise."""
        return self.together(what, do if self.rank == 0 else lambda: None)

    def gather(self, value: Any) -> list[Any]:
        """JSON values of all processes, in the first; nothing elsewhere."""
        if self.group is None:
            return [value]
        return gather_json(value, self.group) or []


@contextmanager
def workers_of_launch(threads: int, advance: Advance, timeout_s: float) -> Iterator[Workers]:
    """Of this process alone, or of all that torchrun has started."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Workers(threads=threads, advance=advance)
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    try:
        group = dist.group.WORLD
        yield Workers(dist.get_rank(), size, group, threads, advance)
    finally:
        dist.destroy_process_group()
