"""The tensors of a distributed checkpoint (torch_dist) on disk, read chunk by chunk, in no layout.

``.metadata`` says of every tensor its shape, its dtype and its chunks, and of every chunk in which
file it lies and where. Chunks are as the ranks that wrote them had them.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from megarl.checkpoint.chunk import load_chunk
from megarl.errors import DataError
from megarl.models.dist_metadata import Sizes, StoredChunk, read_metadata
from megarl.models.sharded import Place


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

    def read(self, place: Place, parameter: Tensor) -> None:
        """Fill ``parameter``, contiguous and of the dtype of ``place``. Raises DataError where
        parts of it are missing or damaged.
        """
        for chunk in place.chunks:
            rows = parameter[chunk.begin : chunk.end].view(chunk.sizes)
            self._fill(rows, place.key, chunk.offsets)

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
            if part.shape == chunk.sizes:
                loaded = read_chunk(self.folder, key, chunk, part)
            else:
                loaded = read_chunk(self.folder, key, chunk)[_within(chunk.offsets, first, last)]
            if loaded.data_ptr() != part.data_ptr():
                part.copy_(loaded)
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


def read_chunk(folder: Path, key: str, chunk: StoredChunk, into: Tensor | None = None) -> Tensor:
    """One chunk of tensor ``key``, checked against its checksum, in ``into`` where ``load_chunk``
    can. Raises DataError where its file is missing or cut short, or it is damaged or of another
    size.
    """
    path, where = folder / chunk.where.file, chunk.where
    what = f"{path}: {key} at {list(chunk.offsets)}"
    try:
        tensor = load_chunk(path, where.begin, where.length, into)
    except OSError as e:
        raise DataError(f"{what} cannot be read ({e.strerror or e})") from e
    except Exception as e:  # whatever readers of zip files, pickles and tensors raise
        reason = str(e).partition("\n")[0]
        if type(e).__name__ == "UnpicklingError":  # torch's text is about trust
            reason = "not the pickle of a tensor"
        raise DataError(f"{what} is damaged ({reason})") from e
    if tensor.numel() != math.prod(chunk.sizes):
        raise DataError(f"{what}: found {list(tensor.shape)}; expected {list(chunk.sizes)}")
    return tensor.view(chunk.sizes)


def _ends(offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
    return [offset + size for offset, size in zip(offsets, sizes, strict=True)]


def _within(offsets: Sequence[int], first: Sequence[int], last: Sequence[int]) -> tuple[slice, ...]:
    """Of a tensor that begins at ``offsets``, the entries from ``first`` to before ``last``."""
    return tuple(slice(p - a, q - a) for a, p, q in zip(offsets, first, last, strict=True))
