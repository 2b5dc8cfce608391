"""Buckets to servers by way of a folder that trainer and servers share (``version_folders.py``).

1. Every sender writes its buckets into the staging folder, each a file that is durable before the
   next is begun. Rank 0 adds the rest, publishes, and has servers load it.
2. A version is published once. A server that comes later loads it from there, whatever weights the
   trainer has by then.
3. A server loads what a caller with its key names: the key is all that keeps others from that.
"""

import itertools
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path

from megarl.models.hf_write import file_header
from megarl.protocols import WeightSink
from megarl.sync.asking import ask, failed
from megarl.sync.carrier import Outcome
from megarl.sync.packing import Packed
from megarl.sync.version_folders import Publisher, blamed_on, staging, version_folder


class Disk:
    """A ``Carrier``."""

    session = False
    keeps = True

    def __init__(
        self,
        folder: Path,
        *,
        run: str,
        label: str,
        timeout_s: float,
        publisher: Publisher | None = None,
    ) -> None:
        """``run``: the same on all ranks, another one in every run; ``label`` of the sender.
        ``publisher`` on rank 0; it is closed with this.
        """
        self.folder, self._run, self._label = folder, run, label
        self._timeout_s, self._publisher = timeout_s, publisher
        self._staged: Path | None = None
        self._numbers = itertools.count(1)
        self._published: int | None = None

    def buffer(self, num_bytes: int) -> None:
        """Wherever it is packed it can be written from."""

    def open(self, sinks: Sequence[WeightSink], attempt: int) -> Outcome:
        before, self._staged = self._staged, staging(self.folder, self._run, attempt)
        with blamed_on(self.folder):
            self._staged.mkdir(parents=True, exist_ok=True)
        if before is not None:  # all senders are done with it
            shutil.rmtree(before, ignore_errors=True)
        self._numbers = itertools.count(1)
        return Outcome()

    def send(self, bucket: Packed, names: set[str]) -> Outcome:
        assert self._staged is not None
        file = self._staged / f"model-{self._label}-{next(self._numbers):05d}.safetensors"
        flat = bucket.flat.cpu().numpy()
        with blamed_on(self.folder), file.open("xb", buffering=0) as out:
            for data in (memoryview(file_header(bucket.specs)), flat.data):
                while data:
                    data = data[out.write(data) :]
            os.fsync(out.fileno())
        return Outcome()

    def finish(
        self, version: int, digests: Mapping[str, str], sinks: Sequence[WeightSink]
    ) -> Outcome:
        assert self._publisher is not None, "rank 0 has one"
        if version != self._published:
            assert self._staged is not None, "rank 0 sends"
            self._publisher.publish(self._staged, version, digests, self._timeout_s)
            self._staged, self._published = None, version
        return self._load(version, sinks)

    def drop(self, names: Iterable[str]) -> None:
        """They have nothing here."""

    def close(self) -> None:
        """What is published stays."""
        if self._staged is not None:
            shutil.rmtree(self._staged, ignore_errors=True)
        if self._publisher is not None:
            self._publisher.close()

    def _load(self, version: int, sinks: Sequence[WeightSink]) -> Outcome:
        path = str(version_folder(self.folder, version))
        told = {"model_path": path, "flush_cache": False, "abort_all_requests": False}
        replies = [ask(sink, "load_path", told, self._timeout_s) for sink in sinks]
        wait(replies)
        pairs = zip(sinks, replies, strict=True)
        return Outcome(lost={s.name: str(r.exception()) for s, r in pairs if failed(r)})
