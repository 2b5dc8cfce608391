"""What a person sees of a conversion: how far it is, or what it would do."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from megarl.checkpoint.streamed import items_of, places_of
from megarl.checkpoint.workers import Workers
from megarl.models.fp8_export import Fp8Export
from megarl.models.hf_fp8 import SCALE
from megarl.models.hf_write import num_bytes
from megarl.models.mapping import ModelMapping
from megarl.models.mapping_table import mapping_table, parameters, total_bytes

_LINE_S = 10.0  # between plain lines


def show_mapping(mapping: ModelMapping, processes: int = 1, file: IO[str] | None = None) -> None:
    """Print every parameter, a line for those of one rule, and what the whole needs."""
    rows = mapping_table(mapping)
    table = Table("parameter", "where", "shape", "dtype", "is made of", "by", "GB", box=None)
    for row in rows:
        where = ", ".join(f"{letter} {numbers}" for letter, numbers in row.numbers.items())
        made_of = "\n".join(f"{name} {list(shape)}" for name, shape in row.hf)
        size = f"{row.count * row.num_bytes / 1e9:.3f}"
        kind = (str(list(row.shape)), row.dtype)
        table.add_row(row.megatron, where, *kind, made_of, row.operator, size)
    out = file or sys.stdout
    width = None if out.isatty() else 250  # a file's lines are not folded
    console = Console(file=out, width=width, highlight=False)
    console.print(table)
    items = items_of(places_of(mapping))
    values, whole = f"{parameters(rows):,} values", size_of(total_bytes(rows))
    console.print(f"{values} in {len(items):,} parameters, {whole}")
    largest = max(rows, key=lambda row: row.num_bytes)
    room = f"a process takes {size_of(largest.num_bytes)} of memory for one, and a little more"
    console.print(f"largest: {largest.megatron}; {room}")
    for rank in range(processes):
        share = Workers(rank, processes).share(items)
        own = sum(item.num_bytes for item in share)
        console.print(f"process {rank}: {len(share):,} parameters, {size_of(own)}")


def show_fp8(fp8: Fp8Export, file: IO[str] | None = None) -> None:
    """Print what would be in codes, and every module with a matrix that would not."""
    out = file or sys.stdout
    tensors = [spec for spec in fp8.specs if not spec.name.endswith(SCALE)]
    in_codes = size_of(sum(num_bytes(spec) for spec in tensors if spec.name in fp8.codes))
    whole = size_of(sum(map(num_bytes, fp8.specs)))
    print(f"{len(fp8.codes):,} of {len(tensors):,} tensors in FP8: {in_codes} of {whole}", file=out)
    print(f"plain: {', '.join(fp8.plain) or 'no module with a matrix'}", file=out)


def size_of(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


@contextmanager
def progress(
    what: str, num_bytes: int, stream: IO[str] | None = None
) -> Iterator[Callable[[int], None]]:
    """Yields what is to be told of bytes that are done, in any thread. A bar in a terminal, else a
    line every ten seconds: bytes, rate and time left.
    """
    stream = stream or sys.stderr
    if not stream.isatty():
        yield _Lines(what, num_bytes, stream).advance
        return
    columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *columns,
        console=Console(file=stream),
    ) as bar:
        task = bar.add_task(what, total=num_bytes)
        yield lambda done: bar.advance(task, done)


class _Lines:
    def __init__(
        self,
        what: str,
        num_bytes: int,
        stream: IO[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._stream, self._clock = what, num_bytes, stream, clock
        self._lock = threading.Lock()
        self._done, self._begin = 0, clock()
        self._printed = self._begin

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            now = self._clock()
            if now - self._printed < _LINE_S:
                return
            self._printed = now
            rate = self._done / (now - self._begin)
            left = (self._total - self._done) / rate
            done = f"{self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB"
            text = f"{self._what}: {done}, {rate / 1e6:.0f} MB/s, {left:.0f} s left"
            print(text, file=self._stream, flush=True)
