"""Hugging Face checkpoints on disk, written part by part.

Writing needs the list of tensors beforehand. Every place in every file is then known: what comes
goes straight to disk, in whatever order, from whatever thread or process.
"""

import json
import math
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.errors import DataError
from megarl.models.config_json import read_object
from megarl.models.hf_files import copy_beside
from megarl.models.hf_fp8 import KEY, SCALE
from megarl.models.hf_fused import fused_name
from megarl.models.hf_headers import DTYPES, INDEX, SINGLE
from megarl.rundir import sync_path
from megarl.types import TensorSpec

SHARD_BYTES = 5 * 2**30
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_CODE_OF = {dtype: code for code, dtype in DTYPES.items()}
_FP8 = "float8_e4m3fn"


@dataclass(frozen=True)
class Entry:
    """``values`` is ``tensor[index]`` of a tensor that comes entry by entry."""

    index: int
    values: Tensor


@dataclass(frozen=True)
class _Shard:
    """One file to be: its header, and where every tensor goes."""

    file: str
    header: bytes
    places: dict[str, tuple[TensorSpec, int]]  # name -> (spec, absolute offset)
    size: int


class HfWriter:
    """Writes exactly ``specs`` into ``folder``. One process calls ``create`` first and ``complete``
    last; in between any thread of any process, with a writer of its own, calls ``write``.
    """

    def __init__(
        self,
        folder: Path,
        specs: Sequence[TensorSpec],
        *,
        files: Mapping[str, str] | None = None,
        max_shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """``files``: in which file a tensor is to be, by its name, or by that of the fused one that
        held it; others go where the one before them is. Without it, as many files as
        ``max_shard_bytes`` makes of them.

        Raises DataError for a tensor that is announced twice, or of a dtype that files have not,
        and for a file that is not one of ``folder``.
        """
        _check(specs)
        grouped = _as_before(specs, files) if files else _by_size(specs, max_shard_bytes)
        self.folder = folder
        self._shards = [_shard(file, group) for file, group in grouped.items()]
        self._places = {n: (s.file, *place) for s in self._shards for n, place in s.places.items()}
        self._lock = threading.Lock()
        self._handles: dict[str, int] = {}
        self._begun: set[tuple[str, int]] = set()  # name, first element, of what came
        self._elements: Counter[str] = Counter()

    def create(self) -> None:
        """The files, with headers and without values."""
        for shard in self._shards:
            with (self.folder / shard.file).open("wb") as file:
                file.write(shard.header)
                file.truncate(shard.size)

    def write(self, name: str, values: Tensor | Entry, row: int = 0) -> None:
        """``values`` are tensor ``name``, or an entry of it; or of either the rows from ``row`` on.

        Raises DataError where the model has no such tensor, for values that are not of its shape
        and dtype, or that came before.
        """
        if name not in self._places:
            raise DataError(f"tensor {name} is not part of the announced model")
        index = values.index if isinstance(values, Entry) else None
        values = values.values if isinstance(values, Entry) else values
        file, spec, offset = self._places[name]
        if index is not None and not 0 <= index < spec.shape[0]:
            raise DataError(f"tensor {name}: found entry {index}; announced {list(spec.shape)}")
        shape = spec.shape if index is None else spec.shape[1:]
        fits = values.shape[1:] == shape[1:] and row + len(values) <= shape[0]
        if not fits or values.dtype != _DTYPES[spec.dtype]:
            found = f"{list(values.shape)} {values.dtype}"
            announced = f"{list(shape)} {spec.dtype}"
            raise DataError(f"tensor {name}: found {found}; announced {announced}")
        first = (index or 0) * math.prod(shape) + row * math.prod(shape[1:])
        with self._lock:
            if (name, first) in self._begun and values.numel():
                raise DataError(f"tensor {name} came twice")
            self._begun.add((name, first))
            self._elements[name] += values.numel()
        raw = values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        _write(self._handle(file), raw, offset + first * values.element_size())

    def elements(self) -> dict[str, int]:
        """Of every tensor, how many came here; JSON can hold it."""
        return dict(self._elements)

    def close(self) -> None:
        """What came is durable."""
        for handle in self._handles.values():
            os.fsync(handle)
            os.close(handle)
        self._handles.clear()

    def complete(self, elements: Iterable[Mapping[str, int]]) -> None:
        """``elements``: of every writer. Raises DataError where tensors lack elements."""
        came: Counter[str] = Counter()
        for part in elements:
            came.update(part)
        sizes = {name: math.prod(spec.shape) for name, (_, spec, _) in self._places.items()}
        missing = [n for n, size in sizes.items() if came[n] != size]
        missing += [n for n, size in sizes.items() if not size and n not in came]
        if missing:
            first = ", ".join(f"{n} ({came[n]} of {sizes[n]} values)" for n in missing[:5])
            raise DataError(f"{len(missing)} announced tensors never came whole: {first}")
        if [shard.file for shard in self._shards] != [SINGLE]:
            nbytes = (num_bytes(spec) for _, spec, _ in self._places.values())
            index = {"metadata": {"total_size": sum(nbytes)}, "weight_map": self.weight_map()}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def weight_map(self) -> dict[str, str]:
        """{tensor: file}"""
        return {name: file for name, (file, _, _) in self._places.items()}

    def _handle(self, file: str) -> int:
        with self._lock:
            if file not in self._handles:
                self._handles[file] = os.open(self.folder / file, os.O_WRONLY)
            return self._handles[file]


def write_checkpoint(
    out: Path,
    tensors: Iterable[tuple[str, Tensor | Entry]],
    specs: Sequence[TensorSpec],
    metadata_from: Path,
    max_shard_bytes: int = SHARD_BYTES,
    *,
    quantization: Mapping[str, Any] | None = None,
) -> None:
    """Write a Hugging Face folder that holds exactly ``specs`` and the source's other files.
    ``quantization``: what config.json says of FP8 among them (``fp8_export.py``).

    ``tensors`` may come in any order, each whole or in entries, and is consumed one at a time. The
    folder appears whole or not at all. Raises DataError when it already holds something, or when a
    tensor is missing, unknown, comes twice, or has another shape or dtype than announced.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} already exists; checkpoints are never overwritten")
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        writer = HfWriter(part, specs, max_shard_bytes=max_shard_bytes)
        writer.create()
        for name, tensor in tensors:
            writer.write(name, tensor)
        writer.close()
        writer.complete([writer.elements()])
        write_beside(Path(metadata_from), part, specs, quantization)
        os.replace(part, out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync_path(out.parent)


def write_beside(
    source: Path,
    folder: Path,
    specs: Sequence[TensorSpec],
    quantization: Mapping[str, Any] | None = None,
) -> None:
    """The source's other files as they are, but for config.json where it speaks of other weights:
    the dtype that most have, FP8 in blocks being no dtype of the model's, and what is in FP8.
    """
    assert (quantization is not None) == any(spec.dtype == _FP8 for spec in specs)
    copy_beside(source, folder)
    config_path = folder / "config.json"
    if not config_path.exists():
        raise DataError(f"{source} holds no config.json to go with the weights")
    config = read_object(config_path)
    found = dict(config)
    plain = [spec.dtype for spec in specs if spec.dtype != _FP8 and not spec.name.endswith(SCALE)]
    dtype, _ = Counter(plain).most_common(1)[0]
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    config.pop(KEY, None)
    if quantization is not None:
        config[KEY] = dict(quantization)
    if config != found:
        config_path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def num_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * _DTYPES[spec.dtype].itemsize


# ---- where everything goes


def _check(specs: Sequence[TensorSpec]) -> None:
    for spec in specs:
        if spec.dtype not in _DTYPES:
            accepted = ", ".join(_DTYPES)
            raise DataError(f"tensor {spec.name}: dtype {spec.dtype}; accepted: {accepted}")
    twice = [name for name, count in Counter(s.name for s in specs).items() if count > 1]
    if twice:
        raise DataError(f"tensor {twice[0]} is announced twice")


def _as_before(
    specs: Sequence[TensorSpec], files: Mapping[str, str]
) -> dict[str, list[TensorSpec]]:
    for file in files.values():
        plain = isinstance(file, str) and Path(file).name == file
        if not plain or not file.endswith(".safetensors"):
            raise DataError(f"tensors cannot be in {file!r}; accepted: names ending .safetensors")
    groups: dict[str, list[TensorSpec]] = {file: [] for file in files.values()}
    file = next(iter(groups))
    for spec in specs:
        own = files.get(spec.name) or files.get(fused_name(spec.name) or "")
        file = own or file
        groups[file].append(spec)
    return {file: group for file, group in groups.items() if group}


def _by_size(specs: Sequence[TensorSpec], most: int) -> dict[str, list[TensorSpec]]:
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if groups[-1] and filled + num_bytes(spec) > most:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += num_bytes(spec)
    total = len(groups)
    if total == 1:
        return {SINGLE: groups[0]}
    name = "model-{:05d}-of-{:05d}.safetensors"
    return {name.format(i, total): group for i, group in enumerate(groups, start=1)}


def file_header(specs: Sequence[TensorSpec]) -> bytes:
    """What a file begins with whose data are the bytes of these tensors, one after another. Raises
    DataError for a dtype that files have not.
    """
    _check(specs)
    return _shard("", specs).header


def _shard(file: str, specs: Sequence[TensorSpec]) -> _Shard:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + num_bytes(spec)
        entries[spec.name] = {
            "dtype": _CODE_OF[_DTYPES[spec.dtype]],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data aligned for readers that map the file
    base = 8 + len(text)
    places = {s.name: (s, base + entries[s.name]["data_offsets"][0]) for s in specs}
    return _Shard(file, len(text).to_bytes(8, "little") + text, places, base + offset)


def _write(handle: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(handle, data, offset)
        data, offset = data[count:], offset + count
