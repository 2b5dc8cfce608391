"""Headers of a Hugging Face folder's weights against its index and the sizes of its files.

A ``.safetensors`` file is::

    u64 little-endian N | N bytes of JSON {name: {"dtype", "shape", "data_offsets"}} | data

with ``[begin, end]`` offsets from the end of the JSON. A model of several files also has
``model.safetensors.index.json`` with {"weight_map": {name: file}}. What must hold:

1. every file the index names is there, no other ``.safetensors`` file is;
2. every file is exactly as long as its header says, and its tensors fill the data without holes;
3. the index and the headers name the same tensors in the same files, each once;
4. every tensor is float32, bfloat16 or float8_e4m3fn. float16 is refused: neither dtype that models
   are trained in holds it without rounding, or in as many bytes.

Whatever does not hold is one fault; reading goes on, so that all faults are named together. Only an
index that is damaged, or a folder without weights, ends it: nothing else can be said then.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megarl.errors import DataError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Place:
    """Where a tensor lies. ``begin``, ``end``: in bytes from the start of the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int


@dataclass
class Headers:
    """``places``: tensors that can be read. ``unread``: tensors that index or headers name, and of
    which a fault speaks.
    """

    places: dict[str, Place] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)


def read_headers(folder: Path) -> Headers:
    """Raises DataError where nothing says what the folder should hold."""
    found = Headers()
    index = _read_index(folder)
    files = [SINGLE] if index is None else sorted(_files(folder, index, found))
    for stray in sorted({p.name for p in folder.glob("*.safetensors")} - set(files)):
        found.faults.append(f"{folder / stray} is not named in {INDEX}")
    if index is None:
        places = _read_file(folder / SINGLE, found)
        if places is None:
            raise fault_list(folder, found.faults)
        found.places = places
        return found
    listed_in: dict[str, set[str]] = {file: set() for file in files}
    for name, file in index.items():
        if isinstance(file, str) and file in listed_in:
            listed_in[file].add(name)
    for file in files:
        listed = listed_in[file]
        if not (folder / file).is_file():
            names = ", ".join(sorted(listed))
            found.faults.append(f"{folder / file} is missing; {INDEX} puts there: {names}")
            found.unread |= listed
            continue
        places = _read_file(folder / file, found)
        if places is None:
            found.unread |= listed
            continue
        for name in sorted(listed - set(places) - found.unread):
            found.faults.append(f"{folder / file} lacks tensor {name}, which {INDEX} puts there")
            found.unread.add(name)
        for name in sorted(set(places) - listed):
            but = f"puts it in {index[name]}" if name in index else "does not name it"
            found.faults.append(f"{folder / file} holds tensor {name}, but {INDEX} {but}")
            found.unread.add(name)
        found.places |= {name: place for name, place in places.items() if name in listed}
    found.places = {name: found.places[name] for name in index if name in found.places}
    return found


def read_file(path: Path) -> dict[str, Place]:
    """The tensors of one file. Raises DataError with all its faults."""
    found = Headers()
    places = _read_file(path, found)
    if places is None or found.faults:
        raise fault_list(path, found.faults)
    return places


def weight_map(folder: Path) -> dict[str, str]:
    """{tensor: file}, in the order of the files; empty where the folder has no weights, damaged
    ones, or none that can be read: what only wants to know their names does not fail of that.
    """
    try:
        headers = read_headers(folder)
    except (DataError, OSError):
        return {}
    places = {} if headers.faults else headers.places
    return {name: place.file.name for name, place in places.items()}


def fault_list(folder: Path, faults: list[str]) -> DataError:
    """All of them, one a line."""
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    return DataError("\n  ".join([f"{folder} cannot be used ({count}):", *faults]))


def _read_index(folder: Path) -> dict[str, Any] | None:
    """{tensor: file}; None where one file needs no index."""
    path = folder / INDEX
    if not path.exists():
        if (folder / SINGLE).exists():
            return None
        raise DataError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
        return dict(value["weight_map"])
    except (ValueError, KeyError, TypeError) as e:
        raise DataError(f'{path} is damaged: expected JSON with a "weight_map" ({e})') from e


def _files(folder: Path, index: Mapping[str, Any], found: Headers) -> set[str]:
    """Those that are plain file names."""
    files = set()
    for name, file in index.items():
        plain = isinstance(file, str) and Path(file).name == file
        if plain and file.endswith(".safetensors"):
            files.add(file)
        else:
            accepted = "accepted: a .safetensors file name"
            found.faults.append(f"{folder / INDEX}: tensor {name} lies in {file!r}; {accepted}")
            found.unread.add(name)
    return files


def _read_file(path: Path, found: Headers) -> dict[str, Place] | None:
    """Its tensors; None where the header cannot be read or the data is not what it says."""
    try:
        base, header = _read_json(path)
    except DataError as e:
        found.faults.append(str(e))
        return None
    places: dict[str, Place] = {}
    spans: list[tuple[int, int, str]] = []
    before = len(found.faults)
    for name, entry in header.items():
        try:
            begin, end = (base + int(n) for n in entry["data_offsets"])
            places[name] = _place(path, name, entry, begin, end)
        except DataError as e:
            found.faults.append(str(e))
            found.unread.add(name)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
            found.faults.append(f"{path}: the header is damaged at tensor {name} ({e!r})")
            return None
        spans.append((begin, end, name))
    fault = _span_fault(path, base, spans)
    if fault and len(found.faults) == before:  # else it may follow from an entry named already
        found.faults.append(fault)
    return None if fault else places


def _read_json(path: Path) -> tuple[int, dict[str, Any]]:
    """(where data begins, {tensor: entry})."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise DataError(f"{path} is truncated: {size} bytes, the header needs {length + 8}")
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
        header.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError) as e:
        raise DataError(f"{path}: the header is damaged ({e})") from e
    return 8 + length, header


def _place(path: Path, name: str, entry: Any, begin: int, end: int) -> Place:
    code = entry["dtype"]
    shape = tuple(int(n) for n in entry["shape"])
    if code not in DTYPES:
        raise DataError(f"{path}: tensor {name} has dtype {code}; accepted: {', '.join(DTYPES)}")
    needed = math.prod(shape) * DTYPES[code].itemsize
    if min(shape, default=0) < 0 or end - begin != needed:
        raise DataError(
            f"{path}: tensor {name} of shape {list(shape)} needs {needed} bytes, has {end - begin}"
        )
    return Place(path, shape, DTYPES[code], begin, end)


def _span_fault(path: Path, base: int, spans: list[tuple[int, int, str]]) -> str | None:
    """The first hole or overlap, or how the file's length differs."""
    size, expected = path.stat().st_size, base
    for begin, end, name in sorted(spans):
        if begin != expected:
            return f"{path}: tensor {name} begins at byte {begin}, expected {expected}"
        expected = end
        if end > size:
            where = f"tensor {name} ends at byte {end}, the file at {size}"
            return f"{path} is truncated: {where}"
    if expected != size:
        return f"{path} is {size} bytes long, its tensors end at byte {expected}"
    return None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"the key {key} occurs twice")
        value[key] = item
    return value
