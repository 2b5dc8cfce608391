"""Tensors into size-capped flat buckets, as they come.

1. A group is what a server must get in one call: a matrix and its scales, parts that its loader
   fuses. It is never split. Every name goes into exactly one bucket, once.
2. A bucket holds at most ``max_bytes``; a group that is larger by itself travels alone.
3. Flat, a bucket is its tensors' raw bytes one after another, so that offsets follow from what
   the tensors are. A tensor begins at a multiple of its item size: inside a group wider types come
   first, and a group that would begin wrong begins the next bucket.
4. Two buffers take turns: while a bucket is on its way, the next one is filled. A bucket's bytes
   stay until the one after the next is asked for.
5. A tensor's digest is of its bytes where they came from, before they are copied.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.errors import SyncError
from megarl.ops.digest import digest_partial, finish
from megarl.protocols import Bucket
from megarl.sync.stream import flatten, specs_of
from megarl.types import TensorSpec


@dataclass(frozen=True)
class Packed:
    """``flat``: u8 [bytes of all tensors], in the order of ``specs``; ``digests`` by name."""

    flat: Tensor
    specs: tuple[TensorSpec, ...]
    digests: Mapping[str, str]


@dataclass
class Packer:
    """``device``: where buckets are sent from."""

    max_bytes: int
    device: torch.device
    digest_seconds: float = 0.0  # spent so far, on the thread that packs
    _buffers: list[Tensor] = field(default_factory=list)

    def pack(self, groups: Iterable[Bucket]) -> Iterator[Packed]:
        """Reads no further ahead than one group. Raises SyncError when a name comes again."""
        seen: set[str] = set()
        turn, filling = 0, _Filling()
        for group in groups:
            _once(group, seen)
            group = sorted(group, key=lambda item: -item[1].element_size())
            size = sum(tensor.nbytes for _, tensor in group)
            if size > self.max_bytes:
                yield self._alone(group)
                continue
            widest = max((tensor.element_size() for _, tensor in group), default=1)
            full = filling.size + size > self.max_bytes or filling.size % widest
            if filling.tensors and full:
                yield self._close(filling, self._buffer(turn))
                turn, filling = 1 - turn, _Filling()
            self._fill(filling, group, self._buffer(turn))
        if filling.tensors:
            yield self._close(filling, self._buffer(turn))

    def free(self) -> None:
        """Gives the buffers back; the next bucket makes new ones."""
        self._buffers.clear()

    def _buffer(self, turn: int) -> Tensor:
        while len(self._buffers) <= turn:
            pinned = self.device.type == "cpu" and torch.cuda.is_available()
            self._buffers.append(
                torch.empty(
                    self.max_bytes, dtype=torch.uint8, device=self.device, pin_memory=pinned
                )
            )
        return self._buffers[turn]

    def _fill(self, filling: "_Filling", group: Bucket, buffer: Tensor) -> None:
        for name, tensor in group:
            filling.partials.append(self._partial(tensor))
            end = filling.size + tensor.nbytes
            place = buffer[filling.size : end].view(tensor.dtype)
            place.copy_(tensor.detach().reshape(-1), non_blocking=True)
            filling.tensors.append(specs_of([(name, tensor)])[0])
            filling.size = end
            filling.elsewhere |= tensor.device != buffer.device

    def _close(self, filling: "_Filling", buffer: Tensor) -> Packed:
        digests = self._digests(filling.tensors, filling.partials)
        if filling.elsewhere:
            torch.cuda.current_stream().synchronize()  # the copies, which nothing else waits for
        return Packed(buffer[: filling.size], tuple(filling.tensors), digests)

    def _alone(self, group: Bucket) -> Packed:
        partials = [self._partial(tensor) for _, tensor in group]
        specs = specs_of(group)
        flat = flatten(group).to(self.device)
        return Packed(flat, tuple(specs), self._digests(specs, partials))

    def _partial(self, tensor: Tensor) -> Tensor:
        start = time.perf_counter()
        partial = digest_partial(tensor)
        self.digest_seconds += time.perf_counter() - start
        return partial

    def _digests(self, specs: list[TensorSpec], partials: list[Tensor]) -> dict[str, str]:
        """Here, all at once, they are waited for."""
        start = time.perf_counter()
        dtypes = [getattr(torch, spec.dtype) for spec in specs]
        digests = {
            spec.name: finish(partial, dtype, spec.shape)
            for spec, partial, dtype in zip(specs, partials, dtypes, strict=True)
        }
        self.digest_seconds += time.perf_counter() - start
        return digests


@dataclass
class _Filling:
    size: int = 0
    tensors: list[TensorSpec] = field(default_factory=list)
    partials: list[Tensor] = field(default_factory=list)
    elsewhere: bool = False  # some tensor lies on another device than the buffer


def _once(group: Bucket, seen: set[str]) -> None:
    for name, _ in group:
        if name in seen:
            raise SyncError(f"weights: {name} was produced twice in one push")
        seen.add(name)
