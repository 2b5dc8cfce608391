"""A writer of Megatron's distributed checkpoint format (torch_dist). A checkpoint of weights
is::

    metadata.json        the format's name and version
    .metadata            a pickle: every tensor's shape, dtype and chunks, and where each chunk lies
    __{process}_{thread}.distcp
                         chunks one after another, each as ``torch.save`` writes a tensor; before
                         the first what is not a tensor, of which a model has nothing

Upstream's own writer keeps the last chunk of every tensor until a file is complete (torch 2.13,
``_write_files_from_queue``): its files are written here, its ``.metadata`` by it.
"""

import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megarl.models.dist_metadata import record_checksum
from megarl.models.sharded import Place
from megarl.rundir import write_json

_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON = "common_state/shard_0_1"  # what is not a tensor

# A chunk that lies somewhere: key, offsets, file, first byte, bytes. As JSON has it.
Written = list[Any]


class ChunkFile:
    """One file of chunks, written one after another. Durable when ``close`` returns."""

    def __init__(self, folder: Path, process: int, thread: int) -> None:
        self.name = f"__{process}_{thread}.distcp"
        self.written: list[Written] = []
        self._file = create(folder / self.name)
        if process == thread == 0:
            stream = io.BytesIO()
            torch.save([{}], stream)
            self._add(_COMMON, None, stream.getbuffer())

    def write(self, key: str, offsets: Sequence[int], chunk: Tensor) -> None:
        """``chunk`` is contiguous."""
        self._add(key, list(offsets), _alone(chunk))

    def _add(self, key: str, offsets: list[int] | None, data: Tensor | memoryview) -> None:
        begin = self._file.tell()
        if isinstance(data, Tensor):
            torch.save(data, self._file)
        else:
            self._file.write(data)
        self.written.append([key, offsets, self.name, begin, self._file.tell() - begin])

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def create(path: Path) -> IO[bytes]:
    return path.open("wb")


def finish(folder: Path, places: Iterable[Place], written: Iterable[Written]) -> None:
    """Say of all chunks where they lie; the checkpoint is complete when this returns."""
    results = [
        WriteResult(
            MetadataIndex(key) if offsets is None else MetadataIndex(key, torch.Size(offsets)),
            length,
            _StorageInfo(file, begin, length),
        )
        for key, offsets, file, begin, length in written
    ]
    FileSystemWriter(folder).finish(Metadata(_tensors(places)), [results])
    write_json(folder / "metadata.json", _FORMAT)
    record_checksum(folder)


def _alone(chunk: Tensor) -> Tensor:
    """The same bytes as a tensor of no others: ``torch.save`` writes all of a tensor's memory."""
    if chunk.numel() == 0:
        return chunk.clone()
    raw = chunk.flatten().view(torch.uint8).numpy().data
    return torch.frombuffer(raw, dtype=chunk.dtype).view(chunk.shape)


def _tensors(places: Iterable[Place]) -> dict[str, Any]:
    """Of ``.metadata``: every tensor, with its chunks."""
    found: dict[str, Any] = {_COMMON: BytesStorageMetadata()}
    for place in places:
        properties = TensorProperties(dtype=getattr(torch, place.dtype))
        size = torch.Size(place.shape)
        tensor = found.setdefault(place.key, TensorStorageMetadata(properties, size, []))
        tensor.chunks += [
            ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in place.chunks
        ]
    return found
