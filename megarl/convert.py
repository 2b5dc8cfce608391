"""Hugging Face folders and Megatron checkpoints made of each other: what the tools of the same
names do (``tools/convert_*.py``).
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from megarl.checkpoint.digests import DIGESTS, digests_json
from megarl.checkpoint.manager import FILES, HF, MEGATRON, MODEL, read_json
from megarl.checkpoint.models import (
    config_contradictions,
    require_no_contradictions,
    stored_spec,
)
from megarl.checkpoint.publish import publish
from megarl.checkpoint.stored import StoredWeights
from megarl.checkpoint.streamed import (
    export_weights,
    items_of,
    places_of,
    write_folder,
    write_weights,
)
from megarl.checkpoint.verify import (
    compare_logprobs,
    compare_with_import,
    stored_digests,
    verify_export,
    verify_import,
)
from megarl.checkpoint.workers import Item, Thread, Workers, workers_of_launch
from megarl.convert_display import progress
from megarl.errors import DataError, MegarlError
from megarl.models.config_json import read_object
from megarl.models.fp8_export import Fp8Export, fp8_export
from megarl.models.hf_complete import check_complete, open_model
from megarl.models.hf_files import copy_beside
from megarl.models.hf_fp8 import KEY
from megarl.models.hf_headers import weight_map
from megarl.models.hf_write import HfWriter, num_bytes, write_beside
from megarl.models.mapping import ModelMapping, mapping_for
from megarl.models.sharded import megatron_mapping
from megarl.models.spec import read_spec
from megarl.rundir import write_json


class Conversion(Protocol):
    """One that can begin: its source has been looked at. ``num_bytes``: of what it writes;
    ``work_bytes``: of what it goes through, what is read back to verify it included.
    """

    num_bytes: int
    work_bytes: int

    def run(self, out: Path, workers: Workers) -> None:
        """Make ``out``, in every process: whole or not at all."""
        ...


def perform(conversion: Conversion, out: Path, threads: int, timeout_s: float) -> None:
    """In the processes that torchrun has started, or here alone; the first says how far it is.
    ``timeout_s``: the longest that one process waits for another.
    """
    rank, processes = launched()
    own = conversion.work_bytes // processes
    shown = nullcontext(lambda num_bytes: None) if rank else progress(f"writing {out}", own)
    with shown as advance, workers_of_launch(threads, advance, timeout_s) as workers:
        conversion.run(out, workers)


def launched() -> tuple[int, int]:
    """(this process's number, how many there are) of torchrun's; (0, 1) without."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def tool(name: str, work: Callable[[], None]) -> int:
    """The exit code of a command line tool that does ``work``. Ended by SIGTERM, it cleans up. What
    ``work`` is refused with, or a disk or a file fails of, is said in a line.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        work()
    except (MegarlError, OSError) as e:
        print(f"{name}: {e}", file=sys.stderr)
        return 1
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What both ways have."""
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be done; reads headers alone"
    )
    threads = min(8, os.cpu_count() or 1)
    parser.add_argument("--threads", type=_positive, default=threads, help=f"here {threads}")
    waits = "the longest that one process waits for another; 1800 (log-probs of --verify: 1600)"
    parser.add_argument("--timeout-s", type=_positive, default=1800, help=waits)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {value}; accepted: 1 and more")
    return value


class Import:
    """Hugging Face folder ``source`` -> a checkpoint of weights."""

    def __init__(
        self, source: Path, allow_missing: Collection[str] = (), *, verify: bool = False
    ) -> None:
        """``allow_missing``: tensors of the model that the folder may lack; they are zeros.
        ``verify``: read back what was written before it appears. Raises DataError with everything
        that is wrong with the source.
        """
        self.source, self.spec, self.verify = source, read_spec(source), verify
        self.checkpoint = open_model(source, self.spec, allow_missing=allow_missing)
        self.mapping = megatron_mapping(self.spec)
        self.num_bytes = weight_bytes(self.mapping)
        self.work_bytes = self.num_bytes * (2 if verify else 1)

    def run(self, out: Path, workers: Workers) -> None:
        publish(out, workers, self.num_bytes, lambda folder: self._write(folder, workers))

    def _write(self, folder: Path, workers: Workers) -> None:
        weights = folder / MEGATRON
        workers.first(f"making {weights}", weights.mkdir)
        digests = write_weights(weights, self.checkpoint, self.spec, workers)

        def beside() -> None:
            write_json(folder / MODEL, self.spec.as_json())
            write_json(folder / FILES, weight_map(self.source))
            write_json(folder / DIGESTS, digests_json(digests))
            copy_beside(self.source, folder / HF)

        workers.first("writing what goes with the weights", beside)
        if self.verify:
            said = verify_import(folder, self.spec, digests, workers)
            workers.first("verifying", lambda: self._compare(weights, said))

    def _compare(self, weights: Path, said: str) -> None:
        print(said)
        if self.checkpoint.missing:
            print("log-probs: not compared: the folder lacks tensors")
        else:
            print(compare_logprobs(weights, self.source, self.spec))


class Export:
    """Checkpoint ``source``, of a run or of ``Import``, -> a Hugging Face folder."""

    def __init__(
        self,
        source: Path,
        fp8: str | None = None,
        exclude: Sequence[str] = (),
        *,
        verify: bool = False,
    ) -> None:
        """``fp8``, ``exclude``: as ``fp8_export`` takes them; None for plain weights. ``verify``:
        read back what was written before it appears. Raises DataError with everything that is
        wrong with the source.
        """
        self.source, self.spec, self.verify = source, stored_spec(source / MODEL), verify
        meant = read_spec(source / HF)
        require_no_contradictions(config_contradictions(source / MODEL, meant, source / HF))
        self.mapping = megatron_mapping(self.spec)
        self.fp8 = fp8_export(self.mapping, fp8, exclude) if fp8 else None
        if (source / DIGESTS).is_file():
            stored_digests(source)
        StoredWeights(source / MEGATRON).check(list(places_of(self.mapping).values()))
        specs = self.fp8.specs if self.fp8 else self.mapping.hf_spec()
        self.num_bytes = sum(map(num_bytes, specs))
        self.work_bytes = weight_bytes(self.mapping) * (2 if verify else 1)

    def run(self, out: Path, workers: Workers) -> None:
        publish(out, workers, self.num_bytes, lambda folder: self._write(folder, workers))

    def _write(self, folder: Path, workers: Workers) -> None:
        files = self.source / FILES
        before = read_json(files) if files.exists() else None
        weights = self.source / MEGATRON
        digests = export_weights(weights, folder, self.spec, workers, files=before, fp8=self.fp8)
        _beside(self.source / HF, folder, self.mapping, self.fp8, workers)
        compare = partial(compare_with_import, self.source, digests)
        workers.first("comparing with what was imported", lambda: print(compare()))
        if self.verify:
            said = verify_export(weights, folder, self.spec, workers, fp8=self.fp8)
            workers.first("verifying", lambda: self._compare(weights, folder, said))

    def _compare(self, weights: Path, folder: Path, said: str) -> None:
        print(said)
        print(compare_logprobs(weights, folder, self.spec))


class Quantisation:
    """Hugging Face folder ``source`` -> the same in FP8 blocks."""

    def __init__(self, source: Path, scales: str, exclude: Sequence[str] = ()) -> None:
        """``scales``, ``exclude``: as ``fp8_export`` takes them. Raises DataError with everything
        that is wrong with the source.
        """
        self.source, spec = source, read_spec(source)
        self.mapping = mapping_for(spec)
        self.fp8 = fp8_export(self.mapping, scales, exclude)
        self.checkpoint = open_model(source, spec)
        if read_object(source / "config.json").get(KEY) is not None:
            why = "codes of codes lose what the first scales kept; quantise what they came from"
            raise DataError(f"{source} is in FP8 already: {why}")
        check_complete(self.checkpoint, spec)
        self.specs = {s.name: s for s in self.mapping.hf_spec()}
        self.num_bytes = sum(map(num_bytes, self.fp8.specs))
        self.work_bytes = sum(map(num_bytes, self.specs.values()))

    def run(self, out: Path, workers: Workers) -> None:
        publish(out, workers, self.num_bytes, lambda folder: self._write(folder, workers))

    def _write(self, folder: Path, workers: Workers) -> None:
        there, copies = set(self.checkpoint.names()), self.mapping.copies()

        def write(item: Item, thread: Thread, writer: HfWriter) -> None:
            spec = self.specs[item.name]
            name = spec.name if spec.name in there else copies[spec.name]
            with thread.memory(spec.shape, getattr(torch, spec.dtype)) as tensor:
                self.checkpoint.get(name, into=tensor)
                for part, values in self.fp8.parts(spec.name, tensor):
                    writer.write(part, values)

        writer = HfWriter(folder, self.fp8.specs, files=weight_map(self.source))
        items = [Item(name, num_bytes(spec)) for name, spec in self.specs.items()]
        write_folder(writer, items, write, workers)
        _beside(self.source, folder, self.mapping, self.fp8, workers)


def _beside(
    source: Path, folder: Path, mapping: ModelMapping, fp8: Fp8Export | None, workers: Workers
) -> None:
    specs, quantization = (mapping.hf_spec(), None) if fp8 is None else (fp8.specs, fp8.config())
    workers.first(
        "writing what goes with the weights",
        lambda: write_beside(source, folder, specs, quantization),
    )


def weight_bytes(mapping: ModelMapping) -> int:
    """Of a model in Megatron, padding of its vocabulary included."""
    return sum(item.num_bytes for item in items_of(places_of(mapping)))
