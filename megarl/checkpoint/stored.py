"""The tensors of a distributed checkpoint (torch_dist) on disk, read chunk by chunk, in no layout.

``.metadata`` says of every tensor its shape, its dtype and its chunks, and of every chunk in which
file it lies and where. Chunks are as the ranks that wrote them had them.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megarl.checkpoint.chunk import load_chunk
from megarl.errors import DataError
from megarl.models.sharded import Place


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

    def read(self, place: Place, parameter: Tensor) -> None:
        """Fill ``parameter``, contiguous and of the dtype of ``place``. Raises DataError where
        parts of it are missing or damaged.
        """
        for chunk in place.chunks:
            rows = parameter[chunk.begin : chunk.end].view(chunk.sizes)
            self._fill(rows, place.key, chunk.offsets)

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
            if part.shape == sizes:
                loaded = self._load(index, part)
            else:
                loaded = self._load(index)[_within(index.offset, first, last)]
            if loaded.data_ptr() != part.data_ptr():
                part.copy_(loaded)
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

    def _load(self, index: MetadataIndex, into: Tensor | None = None) -> Tensor:
        """One chunk."""
        where = self._where[index]
        what = f"{index.fqn} at {list(index.offset or ())}"
        path = self.folder / where.relative_path
        return load_chunk(path, where.offset, where.length, what, into).view(self._sizes[index])


def _ends(offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
    return [offset + size for offset, size in zip(offsets, sizes, strict=True)]


def _within(offsets: Sequence[int], first: Sequence[int], last: Sequence[int]) -> tuple[slice, ...]:
    """Of a tensor that begins at ``offsets``, the entries from ``first`` to before ``last``."""
    return tuple(slice(p - a, q - a) for a, p, q in zip(offsets, first, last, strict=True))
