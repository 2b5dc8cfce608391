"""Hugging Face folders and Megatron checkpoints made of each other: what the tools of the same names
do (``tools/convert_*.py``).
"""

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
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

from megarl.checkpoint.manager import HF, MEGATRON, MODEL
from megarl.checkpoint.models import (
    config_contradictions,
    require_no_contradictions,
    stored_spec,
)
from megarl.checkpoint.publish import publish
from megarl.checkpoint.streamed import export_weights, items_of, places_of, write_weights
from megarl.checkpoint.workers import Workers
from megarl.models.hf_complete import open_model
from megarl.models.hf_files import copy_beside
from megarl.models.sharded import megatron_mapping
from megarl.models.spec import read_spec
from megarl.rundir import write_json

_LINE_S = 10.0  # between plain lines


def import_model(
    source: Path, out: Path, workers: Workers, *, allow_missing: Collection[str] = ()
) -> int:
    """Hugging Face folder ``source`` -> checkpoint of weights ``out``, in every process. The bytes
    of its weights.

    ``allow_missing``: tensors of the model that the folder may lack; they are zeros. Raises
    DataError with everything that is wrong with the source, before anything is written.
    """
    spec = read_spec(source)
    checkpoint = open_model(source, spec, allow_missing=allow_missing)
    num_bytes = sum(item.num_bytes for item in items_of(places_of(megatron_mapping(spec))))

    def write(folder: Path) -> None:
        weights = folder / MEGATRON
        workers.first(f"making {weights}", weights.mkdir)
        write_weights(weights, checkpoint, spec, workers)
        workers.first("writing what goes with the weights", lambda: beside(folder))

    def beside(folder: Path) -> None:
        write_json(folder / MODEL, spec.as_json())
        copy_beside(source, folder / HF)

    publish(out, workers, num_bytes, write)
    return num_bytes


def export_model(source: Path, out: Path, workers: Workers) -> int:
    """Checkpoint ``source``, of a run or of ``import_model``, -> Hugging Face folder ``out``, in
    every process. The bytes of its weights.

    Raises DataError with everything that is wrong with the source, before anything is written.
    """
    spec = stored_spec(source / MODEL)
    meant = read_spec(source / HF)
    require_no_contradictions(config_contradictions(source / MODEL, meant, source / HF))
    export_weights(source / MEGATRON, out, spec, metadata_from=source / HF)
    return 0


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
        TextColumn("{task.description}"), BarColumn(), *columns, console=Console(file=stream)
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
