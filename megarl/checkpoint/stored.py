"""The tensors of a distributed checkpoint (torch_dist) on disk, read chunk by chunk, in no layout.

``.metadata`` says of every tensor its shape, its dtype and its chunks, and of every chunk in which
file it lies and where. Chunks are as the ranks that wrote them had them.
"""

import io
import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from megarl.errors import DataError
from megarl.models.dist_metadata import Sizes, StoredChunk, read_metadata
from megarl.models.sharded import Place

_PIECE = 2**20  # bytes read at once


class StoredWeights:
    """The tensors of a distributed checkpoint; nothing but ``.metadata`` is in memory until
    ``read``.
    """

    def __init__(self, folder: Path) -> None:
        """Raises DataError where there is no such checkpoint, or ``.metadata`` cannot be used."""
        self.folder = folder
        self._tensors = read_metadata(folder).tensors
        self._chunks = {
            (key, chunk.offsets): chunk
            for key, tensor in self._tensors.items()
            for chunk in tensor.chunks
        }

    def check(self, places: Sequence[Place]) -> None:
        """Raises DataError with tensors that are missing or have another shape."""
        faults = self.faults(places)
        if faults:
            shown = [*faults[:20], f"and {len(faults) - 20} more"] if len(faults) > 20 else faults
            title = f"{self.folder}: tensors and model do not fit ({len(faults)} faults)"
            raise DataError("\n  ".join([title, *shown]))

    def faults(self, places: Sequence[Place]) -> list[str]:
        """Every tensor that is missing or has another shape."""
        faults = []
        for key, shape in {place.key: place.shape for place in places}.items():
            if key not in self._tensors:
                faults.append(f"missing {key} {list(shape)}")
            elif self._tensors[key].shape != shape:
                found = list(self._tensors[key].shape)
                faults.append(f"{key}: found {found}; the model's is {list(shape)}")
        return faults

    def read(self, place: Place) -> Tensor:
        """The whole parameter, in the dtype of ``place``. Raises DataError where parts of it are
        missing.
        """
        dtype = getattr(torch, place.dtype)
        only = self._same(place.key, place.chunks[0].offsets, place.chunks[0].sizes)
        if len(place.chunks) == 1 and only is not None:
            return read_chunk(self.folder, place.key, only).view(place.parameter).to(dtype)
        found = torch.empty(place.parameter, dtype=dtype)
        for chunk in place.chunks:
            rows = found[chunk.begin : chunk.end].view(chunk.sizes)
            self._fill(rows, place.key, chunk.offsets)
        return found

    def _same(self, key: str, offsets: Sizes, sizes: Sizes) -> StoredChunk | None:
        chunk = self._chunks.get((key, offsets))
        return chunk if chunk is not None and chunk.sizes == sizes else None

    def _fill(self, target: Tensor, key: str, offsets: Sizes) -> None:
        """``target`` begins at ``offsets`` of tensor ``key``."""
        count = 0
        for chunk in self._overlapping(key, offsets, tuple(target.shape)):
            first = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
            here, there = _ends(offsets, target.shape), _ends(chunk.offsets, chunk.sizes)
            last = [min(a, b) for a, b in zip(here, there, strict=True)]
            part = target[_within(offsets, first, last)]
            part.copy_(read_chunk(self.folder, key, chunk)[_within(chunk.offsets, first, last)])
            count += part.numel()
        if count != target.numel():
            missing = f"{target.numel() - count} of {target.numel()} values at {list(offsets)}"
            raise DataError(f"{self.folder}: {key} lacks {missing}")

    def _overlapping(self, key: str, offsets: Sizes, sizes: Sizes) -> list[StoredChunk]:
        """The chunks that hold a part of a region."""
        same = self._same(key, offsets, sizes)
        if same is not None:
            return [same]
        return [c for c in self._tensors[key].chunks if overlap(offsets, sizes, c)]


def overlap(offsets: Sizes, sizes: Sizes, chunk: StoredChunk) -> bool:
    """Whether the region of ``sizes`` from ``offsets`` on and the chunk share an element."""
    return all(
        a < b + m and b < a + n
        for a, n, b, m in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
    )


def read_chunk(folder: Path, key: str, chunk: StoredChunk) -> Tensor:
    """One chunk of tensor ``key``, checked against its checksum. Raises DataError where its file is
    missing or cut short, or it is damaged or of another size.
    """
    path, where = folder / chunk.where.file, chunk.where
    what = f"{path}: {key} at {list(chunk.offsets)}"
    try:
        with path.open("rb") as file:
            tensor = _load_tensor(cast(IO[bytes], _Part(file, where.begin, where.length)))
    except OSError as e:
        raise DataError(f"{what} cannot be read ({e.strerror or e})") from e
    except Exception as e:  # whatever readers of zip files, pickles and tensors raise
        raise DataError(f"{what} is damaged ({str(e).partition(chr(10))[0]})") from e
    if tensor.numel() != math.prod(chunk.sizes):
        raise DataError(f"{what}: found {list(tensor.shape)}; expected {list(chunk.sizes)}")
    return tensor.view(chunk.sizes)


class _Part(io.RawIOBase):
    """``length`` bytes of a file, from ``begin`` on, as a file of their own."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        super().__init__()
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(f"seek to {base + offset}")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._begin + self._at)
        data = self._file.read(len(wanted))
        wanted[: len(data)] = data
        self._at += len(data)
        return len(data)


def _load_tensor(stream: IO[bytes]) -> Tensor:
    """What ``torch.save`` wrote, checked against its checksum. torch's own reader would hold the
    bytes twice.
    """
    like: Tensor = torch.load(stream, map_location="meta", weights_only=True)
    wanted = like.untyped_storage().nbytes()
    with zipfile.ZipFile(stream) as archive:
        (entry,) = (e for e in archive.infolist() if e.filename.endswith("/data/0"))
        if not wanted == entry.file_size == entry.compress_size:
            raise EOFError(f"{entry.file_size} bytes of {wanted}")
        buffer = bytearray(wanted)
        with archive.open(entry) as data:
            begin = 0
            while piece := data.read(_PIECE):  # the last checks the checksum
                buffer[begin : begin + len(piece)] = piece
                begin += len(piece)
    values = torch.frombuffer(buffer, dtype=like.dtype)
    return values.as_strided(like.shape, like.stride(), like.storage_offset())


def _ends(offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
    return [offset + size for offset, size in zip(offsets, sizes, strict=True)]


def _within(offsets: Sequence[int], first: Sequence[int], last: Sequence[int]) -> tuple[slice, ...]:
    """Of a tensor that begins at ``offsets``, the entries from ``first`` to before ``last``."""
    return tuple(slice(p - a, q - a) for a, p, q in zip(offsets, first, last, strict=True))
