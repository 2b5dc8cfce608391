"""Hugging Face checkpoints on disk: checked before anything is allocated, handled tensor by tensor.

A ``.safetensors`` file is::

    u64 little-endian N | N bytes of JSON {name: {"dtype", "shape", "data_offsets"}} | data

with ``[begin, end]`` offsets from the end of the JSON. A model of several files also has
``model.safetensors.index.json`` with {"weight_map": {name: file}}. What must hold, and is checked
when a folder is opened:

1. every file the index names is there, no other ``.safetensors`` file is;
2. every file is exactly as long as its header says, and its tensors fill the data without holes;
3. the index and the headers name the same tensors in the same files, each once;
4. every tensor is float32 or bfloat16.

Files are read, not mapped: a file cut short while the program runs is an error, not a crash.
Writing needs the list of tensors beforehand. Every place in every file is then known, tensors go
straight to disk in whatever order they come, and the folder appears only when all have come.
"""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.errors import DataError
from megarl.types import TensorSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
COPIED = (  # beside the weights; whichever of them the source folder has
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_CODES = {"F32": torch.float32, "BF16": torch.bfloat16}
_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CODE_OF = {dtype: code for code, dtype in _CODES.items()}


@dataclass(frozen=True)
class _Place:
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int  # absolute, in bytes
    end: int


@dataclass(frozen=True)
class Entry:
    """``values`` is ``tensor[index]`` of a tensor that comes entry by entry."""

    index: int
    values: Tensor


class HfCheckpoint:
    """The tensors of a Hugging Face folder; nothing but headers is in memory until ``get``."""

    def __init__(self, folder: Path, places: dict[str, _Place]) -> None:
        self.folder = folder
        self._places = places

    def names(self) -> list[str]:
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._place(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._place(name).dtype

    def get(self, name: str, index: int | None = None) -> Tensor:
        """The tensor, or ``tensor[index]``, in memory of its own, in the dtype of the file. Nothing
        else is read.
        """
        place = self._place(name)
        begin, end, shape = place.begin, place.end, place.shape
        if index is not None:
            size, shape = (end - begin) // shape[0], shape[1:]
            begin, end = begin + index * size, begin + (index + 1) * size
        if begin == end:
            return torch.empty(shape, dtype=place.dtype)
        buffer = bytearray(end - begin)
        with place.file.open("rb") as file:
            file.seek(begin)
            if file.readinto(buffer) != len(buffer):
                raise DataError(f"{place.file}: cut short while open; tensor {name} is incomplete")
        return torch.frombuffer(buffer, dtype=place.dtype).reshape(shape)

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise DataError(f"{self.folder} holds no tensor {name}")
        return self._places[name]


def open_checkpoint(hf_dir: Path) -> HfCheckpoint:
    """Check every header against the index and the file sizes.

    Raises DataError naming file and tensor.
    """
    folder = Path(hf_dir)
    index = _read_index(folder)
    files = [SINGLE] if index is None else sorted(set(index.values()))
    stray = sorted({p.name for p in folder.glob("*.safetensors")} - set(files))
    if stray:
        raise DataError(f"{folder}: {', '.join(stray)} is not named in {INDEX}")
    headers = {file: _read_header(folder / file) for file in files}
    if index is None:
        index = dict.fromkeys(headers[SINGLE], SINGLE)
    for file, header in headers.items():
        for name in header:
            if index.get(name) != file:
                but = f"puts it in {index[name]}" if name in index else "does not name it"
                raise DataError(f"{folder / file} holds tensor {name}, but {INDEX} {but}")
    for name, file in index.items():
        if name not in headers[file]:
            raise DataError(f"{folder / file} lacks tensor {name}, which {INDEX} puts there")
    return HfCheckpoint(folder, {name: headers[file][name] for name, file in index.items()})


def write_checkpoint(
    out: Path,
    tensors: Iterable[tuple[str, Tensor | Entry]],
    specs: Sequence[TensorSpec],
    metadata_from: Path,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write a Hugging Face folder that holds exactly ``specs`` and the source's other files.

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
        _write_tensors(part, tensors, _plan(specs, max_shard_bytes))
        _copy_metadata(Path(metadata_from), part, specs)
        os.replace(part, out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    _sync(out.parent)


# ---- reading -------------------------------------------------------------------------------------


def _read_index(folder: Path) -> dict[str, str] | None:
    """{tensor: file}; None where one file needs no index."""
    path = folder / INDEX
    if not path.exists():
        if (folder / SINGLE).exists():
            return None
        raise DataError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
        weight_map = value["weight_map"]
    except (ValueError, KeyError, TypeError) as e:
        raise DataError(f'{path} is damaged: expected JSON with a "weight_map" ({e})') from e
    for name, file in weight_map.items():
        plain = isinstance(file, str) and Path(file).name == file
        if not plain or not file.endswith(".safetensors"):
            accepted = "accepted: a .safetensors file name"
            raise DataError(f"{path}: tensor {name} lies in {file!r}; {accepted}")
        if not (folder / file).exists():
            raise DataError(f"{folder / file} is missing; {path.name} puts tensor {name} there")
    return dict(weight_map)


def _read_header(path: Path) -> dict[str, _Place]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise DataError(f"{path} is truncated: {size} bytes, the header needs {length + 8}")
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
        header.pop("__metadata__", None)
        places = {n: _read_entry(path, n, entry, 8 + length) for n, entry in header.items()}
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise DataError(f"{path}: the header is damaged ({e})") from e
    end = 8 + length
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.begin != end:
            raise DataError(f"{path}: tensor {name} begins at byte {place.begin}, expected {end}")
        end = place.end
        if end > size:
            where = f"tensor {name} ends at byte {end}, the file at {size}"
            raise DataError(f"{path} is truncated: {where}")
    if end != size:
        raise DataError(f"{path} is {size} bytes long, its tensors end at byte {end}")
    return places


def _read_entry(path: Path, name: str, entry: Any, base: int) -> _Place:
    code = entry["dtype"]
    if code not in _CODES:
        raise DataError(f"{path}: tensor {name} has dtype {code}; accepted: {', '.join(_CODES)}")
    shape = tuple(int(n) for n in entry["shape"])
    begin, end = (int(n) for n in entry["data_offsets"])
    needed = math.prod(shape) * _CODES[code].itemsize
    if min(shape, default=0) < 0 or begin < 0 or end - begin != needed:
        raise DataError(
            f"{path}: tensor {name} of shape {list(shape)} needs {needed} bytes, has {end - begin}"
        )
    return _Place(path, shape, _CODES[code], base + begin, base + end)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"the key {key} occurs twice")
        value[key] = item
    return value


# ---- writing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shard:
    """One file to be: its header, and where every tensor goes."""

    file: str
    header: bytes
    specs: dict[str, tuple[TensorSpec, int]]  # name -> (spec, absolute offset)
    size: int


def _plan(specs: Sequence[TensorSpec], max_shard_bytes: int) -> list[_Shard]:
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise DataError(f"tensor {spec.name} is announced twice")
        if spec.dtype not in _NAMES:
            accepted = ", ".join(_NAMES)
            raise DataError(f"tensor {spec.name}: dtype {spec.dtype}; accepted: {accepted}")
        seen.add(spec.name)
        if groups[-1] and filled + _nbytes(spec) > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += _nbytes(spec)
    if len(groups) == 1:
        return [_plan_shard(SINGLE, groups[0])]
    total = len(groups)
    return [
        _plan_shard(f"model-{i:05d}-of-{total:05d}.safetensors", group)
        for i, group in enumerate(groups, start=1)
    ]


def _plan_shard(file: str, specs: Sequence[TensorSpec]) -> _Shard:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + _nbytes(spec)
        entries[spec.name] = {
            "dtype": _CODE_OF[_NAMES[spec.dtype]],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data aligned for readers that map the file
    base = 8 + len(text)
    places = {s.name: (s, base + entries[s.name]["data_offsets"][0]) for s in specs}
    return _Shard(file, len(text).to_bytes(8, "little") + text, places, base + offset)


def _write_tensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor | Entry]], shards: list[_Shard]
) -> None:
    waiting = {
        name: (folder / shard.file, *place)
        for shard in shards
        for name, place in shard.specs.items()
    }
    names = set(waiting)
    entries: dict[str, set[int]] = {}  # that are still to come
    for shard in shards:
        with (folder / shard.file).open("wb") as file:
            file.write(shard.header)
            file.truncate(shard.size)
    for name, tensor in tensors:
        if name not in waiting:
            why = "came twice" if name in names else "is not part of the announced model"
            raise DataError(f"tensor {name} {why}")
        path, spec, offset = waiting[name]
        if isinstance(tensor, Entry):
            left = entries.setdefault(name, set(range(spec.shape[0])))
            if tensor.index not in left:
                raise DataError(f"tensor {name}: entry {tensor.index} came twice, or is none")
            left.remove(tensor.index)
            spec = replace(spec, shape=spec.shape[1:])
            _write_tensor(path, tensor.values, spec, offset + tensor.index * _nbytes(spec))
        else:
            _write_tensor(path, tensor, spec, offset)
        if not entries.get(name):
            del waiting[name]
    if waiting:
        first = ", ".join(list(waiting)[:5])
        raise DataError(f"{len(waiting)} announced tensors never came: {first}")
    if len(shards) > 1:
        total = sum(_nbytes(spec) for shard in shards for spec, _ in shard.specs.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: shard.file for shard in shards for name in shard.specs},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    for shard in shards:
        _sync(folder / shard.file)


def _write_tensor(path: Path, tensor: Tensor, spec: TensorSpec, offset: int) -> None:
    if tuple(tensor.shape) != spec.shape or tensor.dtype != _NAMES[spec.dtype]:
        found = f"{list(tensor.shape)} {tensor.dtype}"
        announced = f"{list(spec.shape)} {spec.dtype}"
        raise DataError(f"tensor {spec.name}: found {found}; announced {announced}")
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(raw.numpy().data)


def _copy_metadata(source: Path, folder: Path, specs: Sequence[TensorSpec]) -> None:
    """The source's files as they are, but for config.json's dtype if most weights have another."""
    for name in COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    config_path = folder / "config.json"
    if not config_path.exists():
        raise DataError(f"{source} holds no config.json to go with the weights")
    config = json.loads(config_path.read_text(encoding="utf-8"))
    dtype, _ = Counter(spec.dtype for spec in specs).most_common(1)[0]
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if config.get(key) != dtype:
        config[key] = dtype
        config_path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * _NAMES[spec.dtype].itemsize


def _sync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
