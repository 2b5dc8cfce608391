"""The tensors of a distributed checkpoint (torch_dist) on disk, read chunk by chunk, in no layout.

``.metadata`` says of every tensor its shape, its dtype and its chunks, and of every chunk in which
file it lies and where. Chunks are as the ranks that wrote them had them.
"""

import io
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megarl.errors import DataError
from megarl.models.sharded import Place

_PIECE = 2**20  # bytes read at once


def read_metadata(folder: Path) -> Metadata:
    """Raises DataError where there is no such checkpoint. The file is a pickle."""
    for name in ("metadata.json", ".metadata"):
        if not (folder / name).is_file():
            raise DataError(f"{folder} is not a Megatron distributed checkpoint (no {name})")
    return FileSystemReader(folder).read_metadata()


class StoredWeights:
    """The tensors of a distributed checkpoint; nothing but ``.metadata`` is in memory until
    ``read``.
    """

    def __init__(self, folder: Path) -> None:
        """Raises DataError where there is no such checkpoint."""
        self.folder = folder
        metadata = read_metadata(folder)
        self._where: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        self._tensors = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        self._sizes = {
            MetadataIndex(key, chunk.offsets): chunk.sizes
            for key, tensor in self._tensors.items()
            for chunk in tensor.chunks
        }

    def check(self, places: Sequence[Place]) -> None:
        """Raises DataError with every tensor that is missing or has another shape."""
        faults = []
        for key, shape in {place.key: place.shape for place in places}.items():
            if key not in self._tensors:
                faults.append(f"missing {key} {list(shape)}")
            elif tuple(self._tensors[key].size) != shape:
                found = list(self._tensors[key].size)
                faults.append(f"{key}: found {found}; the model's is {list(shape)}")
        if faults:
            shown = [*faults[:20], f"and {len(faults) - 20} more"] if len(faults) > 20 else faults
            title = f"{self.folder}: tensors and model do not fit ({len(faults)} faults)"
            raise DataError("\n  ".join([title, *shown]))

    def read(self, place: Place) -> Tensor:
        """The whole parameter, in the dtype of ``place``. Raises DataError where parts of it are
        missing.
        """
        dtype = getattr(torch, place.dtype)
        whole = MetadataIndex(place.key, place.chunks[0].offsets)
        if len(place.chunks) == 1 and self._sizes.get(whole) == place.chunks[0].sizes:
            return self._load(whole).view(place.parameter).to(dtype)
        found = torch.empty(place.parameter, dtype=dtype)
        for chunk in place.chunks:
            rows = found[chunk.begin : chunk.end].view(chunk.sizes)
            self._fill(rows, place.key, chunk.offsets)
        return found

    def _fill(self, target: Tensor, key: str, offsets: Sequence[int]) -> None:
        """``target`` begins at ``offsets`` of tensor ``key``."""
        count = 0
        for index in self._overlapping(key, offsets, target.shape):
            assert index.offset is not None
            sizes = self._sizes[index]
            first = [max(a, b) for a, b in zip(offsets, index.offset, strict=True)]
            here, there = _ends(offsets, target.shape), _ends(index.offset, sizes)
            last = [min(a, b) for a, b in zip(here, there, strict=True)]
            part = target[_within(offsets, first, last)]
            part.copy_(self._load(index)[_within(index.offset, first, last)])
            count += part.numel()
        if count != target.numel():
            missing = f"{target.numel() - count} of {target.numel()} values at {list(offsets)}"
            raise DataError(f"{self.folder}: {key} lacks {missing}")

    def _overlapping(
        self, key: str, offsets: Sequence[int], sizes: Sequence[int]
    ) -> list[MetadataIndex]:
        """The chunks that hold a part of a region."""
        same = MetadataIndex(key, offsets)
        if self._sizes.get(same) == torch.Size(sizes):
            return [same]
        return [
            MetadataIndex(key, chunk.offsets)
            for chunk in self._tensors[key].chunks
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            )
        ]

    def _load(self, index: MetadataIndex) -> Tensor:
        """One chunk."""
        where = self._where[index]
        path = self.folder / where.relative_path
        with path.open("rb") as file:
            try:
                tensor = _load_tensor(cast(IO[bytes], _Part(file, where.offset, where.length)))
            except (zipfile.BadZipFile, RuntimeError, EOFError) as e:
                what = f"{index.fqn} at {list(index.offset or ())}"
                raise DataError(f"{path}: {what} is damaged ({e})") from e
        return tensor.view(self._sizes[index])


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
    buffer = bytearray(like.untyped_storage().nbytes())
    with zipfile.ZipFile(stream) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/data/0"))
        with archive.open(name) as data:
            begin = 0
            while piece := data.read(_PIECE):  # the last checks the checksum
                buffer[begin : begin + len(piece)] = piece
                begin += len(piece)
    if begin != like.untyped_storage().nbytes():
        raise EOFError(f"{begin} bytes of {like.untyped_storage().nbytes()}")
    values = torch.frombuffer(buffer, dtype=like.dtype)
    return values.as_strided(like.shape, like.stride(), like.storage_offset())


def _ends(offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
    return [offset + size for offset, size in zip(offsets, sizes, strict=True)]


def _within(offsets: Sequence[int], first: Sequence[int], last: Sequence[int]) -> tuple[slice, ...]:
    """Of a tensor that begins at ``offsets``, the entries from ``first`` to before ``last``."""
    return tuple(slice(p - a, q - a) for a, p, q in zip(offsets, first, last, strict=True))
