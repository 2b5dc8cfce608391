"""Tensors into size-capped flat buckets, as they come.

1. A group is what a server must get in one call: a matrix and its scales, parts that its loader
   fuses. It is never split. Every name goes into exactly one bucket, once.
2. A bucket holds at most ``max_bytes``; a group that is larger by itself travels alone.
3. Flat, a bucket is its tensors' raw bytes one after another, so that offsets follow from what
   the tensors are. A tensor begins at a multiple of its item size: inside a group wider types come
   first, and a group that would begin wrong begins the next bucket.
4. Two buffers take turns: while a bucket is on its way, the next one is filled. A bucket's bytes
   stay until the one after the next is asked for.
5. A tensor's digest is of its bytes where they came from, as they are read to be copied.
6. A push of changes has its buckets in envelopes (delta.py), which say what is in them.
7. A carrier may say where buckets lie (``allocate``): in memory that servers can read.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.errors import SyncError
from megarl.ops.digest import digest_copy_, digest_partial, finish
from megarl.sync.delta import seal
from megarl.sync.stream import Piece, dtype_of, laid_flat
from megarl.types import TensorSpec

_ROOM = 2**21  # behind a bucket, for an envelope's header: that of some 10,000 tensors


@dataclass(frozen=True)
class Packed:
    """``flat``: u8 [bytes of all tensors], in the order of ``specs``; ``digests`` by name."""

    flat: Tensor
    specs: tuple[TensorSpec, ...]
    digests: Mapping[str, str]


def described(bucket: Packed) -> dict[str, Any]:
    """What a receiver is told of it, in SGLang's fields."""
    return {
        "names": [spec.name for spec in bucket.specs],
        "dtypes": [spec.dtype for spec in bucket.specs],
        "shapes": [list(spec.shape) for spec in bucket.specs],
    }


@dataclass
class Packer:
    """``device``: where buckets are sent from; ``sealed``: in envelopes. ``allocate``: memory for
    them, u8 [bytes]; None where any will do.
    """

    max_bytes: int
    device: torch.device
    sealed: bool = False
    allocate: Callable[[int], Tensor | None] = lambda num_bytes: None
    digest_seconds: float = 0.0  # so far, on the thread that packs: digests, and copies beside them
    _buffers: list[Tensor] = field(default_factory=list)

    def pack(self, groups: Iterable[list[Piece]]) -> Iterator[Packed]:
        """Reads no further ahead than one group. Raises SyncError when a name comes again."""
        seen: set[str] = set()
        turn, filling = 0, _Filling()
        for group in groups:
            _once(group, seen)
            group = sorted(group, key=lambda piece: -piece.payload.element_size())
            size = sum(piece.payload.nbytes for piece in group)
            if size > self.max_bytes:
                yield self._alone(group)
                continue
            widest = max((piece.payload.element_size() for piece in group), default=1)
            full = filling.size + size > self.max_bytes or filling.size % widest
            if filling.pieces and full:
                yield self._close(filling, self._buffer(turn))
                turn, filling = 1 - turn, _Filling()
            self._fill(filling, group, self._buffer(turn))
        if filling.pieces:
            yield self._close(filling, self._buffer(turn))

    def free(self) -> None:
        """Gives the buffers back; the next bucket makes new ones."""
        self._buffers.clear()

    def _buffer(self, turn: int) -> Tensor:
        while len(self._buffers) <= turn:
            self._buffers.append(self._new(self.max_bytes + _ROOM * self.sealed))
        return self._buffers[turn]

    def _new(self, num_bytes: int) -> Tensor:
        if (memory := self.allocate(num_bytes)) is not None:
            return memory
        pinned = self.device.type == "cpu" and torch.cuda.is_available()
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device, pin_memory=pinned)

    def _fill(self, filling: "_Filling", group: list[Piece], buffer: Tensor) -> None:
        for piece in group:
            end = filling.size + piece.payload.nbytes
            place = buffer[filling.size : end].view(piece.payload.dtype)
            filling.pieces.append((piece.spec, self._copy(piece, place.view(piece.payload.shape))))
            filling.size = end
            filling.elsewhere |= piece.payload.device != buffer.device

    def _close(self, filling: "_Filling", buffer: Tensor) -> Packed:
        if filling.elsewhere:
            torch.cuda.current_stream().synchronize()  # the copies, which nothing else waits for
        return self._packed(buffer[: filling.size], filling.pieces, buffer)

    def _alone(self, group: list[Piece]) -> Packed:
        size = sum(piece.payload.nbytes for piece in group)
        if (memory := self.allocate(size + _ROOM * self.sealed)) is not None:
            filling = _Filling()
            self._fill(filling, group, memory)
            return self._close(filling, memory)
        digests = [(piece.spec, self._digest(piece, digest_partial)) for piece in group]
        flat = laid_flat([piece.payload for piece in group]).to(self.device)
        return self._packed(flat, digests)

    def _packed(self, flat: Tensor, pieces: "_Digested", buffer: Tensor | None = None) -> Packed:
        """``flat`` is the beginning of ``buffer``. Digests that a device is still at are waited for
        here, all at once.
        """
        specs, start = [spec for spec, _ in pieces], time.perf_counter()
        digests = {
            spec.name: found
            if isinstance(found, str)
            else finish(found, dtype_of(spec.dtype), spec.shape)
            for spec, found in pieces
        }
        self.digest_seconds += time.perf_counter() - start
        if self.sealed:
            flat, specs = seal(flat, specs, buffer)
            if buffer is not None and flat.data_ptr() != buffer.data_ptr():  # it had no room
                flat = self._new(flat.numel()).copy_(flat)
        return Packed(flat, tuple(specs), digests)

    def _copy(self, piece: Piece, place: Tensor) -> str | Tensor:
        """To ``place``; its digest, or a partial one, perhaps not computed yet."""
        if piece.digest is None:
            return self._digest(piece, partial(digest_copy_, place))
        place.copy_(piece.payload.detach(), non_blocking=True)
        return piece.digest

    def _digest(self, piece: Piece, compute: Callable[[Tensor], Tensor]) -> str | Tensor:
        if piece.digest is not None:
            return piece.digest
        start = time.perf_counter()
        found = compute(piece.payload)
        self.digest_seconds += time.perf_counter() - start
        return found


_Digested = list[tuple[TensorSpec, str | Tensor]]


@dataclass
class _Filling:
    size: int = 0
    pieces: _Digested = field(default_factory=list)
    elsewhere: bool = False  # some tensor lies on another device than the buffer


def _once(group: list[Piece], seen: set[str]) -> None:
    for piece in group:
        if piece.spec.name in seen:
            raise SyncError(f"weights: {piece.spec.name} was produced twice in one push")
        seen.add(piece.spec.name)
