"""Hugging Face checkpoints on disk, written tensor by tensor.

Writing needs the list of tensors beforehand. Every place in every file is then known, tensors go
straight to disk in whatever order they come, and the folder appears only when all have come.
"""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.errors import DataError
from megarl.models.config_json import read_object
from megarl.models.hf_files import copy_beside
from megarl.models.hf_fp8 import KEY
from megarl.models.hf_headers import INDEX, SINGLE
from megarl.types import TensorSpec

_CODES = {"F32": torch.float32, "BF16": torch.bfloat16}
_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CODE_OF = {dtype: code for code, dtype in _CODES.items()}


@dataclass(frozen=True)
class Entry:
    """``values`` is ``tensor[index]`` of a tensor that comes entry by entry."""

    index: int
    values: Tensor


def write_checkpoint(
    out: Path,
    tensors: Iterable[tuple[str, Tensor | Entry]],
    specs: Sequence[TensorSpec],
    metadata_from: Path,
    max_shard_bytes: int = 5 * 2**30,
    verify: Callable[[Path], None] | None = None,
) -> None:
    """Write a Hugging Face folder that holds exactly ``specs`` and the source's other files.

    ``tensors`` may come in any order, each whole or in entries, and is consumed one at a time. The
    folder appears whole or not at all. Raises DataError when it already holds something, or when a
    tensor is missing, unknown, comes twice, or has another shape or dtype than announced.
    ``verify`` is given the folder before it appears, and may refuse it.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} already exists; checkpoints are never overwritten")
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        _write_tensors(part, tensors, _plan(specs, max_shard_bytes))
        _copy_metadata(Path(metadata_from), part, specs)
        if verify is not None:
            verify(part)
        os.replace(part, out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    _sync(out.parent)


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
    """The source's files as they are, but for config.json where it speaks of other weights: the
    dtype that most have, and FP8 that was read as plain values.
    """
    copy_beside(source, folder)
    config_path = folder / "config.json"
    if not config_path.exists():
        raise DataError(f"{source} holds no config.json to go with the weights")
    config = read_object(config_path)
    found = dict(config)
    dtype, _ = Counter(spec.dtype for spec in specs).most_common(1)[0]
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    config.pop(KEY, None)
    if config != found:
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
