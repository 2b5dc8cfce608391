"""The receiving end of a weight push: buckets into a server's weights (``models/live_weights.py``),
wherever their bytes come from.

1. What does not fit is refused before a byte is received.
2. A receive ends by its deadline. After a failure its group is closed: it cannot be used again.
3. A bucket is received when its bytes are here; it is written while others come (arrivals.py). Who
   asks for weights waits until they are written, and gets the error where one could not be.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

from megarl.errors import SyncError
from megarl.models.live_weights import LiveWeights
from megarl.protocols import Bucket
from megarl.sync.arrivals import Arrivals
from megarl.sync.delta import decode, is_sealed, unseal, whole
from megarl.sync.group import is_of_another, join_group, leave_group
from megarl.sync.shared_memory import Maps, Place
from megarl.sync.stream import dtype_of, num_bytes, unflatten
from megarl.types import TensorSpec


class ModelReceiver:
    """Weight groups, and the weights that what arrives is written to."""

    def __init__(self, weights: LiveWeights, *, timeout_s: float = 120.0) -> None:
        """`timeout_s` bounds joining a group and every receive in it, unless the join names its
        own."""
        self.weights = weights
        self._timeout_s = timeout_s
        self._groups: dict[str, tuple[dist.ProcessGroup, str, float]] = {}
        self._arrivals = Arrivals()
        self._coming: set[str] = set()  # received in this update, and perhaps not yet written
        self._counting = Lock()  # of these
        self._maps = Maps()

    def digests(self) -> dict[str, str]:
        """Of what the last update wrote, read back; before the first, of what there is."""
        self._arrivals.settle()
        return self.weights.digests()

    def held(self) -> dict[str, str]:
        """Digests of what changes can be made to."""
        self._arrivals.rest()
        return self.weights.known()

    @property
    def digest_seconds(self) -> float:
        """Spent on digests so far."""
        return self.weights.digest_seconds

    def join_group(
        self,
        *,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        name: str,
        backend: str,
        timeout_s: float | None = None,
    ) -> None:
        """Returns when every member is there; SyncError at the deadline. Groups of an earlier
        trainer, which did not live to have them left, are left.
        """
        if name in self._groups:
            raise SyncError(f"weight group {name!r} exists already; leave it first")
        timeout_s = timeout_s or self._timeout_s
        host = f"[{address.strip('[]')}]" if ":" in address else address
        group = join_group(
            f"{host}:{port}",
            rank=rank,
            world_size=world_size,
            group_name=name,
            backend=backend,
            timeout_s=timeout_s,
        )
        self._groups[name] = (group, backend, timeout_s)
        for other in [other for other in self._groups if is_of_another(other, name)]:
            self._drop(other)

    def leave_group(self, name: str) -> None:
        group, _, _ = self._group(name)
        del self._groups[name]
        leave_group(group)

    def begin(self) -> None:
        """Opens an update; one that was left open is given up, and everything must arrive anew."""
        self._arrivals.begin()
        self._coming.clear()
        self._maps.forget()
        self.weights.begin()

    def receive(
        self, specs: Sequence[TensorSpec], *, group: str, flattened: bool
    ) -> "Future[None]":
        """Takes part in the sender's broadcasts (group rank 0) and writes what arrives. Done when
        it has arrived; over gloo, flattened, that may be after this has returned.

        `flattened`: one broadcast of the whole bucket's bytes; otherwise one of every tensor.
        """
        if not (flattened and is_sealed(specs)):
            self._check(specs)
        device = self._device(self._group(group)[1])
        size = num_bytes(specs)
        if flattened and device.type == "cpu":
            what = f"weight group {group!r}: {len(specs)} tensors from {specs[0].name} on"
            return self._arrivals.take(size, partial(self._fetched, specs, group), what)
        if flattened:
            room = torch.empty(size, dtype=torch.uint8, device=device)
            self.take(specs, self.fetch(specs, group, room))
        else:
            tensors = [torch.empty(s.shape, dtype=dtype_of(s.dtype), device=device) for s in specs]
            self._broadcasts(tensors, specs, group)
            self._arrivals.settle()
            self._write([(s.name, t) for s, t in zip(specs, tensors, strict=True)])
        return _done()

    def _fetched(
        self, specs: Sequence[TensorSpec], group: str, into: torch.Tensor
    ) -> Callable[[], None]:
        return self._taking(specs, self.fetch(specs, group, into))

    def receive_shared(
        self, specs: Sequence[TensorSpec], place: Mapping[str, Any]
    ) -> "Future[None]":
        """Takes and writes what lies at the beginning of another process's memory: the JSON of a
        ``shared_memory.Place``.
        """
        if not is_sealed(specs):
            self._check(specs)
        where, size = Place.of_json(place), num_bytes(specs)
        if size > where.num_bytes:
            raise SyncError(f"{len(specs)} tensors have {size} bytes, the memory {where.num_bytes}")
        try:
            self.take(specs, self._maps.read(where)[:size])
        except BaseException:
            self._maps.forget()
            raise
        return _done()

    def fetch(self, specs: Sequence[TensorSpec], group: str, into: torch.Tensor) -> torch.Tensor:
        """The bytes of a flat bucket from the group's sender, u8 [bytes]: they lie in ``into``, u8
        of as many or more.
        """
        flat = into[: num_bytes(specs)]
        self._broadcasts([flat], specs, group)
        return flat

    def take(self, specs: Sequence[TensorSpec], flat: torch.Tensor) -> None:
        """Writes a flat bucket, u8 [bytes], which may change afterwards, or what changed, if it is
        one of changes. Raises SyncError for one that does not fit; then nothing is written.
        """
        self._arrivals.settle()
        self._taking(specs, flat)()

    def _taking(self, specs: Sequence[TensorSpec], flat: torch.Tensor) -> Callable[[], None]:
        """What writes it, with nothing left to refuse; it is not to be received again."""
        write: Callable[[], None]
        if is_sealed(specs):
            pieces = unseal(flat, specs)
            specs = [spec for spec, _ in pieces]
            write = partial(self._change, pieces)
        else:
            write = partial(self._write, unflatten(flat, specs))
        with self._counting:
            self._check(specs)
            self._coming.update(spec.name for spec in specs)
        return write

    def _check(self, specs: Sequence[TensorSpec]) -> None:
        self.weights.check(specs)
        if again := [spec.name for spec in specs if spec.name in self._coming]:
            raise SyncError(f"weights: {again[0]} was received already in this update")

    def _write(self, tensors: Bucket) -> None:
        for name, tensor in tensors:
            self.weights.write(name, tensor)

    def _change(self, pieces: Sequence[tuple[TensorSpec, torch.Tensor]]) -> None:
        for spec, payload in pieces:
            if spec.name in self.weights.held:
                self.weights.change(spec.name, partial(decode, spec, payload))
            else:  # of a layer that is not served
                self.weights.write(spec.name, whole(spec, payload))

    def end(self) -> None:
        """Closes the update. Raises SyncError when a weight has not been received, or could not be
        written.
        """
        self._arrivals.settle()
        self._maps.forget()
        self.weights.end()

    def close(self) -> None:
        for name in list(self._groups):
            self._drop(name)

    def _broadcasts(
        self, buffers: Sequence[torch.Tensor], specs: Sequence[TensorSpec], name: str
    ) -> None:
        group, _, timeout_s = self._group(name)
        try:
            works = [dist.broadcast(b, group=group, group_src=0, async_op=True) for b in buffers]
            for work in works:
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            self._drop(name)
            raise SyncError(
                f"weight group {name!r}: {len(specs)} tensors from {specs[0].name} on did not "
                f"arrive within {timeout_s:g} s, the group is closed: {error}"
            ) from error

    def _group(self, name: str) -> tuple[dist.ProcessGroup, str, float]:
        if name not in self._groups:
            known = ", ".join(map(repr, self._groups)) or "none"
            raise SyncError(f"weight group: found {name!r}; joined: {known}")
        return self._groups[name]

    def _drop(self, name: str) -> None:
        group, _, _ = self._groups.pop(name, (None, "", 0.0))  # it may have been left meanwhile
        if group is None:
            return
        with contextlib.suppress(RuntimeError, ValueError):  # it is broken already
            leave_group(group)

    def _device(self, backend: str) -> torch.device:
        return self.weights.device if backend == "nccl" else torch.device("cpu")


def _done() -> "Future[None]":
    done: Future[None] = Future()
    done.set_result(None)
    return done
