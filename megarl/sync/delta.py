"""Weight pushes that carry what changed: what a sender keeps, and what travels. No I/O.

``ops/delta.py`` has the encoding of one tensor, docs/weight-delta.md the whole of it.

1. A sender keeps every tensor that it sends, in the form in which it last went out, with its digest
   (``Base``). That is one more copy of what this sender sends, in host memory.
2. Servers say what they hold by a digest of every name; ``held_by_all`` is what all of a push hold
   alike. A change is sent of a name whose base is that; of any other, the tensor. So there are no
   versions to trust, and nothing to undo after a failure: whatever a base or a server has become,
   its digests say it.
3. Such a bucket travels in an envelope, which any server can receive: two tensors u8,
   ``megarl.delta``, the payloads one after another, and ``megarl.delta.header``, JSON with names,
   dtypes and shapes of the tensors, and ``deltas``: for each null, or ``[bytes of its payload,
   digest of its base]``. A tensor that travels whole is its bytes.
4. A receiver changes only what it knows to be the base: its own digest of the name has to be the
   one in the message. It digests the tensor afterwards, as it digests those that came whole; both
   ends compare digests of tensors, and none of payloads.
5. A server's reply to what it holds names only what it can change: tensors that it has kept.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megarl.errors import SyncError
from megarl.ops import delta_apply_, delta_encode_, digest
from megarl.protocols import Bucket
from megarl.sync.stream import Piece, dtype_name, dtype_of, push_digest
from megarl.types import Delta, TensorSpec

PAYLOADS, HEADER = "megarl.delta", "megarl.delta.header"


class Base:
    """What one sender last sent."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}

    @property
    def digests(self) -> Mapping[str, str]:
        return self._digests

    @property
    def digest(self) -> str:
        """Of all of it, as of a push."""
        return push_digest(self._digests)

    @property
    def num_bytes(self) -> int:
        """In host memory."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def encode(self, name: str, tensor: Tensor, held: str | None) -> Piece:
        """``tensor`` as it goes out to servers that hold a tensor of digest ``held`` under this
        name, None where they do not hold one and the same. It is what was last sent from now on.

        Any shape and strides; a change goes out only of elements of 1, 2 or 4 bytes.
        """
        now = tensor.detach().contiguous()
        found, spec = digest(now), TensorSpec(name, tuple(now.shape), dtype_name(now.dtype))
        # Without a digest for as long as its bytes change: it goes whole after an error.
        base, kept = self._digests.pop(name, None), self._tensors.get(name)
        whole = now.reshape(-1).view(torch.uint8)
        payload = whole
        if kept is None or kept.shape != now.shape or kept.dtype != now.dtype:
            self._tensors[name] = now.clone() if now.device.type == "cpu" else now.cpu()
        elif base is None or base != held or now.element_size() > 4:
            kept.copy_(now)
        else:
            payload = delta_encode_(kept, now.cpu()).to(now.device)
            if payload.numel() < whole.numel():  # else it is the tensor, which needs no base
                spec = replace(spec, delta=Delta(payload.numel(), base))
        self._digests[name] = found
        return Piece(spec, payload, found)

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Gives the memory of these names back, of all without ``names``. They go whole next."""
        for name in list(self._tensors) if names is None else names:
            self._tensors.pop(name, None)
            self._digests.pop(name, None)


def changes(groups: Iterable[Bucket], base: Base, held: Mapping[str, str]) -> Iterator[list[Piece]]:
    """Of tensors, what servers need that all hold what ``held`` says (digests by name)."""
    for group in groups:
        yield [base.encode(name, tensor, held.get(name)) for name, tensor in group]


def held_by_all(replies: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Of servers' digests by name, those that are the same on all of them."""
    if not replies:
        return {}
    first, *others = replies
    return {n: d for n, d in first.items() if all(other.get(n) == d for other in others)}


def decode(spec: TensorSpec, payload: Tensor, old: Tensor, held: str | None) -> Tensor:
    """Makes ``old``, of digest ``held``, the tensor that ``spec`` and ``payload`` u8 say, in place;
    returns it. ``payload`` may begin at any byte of a bucket; both on one device.

    Raises SyncError, and leaves ``old`` as it is, where the payload is none for this tensor, or was
    made for another than it is; ``held`` None: nobody knows what it is.
    """
    if (tuple(old.shape), dtype_name(old.dtype)) != (spec.shape, spec.dtype):
        raise SyncError(
            f"weights: {spec.name}: found {(spec.shape, spec.dtype)}; "
            f"accepted: {(tuple(old.shape), dtype_name(old.dtype))}"
        )
    expected = wire_spec(spec).shape[0]
    if payload.dtype != torch.uint8 or payload.shape != (expected,):
        found = f"{payload.dtype} {list(payload.shape)}"
        raise SyncError(f"weights: {spec.name}: found {found}; accepted: {expected} bytes u8")
    if spec.delta is not None and spec.delta.base != held:
        raise SyncError(
            f"weights: {spec.name} came as a change of {spec.delta.base}, "
            f"but what is held is {held or 'unknown'}"
        )
    place = old.contiguous()  # `old` itself, but for views that are not
    if spec.delta is None:
        place.view(-1).view(torch.uint8).copy_(payload)
    else:
        try:
            delta_apply_(place, payload)
        except RuntimeError as error:
            why = str(error).rpartition("delta_apply_: ")[2]
            raise SyncError(f"weights: {spec.name}: {why}") from error
    if place is not old:
        old.copy_(place)
    return old


def whole(spec: TensorSpec, payload: Tensor) -> Tensor:
    """The tensor whose bytes a payload is. Raises SyncError where it is a change of one."""
    if spec.delta is not None:
        raise SyncError(f"weights: {spec.name} came as a change, and is not held")
    return payload.clone().view(dtype_of(spec.dtype)).view(spec.shape)


# --- in messages ----------------------------------------------------------------------------------


def wire_spec(spec: TensorSpec) -> TensorSpec:
    """What travels of it in a bucket: bytes."""
    count = math.prod(spec.shape) * dtype_of(spec.dtype).itemsize
    return TensorSpec(spec.name, (spec.delta.num_bytes if spec.delta else count,), "uint8")


def seal(
    flat: Tensor, specs: Sequence[TensorSpec], buffer: Tensor | None = None
) -> tuple[Tensor, list[TensorSpec]]:
    """A bucket of ``specs``, whose payloads are ``flat`` u8, in its envelope: in ``buffer``, whose
    beginning they are, where that has room for it.
    """
    told = {
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
        "deltas": deltas_of(specs),
    }
    header = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
    outer = [
        TensorSpec(PAYLOADS, (flat.numel(),), "uint8"),
        TensorSpec(HEADER, (header.numel(),), "uint8"),
    ]
    size = flat.numel() + header.numel()
    if buffer is None or buffer.numel() < size:
        return torch.cat([flat, header.to(flat.device)]), outer
    buffer[flat.numel() : size] = header
    return buffer[:size], outer


def is_sealed(specs: Sequence[TensorSpec]) -> bool:
    return [spec.name for spec in specs] == [PAYLOADS, HEADER]


def unseal(flat: Tensor, specs: Sequence[TensorSpec]) -> list[tuple[TensorSpec, Tensor]]:
    """(spec, payload u8) of every tensor of an envelope. Raises SyncError where it says what
    cannot be.
    """
    size = math.prod(specs[0].shape)
    inner = _inner(flat[size:].cpu().numpy().tobytes())
    sizes = [wire_spec(spec).shape[0] for spec in inner]
    if sum(sizes) != size:
        raise SyncError(f"{PAYLOADS}: {size} bytes; its header tells of {sum(sizes)}")
    return list(zip(inner, flat[:size].split(sizes), strict=True))


def _inner(header: bytes) -> list[TensorSpec]:
    try:
        told = json.loads(header)
        specs = [
            TensorSpec(str(name), tuple(map(int, shape)), str(dtype))
            for name, dtype, shape in zip(
                told["names"], told["dtypes"], told["shapes"], strict=True
            )
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise SyncError(f"{HEADER}: found {header[:80]!r}; accepted: JSON of specs") from error
    return with_deltas(specs, told.get("deltas"))


def deltas_of(specs: Iterable[TensorSpec]) -> list[list[Any] | None]:
    """``deltas`` of a message, for JSON."""
    found = (spec.delta for spec in specs)
    return [None if delta is None else [delta.num_bytes, delta.base] for delta in found]


def with_deltas(specs: Sequence[TensorSpec], deltas: Any) -> list[TensorSpec]:
    """The specs of a message whose ``deltas`` came from JSON. Raises SyncError where they are not
    of its tensors.
    """
    if not isinstance(deltas, list) or len(deltas) != len(specs):
        raise SyncError(f"deltas: found {deltas!r:.100}; accepted: a list of {len(specs)} entries")
    return [
        replace(spec, delta=_delta(spec, entry)) for spec, entry in zip(specs, deltas, strict=True)
    ]


def _delta(spec: TensorSpec, entry: Any) -> Delta | None:
    if entry is None:
        return None
    most = wire_spec(replace(spec, delta=None)).shape[0]
    match entry:
        case [int(size), str(base)] if not isinstance(size, bool) and 0 <= size <= most:
            return Delta(size, base)
    raise SyncError(
        f"deltas: {spec.name}: found {entry!r:.100}; accepted: null, or [at most {most} bytes, "
        "digest]"
    )
