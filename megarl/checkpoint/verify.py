"""Whether a conversion's output is its input: every tensor read back and turned around, and what
the model computes.

Either way memory holds what one mapping rule needs, and the work is shared as that of conversion.
"""

import importlib.util
import json
import math
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megarl.checkpoint.digests import (
    DIGESTS,
    Digests,
    DigestSum,
    differences,
    listing,
    parse_digests,
)
from megarl.checkpoint.manager import MEGATRON, read_json
from megarl.checkpoint.stored import StoredWeights
from megarl.checkpoint.streamed import add_parameter, gathered, items_of, places_of
from megarl.checkpoint.workers import Item, Thread, Workers
from megarl.errors import DataError
from megarl.models.config_json import read_object
from megarl.models.fp8_export import Fp8Export
from megarl.models.hf_complete import equal_tensors
from megarl.models.hf_fp8 import KEY
from megarl.models.hf_io import open_checkpoint
from megarl.models.hf_parameters import read_parameter
from megarl.models.mapping import mapping_for
from megarl.models.sharded import megatron_mapping, parameter_names
from megarl.models.spec import ModelSpec
from megarl.ops.digest import digest

# Of a log-prob. Both sides compute in float32, whatever dtype the weights are in: what differs is
# the order of sums, some 1e-6 of a small model. A term that is wrong makes 1e-2 or more.
TOLERANCE = 1e-3
_TOKENS = 32
_TIMEOUT_S = 800  # for each side: other processes wait for both, 1800 s if not told otherwise
_HERE = Path(__file__).parent.parent.parent


# ---- digests -------------------------------------------------------------------------------------


def verify_import(
    checkpoint: Path, spec: ModelSpec, digests: Digests, workers: Workers | None = None
) -> str:
    """A line that says that the weights of ``checkpoint``, mapped back, have ``digests`` (which the
    first process alone needs). Raises DataError with every tensor that has another. Collective.
    """
    workers = workers or Workers()
    found = read_back(checkpoint / MEGATRON, spec, workers)

    def compare() -> None:
        lines = differences(digests, found, expects="the source", finds="what was written")
        if lines:
            count = f"{len(lines)} of {len(digests)} tensors"
            title = f"{checkpoint}: {count} are not what was imported:"
            raise DataError(listing(title, lines))

    workers.first("verifying", compare)
    return f"verified: {len(found)} tensors, read back, are those of the source"


def read_back(weights: Path, spec: ModelSpec, workers: Workers | None = None) -> Digests:
    """Of the distributed checkpoint ``weights`` under Hugging Face names, in the first process.
    Collective.
    """
    workers = workers or Workers()
    mapping = megatron_mapping(spec)
    places, stored = places_of(mapping), StoredWeights(weights)
    sums = DigestSum(mapping.hf_spec(), mapping.copies())

    def add(item: Item, thread: Thread) -> None:
        place = places[item.name]
        with thread.memory(place.parameter, getattr(torch, place.dtype)) as parameter:
            stored.read(place, parameter)
            add_parameter(sums, mapping, item.name, parameter)

    share = workers.share(items_of(places))
    workers.together("reading back", lambda: workers.run(share, add))
    return gathered(sums, workers)


def verify_export(
    weights: Path,
    folder: Path,
    spec: ModelSpec,
    workers: Workers | None = None,
    *,
    fp8: Fp8Export | None = None,
) -> str:
    """A line that says that Hugging Face folder ``folder``, mapped back, has the parameters of the
    distributed checkpoint ``weights``; ``fp8``: what their codes stand for. Raises DataError with
    every parameter that it has not. Collective.
    """
    workers = workers or Workers()
    found = workers.together(
        "reading back", lambda: _export_faults(weights, folder, spec, workers, fp8)
    )
    lines = [line for lines in workers.gather(found) for line in lines]
    names = parameter_names(megatron_mapping(spec))

    def refuse() -> None:
        if lines:
            title = f"{folder}: {len(lines)} of {len(names)} parameters are not the checkpoint's:"
            raise DataError(listing(title, lines))

    workers.first("verifying", refuse)
    return f"verified: {len(names)} parameters, read back, are those of the checkpoint"


def _export_faults(
    weights: Path, folder: Path, spec: ModelSpec, workers: Workers, fp8: Fp8Export | None
) -> list[str]:
    """Every difference of this process's share. Rows that pad the vocabulary do not count."""
    mapping, unpadded = megatron_mapping(spec), mapping_for(spec)
    places, stored, back = places_of(mapping), StoredWeights(weights), open_checkpoint(folder)
    lines: dict[str, str] = {}

    def compare(item: Item, thread: Thread) -> None:
        place, name = places[item.name], item.name
        rows = unpadded.shape(name)[0]
        with thread.memory(place.parameter, getattr(torch, place.dtype)) as parameter:
            stored.read(place, parameter)
            if fp8 is not None:
                fp8.round(mapping, name, parameter)
            expected = digest(parameter[:rows])
            parameter.zero_()
            read_parameter(back, unpadded, name, parameter[:rows])
            found = digest(parameter[:rows])
        if found != expected:
            both = f"digest {expected} in the checkpoint, {found} in what was written"
            lines[name] = f"{name}: {both}"

    workers.run(workers.share(items_of(places)), compare)
    for copy, of in unpadded.copies().items() if workers.rank == 0 else ():
        if not equal_tensors(back, copy, of):
            lines[copy] = f"{copy}: not what {of} is"
    return [lines[name] for name in [*places, *unpadded.copies()] if name in lines]


def compare_with_import(checkpoint: Path, exported: Digests) -> str:
    """A line on what weights ``exported`` from ``checkpoint`` are to those it was imported from.
    Trained weights differ: that is no error.
    """
    if not (checkpoint / DIGESTS).is_file():
        return f"no digests of imported weights are recorded in {checkpoint}"
    imported = stored_digests(checkpoint)
    lines = differences(imported, exported, expects="the import", finds="the export")
    if not lines:
        return f"identical to the imported weights: {len(imported)} tensors by their digests"
    return f"{len(lines)} of {len(imported)} tensors differ from the imported weights"


def stored_digests(checkpoint: Path) -> Digests:
    """Of the weights it was imported from. Raises DataError where there are none, or damaged
    ones.
    """
    try:
        return parse_digests(read_json(checkpoint / DIGESTS))
    except DataError as e:
        raise DataError(f"{checkpoint}: {e}") from e


# ---- log-probs -----------------------------------------------------------------------------------


def compare_logprobs(weights: Path, hf: Path, spec: ModelSpec, available: int | None = None) -> str:
    """A line on log-probs of a fixed sequence, by Megatron's model of ``weights`` and by
    transformers' of ``hf``: the largest difference, or why they were not compared. ``available``:
    bytes of memory; default what this machine has. Raises DataError where they differ by more than
    ``TOLERANCE``, or Megatron cannot load the weights.
    """
    reason = _obstacle(hf, spec, available_memory() if available is None else available)
    if reason:
        return f"log-probs: not compared: {reason}"
    length = min(_TOKENS, spec.max_positions)
    tokens = [str((i * i * 7919 + 31 * i + 1) % spec.vocab) for i in range(length)]
    try:
        theirs, said = _logprobs("transformers", str(hf.resolve()), *tokens)
        if theirs is None:
            return f"log-probs: not compared: transformers cannot load {hf}: {said}"
        ours, said = _logprobs("megatron", str(weights.resolve()), str(hf.resolve()), *tokens)
    except _SlowError as e:
        return f"log-probs: not compared: {e}"
    if ours is None:
        raise DataError(f"{weights}: Megatron cannot compute with it: {said}")
    try:
        return judge_logprobs(ours, theirs)
    except DataError as e:
        raise DataError(f"{weights} and {hf} are not the same model: {e}") from e


def judge_logprobs(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """A line with the largest difference. Raises DataError where it is above ``TOLERANCE``, or no
    number.
    """
    line = f"log-probs of {len(ours)} tokens by Megatron and by transformers, in float32"
    both = zip(ours, theirs, strict=True)
    apart = [abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in both]
    if (largest := max(apart)) > TOLERANCE:
        raise DataError(f"{line}, differ by {largest:.3g}, more than {TOLERANCE:g}")
    return f"{line}: largest difference {largest:.2g} (accepted: {TOLERANCE:g})"


def available_memory() -> int:
    """Bytes that this process can still get: of the machine, of its control group, of its limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = [int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")]
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{n}").read_text()) for n in ("max", "current"))
        stat = dict(x.split() for x in (group / "memory.stat").read_text().splitlines())
        found.append(limit - used + int(stat["inactive_file"]))
    except (OSError, ValueError, KeyError):  # "max", or no such group
        pass
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min(found + ([soft] if soft != resource.RLIM_INFINITY else []))


class _SlowError(Exception):
    """A model takes too long for others to wait for it."""


def _obstacle(hf: Path, spec: ModelSpec, available: int) -> str | None:
    for package in ("megatron", "transformers"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    if read_object(hf / "config.json").get(KEY) is not None:
        return f"{hf} is in FP8, which transformers does not compute without a GPU"
    needed = 2 * 4 * sum(math.prod(t.shape) for t in mapping_for(spec).hf_spec())
    if needed > available:
        found = f"{needed / 1e9:.2f} GB are needed, {available / 1e9:.2f} GB are available"
        return f"twice the weights in float32 do not fit into memory: {found}"
    return None


def _logprobs(*arguments: str) -> tuple[list[float] | None, str]:
    """(log-probs, or None; what was said last)."""
    command = [sys.executable, "-m", "megarl.model_logprobs", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, cwd=_HERE
        )
    except subprocess.TimeoutExpired as e:
        raise _SlowError(f"no answer by {arguments[0]} within {_TIMEOUT_S} s") from e
    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if done.returncode:
        return None, said
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found, said
