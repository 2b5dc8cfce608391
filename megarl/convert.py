"""Hugging Face folders and Megatron checkpoints made of each other: what the tools of the same
names do (``tools/convert_*.py``).
"""

import argparse
import os
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

from megarl.checkpoint.digests import DIGESTS, digests_json
from megarl.checkpoint.manager import FILES, HF, MEGATRON, MODEL, read_json
from megarl.checkpoint.models import (
    config_contradictions,
    require_no_contradictions,
    stored_spec,
)
from megarl.checkpoint.publish import publish
from megarl.checkpoint.streamed import export_weights, items_of, places_of, write_weights
from megarl.checkpoint.workers import Workers, workers_of_launch
from megarl.convert_display import progress
from megarl.models.hf_complete import open_model
from megarl.models.hf_files import copy_beside
from megarl.models.hf_headers import weight_map
from megarl.models.hf_write import write_beside
from megarl.models.mapping import ModelMapping
from megarl.models.sharded import megatron_mapping
from megarl.models.spec import read_spec
from megarl.rundir import write_json


class Conversion(Protocol):
    """One that can begin: its source has been looked at. ``num_bytes``: of its weights."""

    num_bytes: int

    def run(self, out: Path, workers: Workers) -> None:
        """Make ``out``, in every process: whole or not at all."""
        ...


def perform(conversion: Conversion, out: Path, threads: int, timeout_s: float) -> None:
    """In the processes that torchrun has started, or here alone; the first says how far it is.
    ``timeout_s``: the longest that one process waits for another.
    """
    first = int(os.environ.get("RANK", "0")) == 0
    own = conversion.num_bytes // int(os.environ.get("WORLD_SIZE", "1"))
    shown = progress(f"writing {out}", own) if first else nullcontext(lambda num_bytes: None)
    with shown as advance, workers_of_launch(threads, advance, timeout_s) as workers:
        conversion.run(out, workers)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What both ways have."""
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be done; reads headers alone"
    )
    threads = min(8, os.cpu_count() or 1)
    parser.add_argument("--threads", type=int, default=threads, help=f"a process; here {threads}")
    waits = "the longest that one process waits for another; 1800"
    parser.add_argument("--timeout-s", type=float, default=1800.0, help=waits)


class Import:
    """Hugging Face folder ``source`` -> a checkpoint of weights."""

    def __init__(self, source: Path, allow_missing: Collection[str] = ()) -> None:
        """``allow_missing``: tensors of the model that the folder may lack; they are zeros. Raises
        DataError with everything that is wrong with the source.
        """
        self.source, self.spec = source, read_spec(source)
        self.checkpoint = open_model(source, self.spec, allow_missing=allow_missing)
        self.mapping = megatron_mapping(self.spec)
        self.num_bytes = weight_bytes(self.mapping)

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


class Export:
    """Checkpoint ``source``, of a run or of ``Import``, -> a Hugging Face folder."""

    def __init__(self, source: Path) -> None:
        """Raises DataError with everything that is wrong with the source."""
        self.source, self.spec = source, stored_spec(source / MODEL)
        meant = read_spec(source / HF)
        require_no_contradictions(config_contradictions(source / MODEL, meant, source / HF))
        self.mapping = megatron_mapping(self.spec)
        self.num_bytes = weight_bytes(self.mapping)

    def run(self, out: Path, workers: Workers) -> None:
        publish(out, workers, self.num_bytes, lambda folder: self._write(folder, workers))

    def _write(self, folder: Path, workers: Workers) -> None:
        files = self.source / FILES
        before = read_json(files) if files.exists() else {}
        export_weights(self.source / MEGATRON, folder, self.spec, workers, files=before)
        specs = self.mapping.hf_spec()
        workers.first(
            "writing what goes with the weights",
            lambda: write_beside(self.source / HF, folder, specs),
        )


def weight_bytes(mapping: ModelMapping) -> int:
    """Of a model in Megatron, padding of its vocabulary included."""
    return sum(item.num_bytes for item in items_of(places_of(mapping)))
