"""Named tensors as they travel: laid flat, described, and accounted for by digests.

1. Flat, a bucket is its tensors' raw bytes one after another. A tensor begins at a multiple of its
   item size (packing.py cuts buckets so).
2. A tensor's digest (`megarl.ops.digest`) covers dtype, shape and bytes; a push's digest covers
   every name and its digest. Both ends compute it on their own copy, where that lies.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megarl.errors import SyncError
from megarl.protocols import Bucket
from megarl.types import TensorSpec


@dataclass(frozen=True)
class Piece:
    """A tensor as it travels. ``payload``: the tensor itself, or where ``spec.delta`` says so what
    changed, u8. ``digest`` of the tensor; None: its payload is yet to be digested.
    """

    spec: TensorSpec
    payload: torch.Tensor
    digest: str | None = None


def push_digest(digests: Mapping[str, str]) -> str:
    """One digest for a whole push: sha256 over the lines `name digest`, sorted by name."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def pieces(groups: Iterable[Bucket]) -> Iterator[list[Piece]]:
    """Tensors that travel as they are."""
    for group in groups:
        yield [Piece(spec, t) for spec, (_, t) in zip(specs_of(group), group, strict=True)]


def specs_of(bucket: Bucket) -> list[TensorSpec]:
    """What a receiver must know to take a bucket apart."""
    return [TensorSpec(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in bucket]


def flatten(bucket: Bucket) -> torch.Tensor:
    """The bucket's bytes in order, as one u8 tensor on the tensors' device."""
    offsets_of(specs_of(bucket))
    return laid_flat([tensor for _, tensor in bucket])


def laid_flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their bytes one after another, u8; not a copy of a single one that is contiguous."""
    flat = [_bytes(tensor.detach().contiguous()) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def unflatten(flat: torch.Tensor, specs: Sequence[TensorSpec]) -> Bucket:
    """Views into `flat` under their names: the reverse of `flatten`. Raises SyncError if they do
    not fit."""
    offsets = offsets_of(specs)
    if flat.numel() != offsets[-1]:
        raise SyncError(
            f"a bucket of {len(specs)} tensors has {flat.numel()} bytes, not {offsets[-1]}"
        )
    return [
        (spec.name, flat[start:end].view(dtype_of(spec.dtype)).view(spec.shape))
        for spec, start, end in zip(specs, offsets, offsets[1:], strict=False)
    ]


def num_bytes(specs: Sequence[TensorSpec]) -> int:
    """Bytes of all tensors together."""
    return sum(_size(spec) for spec in specs)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Raises SyncError when torch has no such dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SyncError(f"dtype: found {name!r}; accepted: a torch dtype such as 'bfloat16'")
    return dtype


def offsets_of(specs: Sequence[TensorSpec]) -> list[int]:
    """Where each tensor begins, and the end of the last."""
    offsets = [0]
    for spec in specs:
        if offsets[-1] % dtype_of(spec.dtype).itemsize:
            raise SyncError(
                f"{spec.name}: begins at byte {offsets[-1]} of its bucket, which is no multiple of "
                f"the size of {spec.dtype}; put wider types first"
            )
        offsets.append(offsets[-1] + _size(spec))
    return offsets


def _size(spec: TensorSpec) -> int:
    count = 1
    for extent in spec.shape:
        count *= extent
    return count * dtype_of(spec.dtype).itemsize


def _bytes(contiguous: torch.Tensor) -> torch.Tensor:
    return contiguous.reshape(-1).view(torch.uint8)
