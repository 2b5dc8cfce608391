"""Buckets of changes: the two tensors that one travels in, and what lies in them.

docs/weight-delta.md of megarl has the form. `megarl.delta` u8: payloads one after another, at any
byte. `megarl.delta.header` u8, JSON: `names`, `dtypes`, `shapes` of the tensors, and `deltas`, an
entry for each: null for a tensor's own bytes, or `[bytes of the payload, digest of what it
changes]`.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

PAYLOADS, HEADER = "megarl.delta", "megarl.delta.header"


class DeltaError(RuntimeError):
    """A bucket of changes that cannot be taken."""


class Entry(NamedTuple):
    """A tensor to be. `payload` u8: its bytes, where `base` is None; else what is done to one of
    that digest.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    base: str | None
    payload: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Of the tensor."""
        return _num_bytes(self.shape, self.dtype)

    def whole(self) -> torch.Tensor:
        """The tensor, of one that came whole."""
        return self.payload.clone().view(self.dtype).view(self.shape)


class Envelope(NamedTuple):
    entries: list[Entry]
    identity: tuple[int, bytes]  # of this bucket, for as long as its memory lasts
    device: torch.device  # that it came to


def is_sealed(weights: object) -> bool:
    return isinstance(weights, list | tuple) and [w[0] for w in weights] == [PAYLOADS, HEADER]


def unseal(weights: Sequence[tuple[str, torch.Tensor]]) -> Envelope:
    """Raises DeltaError where it says what cannot be."""
    (_, payloads), (_, header) = weights
    raw = header.cpu().numpy().tobytes()
    try:
        told = json.loads(raw)
        columns = [told[key] for key in ("names", "dtypes", "shapes", "deltas")]
        entries, at = [], 0
        for name, dtype, shape, delta in zip(*columns, strict=True):
            entry = _entry(str(name), str(dtype), shape, delta, payloads, at)
            entries.append(entry)
            at += entry.payload.numel()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DeltaError(f"{HEADER}: found {raw[:80]!r} ({error})") from error
    if at != payloads.numel():
        raise DeltaError(f"{PAYLOADS}: {payloads.numel()} bytes; its header tells of {at}")
    return Envelope(entries, (payloads.data_ptr(), raw), payloads.device)


def _entry(name: str, dtype: str, shape: Any, delta: Any, payloads: torch.Tensor, at: int) -> Entry:
    kind, sizes = getattr(torch, dtype), tuple(map(int, shape))
    size, base = (
        (_num_bytes(sizes, kind), None) if delta is None else (int(delta[0]), str(delta[1]))
    )
    if size < 0 or at + size > payloads.numel():
        raise ValueError(f"{name}: {size} bytes at {at} of {payloads.numel()}")
    return Entry(name, sizes, kind, base, payloads[at : at + size])


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
