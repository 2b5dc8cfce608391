"""Digests of a model's tensors under their Hugging Face names, and where a checkpoint keeps them.

A converted checkpoint has ``digests.json`` beside ``model.json``::

    {"format": 1, "tensors": {NAME: {"digest": 16 hex digits, "shape": [...], "dtype": "bfloat16"}}}

1. A digest (``ops/digest.py``) is of a tensor's values **as imported**: in the dtype that the
   checkpoint keeps, so of weights that lie in FP8 blocks it is of what codes and scales stand for,
   and of float32 files of a bfloat16 model of the rounded values.
2. It is of the tensor as Hugging Face files have it. Rows that pad the vocabulary are of no tensor
   and do not count; neither does how experts, gate and up, or heads lie in Megatron.
3. Tensors may come whole, entry by entry or in any other parts, in any order, on any thread or
   process; each element once. ``DigestSum`` says which tensors are not complete.
4. Files repeat the embedding and the head for multi-token prediction layers, or not. Where a
   ``copies`` table says so, a copy that never came has the digest of what it repeats.

Digests find faults. They are no signature: who can change a checkpoint can change them, too.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.errors import DataError
from megarl.ops.digest import PRIME, digest_partial, finish
from megarl.types import TensorSpec

DIGESTS = "digests.json"
_FORMAT = 1


@dataclass(frozen=True)
class TensorDigest:
    """``digest``: 16 hex digits; ``dtype`` like ``"bfloat16"``."""

    digest: str
    shape: tuple[int, ...]
    dtype: str


Digests = dict[str, TensorDigest]  # by Hugging Face name
Sums = dict[str, tuple[int, int]]  # by name: (partial digest, elements), of the parts that came


class DigestSum:
    """Digests of the tensors ``specs``, while their parts come. Threads may share one; processes
    have one each, of which one adds up the others' ``sums``.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], copies: Mapping[str, str] | None = None
    ) -> None:
        """``copies``: tensors that repeat another, and which."""
        self._specs = {spec.name: spec for spec in specs}
        self._copies = {c: of for c, of in (copies or {}).items() if c in self._specs}
        self._sums: Sums = {}
        self._lock = threading.Lock()

    def add(
        self,
        name: str,
        values: Tensor,
        index: int | None = None,
        *,
        offset: Sequence[int] | None = None,
    ) -> None:
        """``values`` are tensor ``name``; or its entry ``index``; or of either the part that begins
        at ``offset``, per dimension. Raises DataError for a tensor or a dtype that is not in
        ``specs``, RuntimeError for a part that is not inside.
        """
        spec = self._specs.get(name)
        if spec is None:
            raise DataError(f"tensor {name} is not part of the model")
        dtype = str(values.dtype).removeprefix("torch.")
        if dtype != spec.dtype:
            raise DataError(f"tensor {name}: found {dtype}; the model's is {spec.dtype}")
        at = [0] * values.dim() if offset is None else list(offset)
        if index is not None:
            values, at = values[None], [index, *at]
        partial = int(digest_partial(values, full_shape=spec.shape, offset=at))
        self._add(name, partial, values.numel())

    def sums(self) -> Sums:
        """What came so far; JSON can hold it."""
        with self._lock:
            return dict(self._sums)

    def merge(self, sums: Mapping[str, Sequence[int]]) -> None:
        """Adds what another process has added up."""
        for name, (partial, count) in sums.items():
            self._add(name, partial, count)

    def digests(self) -> Digests:
        """Of all tensors, in the order of ``specs``. Raises DataError with every tensor of which
        elements are missing or came twice.
        """
        faults, found = [], {}
        for name, spec in self._specs.items():
            source = name if name in self._sums else self._copies.get(name, name)
            partial, count = self._sums.get(source, (0, 0))
            if count != math.prod(spec.shape) or source not in self._sums:
                faults.append(f"{name}: {count} of {math.prod(spec.shape)} elements came")
            digest = finish(partial, getattr(torch, spec.dtype), spec.shape)
            found[name] = TensorDigest(digest, tuple(spec.shape), spec.dtype)
        if faults:
            raise DataError(listing(f"{len(faults)} tensors are not complete:", faults))
        return found

    def _add(self, name: str, partial: int, count: int) -> None:
        with self._lock:
            before, already = self._sums.get(name, (0, 0))
            self._sums[name] = ((before + partial) % PRIME, already + count)


def differences(expected: Digests, found: Digests, *, expects: str, finds: str) -> list[str]:
    """Every tensor that is not the same in both, and how. ``expects``, ``finds``: what to call
    them.
    """
    lines = []
    for name in [*expected, *(n for n in found if n not in expected)]:
        first, second = expected.get(name), found.get(name)
        if first is None or second is None:
            lines.append(f"{name}: only in {expects if second is None else finds}")
        elif (first.shape, first.dtype) != (second.shape, second.dtype):
            kinds = [f"{list(d.shape)} {d.dtype}" for d in (first, second)]
            lines.append(f"{name}: {kinds[0]} in {expects}, {kinds[1]} in {finds}")
        elif first.digest != second.digest:
            lines.append(f"{name}: digest {first.digest} in {expects}, {second.digest} in {finds}")
    return lines


def digests_json(digests: Digests) -> dict[str, Any]:
    """What ``digests.json`` is to hold."""
    tensors = {name: asdict(digest) for name, digest in digests.items()}
    return {"format": _FORMAT, "tensors": tensors}


def parse_digests(value: Mapping[str, Any]) -> Digests:
    """Of the file's JSON object. Raises DataError where it is not what this version writes."""
    tensors = value.get("tensors")
    if value.get("format") != _FORMAT or not isinstance(tensors, dict):
        raise DataError(f"{DIGESTS}: found format {value.get('format')!r}; accepted: {_FORMAT}")
    try:
        return {
            name: TensorDigest(str(d["digest"]), tuple(map(int, d["shape"])), str(d["dtype"]))
            for name, d in tensors.items()
        }
    except (KeyError, TypeError, ValueError) as e:
        raise DataError(f"{DIGESTS} is damaged: {e!r}") from e


def listing(title: str, lines: Sequence[str]) -> str:
    """One a line."""
    return "\n  ".join([title, *lines])
