"""Whether a conversion's output is its input: every tensor read back and turned around, and what
the model computes.

Either way memory holds what one mapping rule needs. A caller with several processes gives each
some of the ``names`` and puts together what they return.
"""

import importlib.util
import json
import math
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

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
from megarl.errors import DataError
from megarl.models.config_json import read_object
from megarl.models.hf_fp8 import KEY
from megarl.models.hf_io import HfCheckpoint, open_checkpoint
from megarl.models.mapping import mapping_for
from megarl.models.sharded import megatron_mapping, parameter_names, place_of
from megarl.models.spec import ModelSpec
from megarl.ops.digest import digest

# Of a log-prob. Both sides compute in float32, whatever dtype the weights are in: what differs is
# the order of sums, some 1e-6 of a small model. A term that is wrong makes 1e-2 or more.
TOLERANCE = 1e-3
_TOKENS = 32
_TIMEOUT_S = 3600
_HERE = Path(__file__).parent.parent.parent


# ---- digests -------------------------------------------------------------------------------------


def verify_import(checkpoint: Path, spec: ModelSpec, digests: Digests) -> str:
    """A line that says that the weights of ``checkpoint``, mapped back, have ``digests``. Raises
    DataError with every tensor that has another.
    """
    found = read_back(checkpoint / MEGATRON, spec).digests()
    lines = differences(digests, found, expects="the source", finds="what was written")
    if lines:
        title = f"{checkpoint}: {len(lines)} of {len(digests)} tensors are not what was imported:"
        raise DataError(listing(title, lines))
    return f"verified: {len(found)} tensors, read back, are those of the source"


def read_back(weights: Path, spec: ModelSpec, names: Sequence[str] | None = None) -> DigestSum:
    """Of the distributed checkpoint ``weights`` under Hugging Face names; of all parameters, or of
    ``names``.
    """
    mapping = megatron_mapping(spec)
    stored = StoredWeights(weights)
    sums = DigestSum(mapping.hf_spec(), mapping.copies())
    for name in parameter_names(mapping) if names is None else names:
        index = mapping.slice_of(name)
        for hf, tensor in mapping.to_hf(name, [stored.read(place_of(mapping, name))]):
            sums.add(hf, tensor, index)
    return sums


def verify_export(weights: Path, folder: Path, spec: ModelSpec) -> str:
    """A line that says that Hugging Face folder ``folder``, mapped back, has the parameters of the
    distributed checkpoint ``weights``. Raises DataError with every parameter that it has not.
    """
    lines = export_faults(weights, folder, spec)
    names = parameter_names(megatron_mapping(spec))
    if lines:
        title = f"{folder}: {len(lines)} of {len(names)} parameters are not the checkpoint's:"
        raise DataError(listing(title, lines))
    return f"verified: {len(names)} parameters, read back, are those of the checkpoint"


def export_faults(
    weights: Path, folder: Path, spec: ModelSpec, names: Sequence[str] | None = None
) -> list[str]:
    """Every difference, of all parameters or of ``names``. Rows that pad the vocabulary do not
    count.
    """
    mapping, unpadded = megatron_mapping(spec), mapping_for(spec)
    stored, back = StoredWeights(weights), open_checkpoint(folder)
    lines = []
    for name in parameter_names(mapping) if names is None else names:
        index = mapping.slice_of(name)
        tensors = [back.get(hf, index) for hf in unpadded.hf_names(name)]
        rows = unpadded.full_shape(name)[0]
        expected = digest(stored.read(place_of(mapping, name))[:rows])
        found = digest(unpadded.to_megatron(name, tensors))
        if found != expected:
            lines.append(
                f"{name}: digest {expected} in the checkpoint, {found} in what was written"
            )
    for copy, of in unpadded.copies().items() if names is None else ():
        if _digest(back, copy) != _digest(back, of):
            lines.append(f"{copy}: not what {of} is")
    return lines


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


def _digest(folder: HfCheckpoint, name: str) -> str:
    return digest(folder.get(name))


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
    theirs, said = _logprobs("transformers", str(hf.resolve()), *tokens)
    if theirs is None:
        return f"log-probs: not compared: transformers cannot load {hf}: {said}"
    ours, said = _logprobs("megatron", str(weights.resolve()), str(hf.resolve()), *tokens)
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
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_TIMEOUT_S} s"
    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if done.returncode:
        return None, said
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found, said
