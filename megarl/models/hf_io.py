"""Hugging Face checkpoints on disk, read: checked before anything is allocated.

``hf_headers.py`` says what a folder must be like; ``hf_fp8.py`` how FP8 lies in it, which is read
as the values that codes and scales stand for; ``hf_write.py`` writes one. Bytes are read with
``pread``, only those of the slice asked for, and never mapped: a file cut short while the program
runs is an error, not a crash, and memory is that of the slice.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from megarl.errors import DataError
from megarl.models.config_json import read_object
from megarl.models.hf_fp8 import SCALE, Fp8Blocks, quantization_problems, scale_faults
from megarl.models.hf_fused import fused_faults, split_fused
from megarl.models.hf_headers import Place, fault_list, read_headers
from megarl.ops.fp8_block import fp8_block_dequant

Span = tuple[int, int]  # [begin, end) of a dimension


class HfCheckpoint:
    """The tensors of a Hugging Face folder; nothing but headers is in memory until ``get``.

    Where a weight lies in FP8 blocks, its scales are no tensor of their own: the weight has
    ``dtype``, the one config.json declares.
    """

    def __init__(
        self,
        folder: Path,
        places: dict[str, Place],
        *,
        blocks: Fp8Blocks | None = None,
        dtype: torch.dtype = torch.bfloat16,
        unread: Iterable[str] = (),
    ) -> None:
        """``unread``: tensors of which ``inspect_folder``'s faults speak already."""
        self.folder = folder
        self.unread = frozenset(unread)
        self.missing: frozenset[str] = frozenset()  # tensors that may be: they are zeros
        self._places = places
        self._blocks = blocks
        self._dtype = dtype

    @property
    def blocks(self) -> Fp8Blocks | None:
        """None where weights are plain."""
        return self._blocks

    @property
    def codes(self) -> frozenset[str]:
        """Weights that lie in FP8 blocks."""
        return frozenset(name for name, place in self._places.items() if _in_codes(place))

    def stored(self, name: str) -> Tensor:
        """As it lies in the files: of a weight in ``codes`` these, of ``NAME_scale_inv`` its
        scales. Raises DataError where there is no such tensor, or the file has become shorter.
        """
        if name not in self._places:
            raise DataError(f"{self.folder} holds no tensor {name}")
        return _read(self._places[name], name, None, (None, None))

    def names(self) -> list[str]:
        return [name for name in self._places if not self._is_scale(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._place(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Of what ``get`` returns."""
        place = self._place(name)
        return self._dtype if _in_codes(place) else place.dtype

    def get(
        self,
        name: str,
        index: int | None = None,
        *,
        rows: Span | None = None,
        columns: Span | None = None,
        into: Tensor | None = None,
    ) -> Tensor:
        """The tensor, or ``tensor[index]``, in memory of its own; of that, ``rows`` of its first
        dimension and ``columns`` of its second. Nothing else is read, but for FP8 what shares a
        block with it.

        ``into``: memory of as many elements, which is filled in their order, rounded where its
        dtype is another. Where it can be read into, what is returned lies in it.

        Raises DataError when the file has become shorter, or where codes or scales of FP8 are not
        finite.
        """
        place = self._place(name)
        if into is not None and into.dtype == place.dtype and into.is_contiguous():
            return _read(place, name, index, (rows, columns), into)
        values = self._get(place, name, index, rows, columns)
        if into is not None:
            into.copy_(values.view(into.shape))
        return values

    def _get(
        self, place: Place, name: str, index: int | None, rows: Span | None, columns: Span | None
    ) -> Tensor:
        if not _in_codes(place):
            return _read(place, name, index, (rows, columns))
        if index is None and len(place.shape) == 3:
            first, last = rows or (0, place.shape[0])
            low, high = columns or (0, place.shape[1])
            out = torch.empty(last - first, high - low, place.shape[2], dtype=self._dtype)
            for i in range(first, last):
                out[i - first] = self.get(name, i, rows=(low, high))
            return out
        return self._dequantised(place, name, index, rows, columns)

    def _dequantised(
        self, place: Place, name: str, index: int | None, rows: Span | None, columns: Span | None
    ) -> Tensor:
        assert self._blocks is not None
        spans = (rows or (0, place.shape[-2]), columns or (0, place.shape[-1]))
        grid_rows, grid_columns = (
            (begin // size, -(-end // size))
            for (begin, end), size in zip(spans, self._blocks.block, strict=True)
        )
        (row, row_end), (column, column_end) = spans
        whole = (
            (grid_rows[0] * self._blocks.block[0], row_end),
            (grid_columns[0] * self._blocks.block[1], column_end),
        )
        codes = _read(place, name, index, whole)
        scales = _read(self._places[name + SCALE], name + SCALE, index, (grid_rows, grid_columns))
        values = fp8_block_dequant(codes, scales, block=self._blocks.block, dtype=self._dtype)
        wrong = scales.numel() and not (scales >= 0).all()
        if wrong or (values.numel() and not all(x.isfinite() for x in torch.aminmax(values))):
            at = name if index is None else f"{name}[{index}]"
            fault = "a scale is negative or NaN" if wrong else "codes times scales are not finite"
            raise DataError(f"{place.file}: FP8 tensor {at} is damaged: {fault}")
        return values[row - whole[0][0] :, column - whole[1][0] :].contiguous()

    def _place(self, name: str) -> Place:
        if name not in self._places or self._is_scale(name):
            raise DataError(f"{self.folder} holds no tensor {name}")
        return self._places[name]

    def _is_scale(self, name: str) -> bool:
        return self._blocks is not None and name.endswith(SCALE)


def inspect_folder(hf_dir: Path) -> tuple[HfCheckpoint, list[str]]:
    """The folder by its headers, and every fault of its files. Only without faults may a tensor be
    read.

    Raises DataError where nothing says what the folder should hold.
    """
    folder = Path(hf_dir)
    headers = read_headers(folder)
    config = read_object(folder / "config.json") if (folder / "config.json").exists() else {}
    problems = list(quantization_problems(config))
    blocks = None if problems else Fp8Blocks.of(config)
    faults = headers.faults + [f"{folder / 'config.json'}: {problem}" for problem in problems]
    if not problems:
        faults += scale_faults(headers.places, headers.unread, blocks)
        faults += fused_faults(headers.places, config, blocks)
    declared = config.get("dtype") or config.get("torch_dtype")
    dtype = torch.bfloat16 if declared == "bfloat16" else torch.float32  # as ``spec.dtype``
    places = split_fused(headers.places, config)
    checkpoint = HfCheckpoint(folder, places, blocks=blocks, dtype=dtype, unread=headers.unread)
    return checkpoint, faults


def open_checkpoint(hf_dir: Path) -> HfCheckpoint:
    """Check every header against the index, the file sizes and config.json's word on FP8.

    Raises DataError with every fault, naming file and tensor.
    """
    checkpoint, faults = inspect_folder(hf_dir)
    if faults:
        raise fault_list(checkpoint.folder, faults)
    return checkpoint


# ---- reading -------------------------------------------------------------------------------------


def _in_codes(place: Place) -> bool:
    return place.dtype == torch.float8_e4m3fn


def _read(
    place: Place,
    name: str,
    index: int | None,
    spans: tuple[Span | None, Span | None],
    into: Tensor | None = None,
) -> Tensor:
    """As ``HfCheckpoint.get``, of what the file has; ``into`` is contiguous and of its dtype."""
    rows, columns = spans
    shape, begin, size = place.shape, place.begin, place.dtype.itemsize
    if index is not None:
        assert 0 <= index < shape[0], (name, index, shape)
        shape = shape[1:]
        begin += index * math.prod(shape) * size
    pieces = [(begin, math.prod(shape) * size)]
    if rows is not None or columns is not None:
        pieces, shape = _pieces(begin, shape, size, rows, columns)
    out = torch.empty(shape, dtype=place.dtype) if into is None else into.view(shape)
    left = out.flatten().view(torch.uint8).numpy().data
    with place.file.open("rb", buffering=0) as file:
        for offset, length in pieces:
            _fill(file.fileno(), left[:length], offset, place.file, name)
            left = left[length:]
    return out


def _pieces(
    begin: int, shape: tuple[int, ...], size: int, rows: Span | None, columns: Span | None
) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """((offset, bytes) of what lies together, the shape of all): ``columns`` of ``rows``."""
    first, last = rows or (0, shape[0])
    assert 0 <= first <= last <= shape[0], (shape, rows)
    row = math.prod(shape[1:]) * size
    if columns is None:
        return [(begin + first * row, (last - first) * row)], (last - first, *shape[1:])
    low, high = columns
    assert 0 <= low <= high <= shape[1], (shape, columns)
    if (low, high) == (0, shape[1]):  # whole rows lie together
        return _pieces(begin, shape, size, rows, None)
    column = math.prod(shape[2:]) * size
    starts = range(begin + first * row + low * column, begin + last * row + low * column, row or 1)
    wanted = (high - low) * column
    return [(start, wanted) for start in starts], (last - first, high - low, *shape[2:])


def _fill(handle: int, into: memoryview, offset: int, file: Path, name: str) -> None:
    while into:
        count = os.preadv(handle, [into], offset)
        if not count:
            raise DataError(f"{file}: cut short while open; tensor {name} is incomplete")
        into, offset = into[count:], offset + count
