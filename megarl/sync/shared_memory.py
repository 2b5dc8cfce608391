"""Memory that a trainer on the same machine packs buckets into, and servers read them from.

1. The memory is an anonymous file (``memfd``): it has no name that anybody could guess, or that a
   killed process could leave behind, and is no part of /dev/shm, which containers keep small. It is
   gone with the last process that has it.
2. Another process of the same user finds it as ``/proc/PID/fd/FD`` of the one that made it. A place
   says which: process, descriptor, and the file's device and inode, which no other file has. Who
   opens it compares them, and the machine's boot id: another machine, or another container with
   process numbers of its own, is told of in these words.
3. It is sealed against a change of size: no reader can be made to read behind its end. Readers map
   it read-only.
"""

import contextlib
import fcntl
import mmap
import os
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.errors import SyncError
from megarl.protocols import WeightSink
from megarl.sync.packing import Packed, described

_KEPT = 2  # maps of a process: a sender's buffers take turns
_NAME = "megarl-weights"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Place:
    """Where the memory is; ``num_bytes`` of all of it."""

    machine: str
    pid: int
    descriptor: int
    device: int
    inode: int
    num_bytes: int

    @classmethod
    def of_json(cls, found: Any) -> "Place":
        """Raises SyncError for anything else."""
        wanted = {"machine": str, **dict.fromkeys(_NUMBERS, int)}
        if not isinstance(found, Mapping) or {k: type(v) for k, v in found.items()} != wanted:
            kinds = ", ".join(f"{name} ({kind.__name__})" for name, kind in wanted.items())
            raise SyncError(f"place: found {found!r}; accepted: an object of {kinds}")
        return cls(**found)


_NUMBERS = ("pid", "descriptor", "device", "inode", "num_bytes")


class SharedMemory:
    """A ``colocated.Handover``. Each piece of memory lasts as long as tensors in it do."""

    op = "receive_shared"

    def __init__(self) -> None:
        self._places: dict[int, tuple[weakref.ref[mmap.mmap], Place]] = {}  # by address

    def buffer(self, num_bytes: int) -> Tensor:
        """u8 [num_bytes], zeros. Raises OSError where there is no memory for it."""
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            memory = mmap.mmap(descriptor, num_bytes)
            file = os.fstat(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(memory, os.close, descriptor)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        place = Place(machine(), os.getpid(), descriptor, file.st_dev, file.st_ino, num_bytes)
        self._places = {a: kept for a, kept in self._places.items() if kept[0]() is not None}
        self._places[tensor.data_ptr()] = weakref.ref(memory), place
        return tensor

    def refuse(self, sink: WeightSink) -> str:
        """It finds out itself whether it can read the memory, and says so."""
        return ""

    def message(self, bucket: Packed, sink: WeightSink) -> Mapping[str, Any]:
        return {**described(bucket), "place": asdict(self.place(bucket.flat))}

    def failed(self, sink: WeightSink) -> None:
        """What it maps is its own."""

    def place(self, flat: Tensor) -> Place:
        """Of the piece that ``flat`` is the beginning of."""
        memory, place = self._places[flat.data_ptr()]
        assert memory() is not None, place
        return place


class Maps:
    """Other processes' memory, as this one reads it.

    Memory lives as long as somebody maps it, and every bucket that is too large for a sender's two
    buffers has memory of its own. So no more is kept than the last two of each process, until
    ``forget``.
    """

    def __init__(self) -> None:
        self._maps: dict[Place, Tensor] = {}  # the one that was read last is the last

    def read(self, place: Place) -> Tensor:
        """u8 [num_bytes], not to be written to. Raises SyncError where it is not to be had."""
        memory = self._maps.pop(place, None)
        before = [other for other in self._maps if other.pid == place.pid]
        for other in before[: 1 - _KEPT]:
            del self._maps[other]
        self._maps[place] = _map(place) if memory is None else memory
        return self._maps[place]

    def forget(self) -> None:
        self._maps.clear()


def machine() -> str:
    """Another one after every start of this machine's kernel, which all its containers share."""
    return _BOOT_ID.read_text().strip()


def _map(place: Place) -> Tensor:
    here = machine()
    if place.machine != here:
        raise SyncError(
            f"sync.transport=colocated: the trainer is on another machine than this server "
            f"(boot ids {place.machine} and {here}); use broadcast or disk"
        )
    path = f"/proc/{place.pid}/fd/{place.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SyncError(
            f"sync.transport=colocated: the trainer's memory {path} cannot be opened "
            f"({error.strerror}): it has to run as this server's user, and to share its process "
            "numbers with it (one container, or one PID namespace)"
        ) from error
    try:
        _require_same(descriptor, path, place)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # one walk instead of a fault a page
        memory = mmap.mmap(descriptor, place.num_bytes, flags=flags, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    with warnings.catch_warnings():  # that it is read-only: so is what is done with it
        warnings.simplefilter("ignore")
        return torch.frombuffer(memory, dtype=torch.uint8)


def _require_same(descriptor: int, path: str, place: Place) -> None:
    file, seals = os.fstat(descriptor), 0
    with contextlib.suppress(OSError):  # no memory at all
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    found = (file.st_dev, file.st_ino, file.st_size)
    told = (place.device, place.inode, place.num_bytes)
    if found != told or seals & _SEALS != _SEALS:
        raise SyncError(
            f"sync.transport=colocated: {path} is not the trainer's memory: found (device, inode, "
            f"size) {found}, seals {seals}; accepted: {told}, sealed. Process numbers of another "
            "container?"
        )
