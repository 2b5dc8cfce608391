"""One chunk of a distributed checkpoint: what ``torch.save`` made of a tensor, a zip archive whose
entries are stored as they are, inside a file of many. torch's own reader would hold its bytes
twice.
"""

import io
import os
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

_PIECE = 2**22  # bytes read at once
_LOCAL_HEADER = 30  # bytes before an entry's name, whose length is at 26 and that of more at 28


def load_chunk(path: Path, begin: int, length: int, into: Tensor | None = None) -> Tensor:
    """The tensor in ``length`` bytes of ``path`` from ``begin`` on, checked against its checksum.

    ``into``: memory that becomes the tensor where it is contiguous and as the tensor is; else, the
    tensor has memory of its own. Raises OSError where the file cannot be read, and whatever readers
    of zip files, pickles and tensors raise where the bytes are damaged.
    """
    with path.open("rb", buffering=0) as file:
        stream = cast(IO[bytes], io.BufferedReader(_Part(file, begin, length)))
        like: Tensor = torch.load(stream, map_location="meta", weights_only=True)
        with zipfile.ZipFile(stream) as archive:
            (entry,) = (e for e in archive.infolist() if e.filename.endswith("/data/0"))
        size = like.untyped_storage().nbytes()
        if not size == entry.file_size == entry.compress_size:  # before memory is taken for it
            raise EOFError(f"{entry.file_size} bytes of {size}")
        if into is not None and _fits(into, like):
            _read(file, stream, begin, entry, into.flatten().view(torch.uint8))
            return into
        raw = torch.empty(size, dtype=torch.uint8)
        _read(file, stream, begin, entry, raw)
        return raw.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())


def _fits(into: Tensor, like: Tensor) -> bool:
    same = into.dtype == like.dtype and into.numel() == like.numel()
    whole = like.untyped_storage().nbytes() == into.numel() * into.element_size()
    return same and whole and into.is_contiguous() and like.is_contiguous()


def _read(
    file: BinaryIO, stream: IO[bytes], begin: int, entry: zipfile.ZipInfo, raw: Tensor
) -> None:
    """The bytes of ``entry`` into ``raw``, in pieces small enough that the checksum finds them in
    the processor's cache.
    """
    stream.seek(entry.header_offset)
    header = stream.read(_LOCAL_HEADER)
    lengths = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    at = begin + entry.header_offset + _LOCAL_HEADER + sum(lengths)
    found, left = 0, raw.numpy().data
    while left:
        count = os.preadv(file.fileno(), [left[:_PIECE]], at)
        if not count:
            raise EOFError(f"{len(left)} bytes are missing")
        found = zlib.crc32(left[:count], found)
        left, at = left[count:], at + count
    if found != entry.CRC:
        raise zipfile.BadZipFile(f"Bad CRC-32: {found:08x}, recorded {entry.CRC:08x}")


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
        count = os.preadv(self._file.fileno(), [wanted], self._begin + self._at) if wanted else 0
        self._at += count
        return count
