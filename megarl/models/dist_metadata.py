"""What ``.metadata`` of a distributed checkpoint (torch_dist) says: of every tensor its shape, its
dtype and its chunks, of every chunk and object in which file it lies and where.

The file is a pickle by format. It is read as inert records (``inert_pickle.py``), of the types that
torch 2.13 and 2.14 and megatron-core 0.19.2 write in it and no others; what is wanted of them is
checked and copied, everything else ignored. ``checksums.json`` beside it has its sha256, where the
checkpoint was written by us; it is compared before anything else.

Megatron's own loader unpickles the same file without restriction, and after it every object that a
checkpoint holds besides tensors (torch 2.13, ``DefaultLoadPlanner.load_bytes``). ``require_safe``
is to be called before: it accepts only files that do nothing but fill in the known types, and only
objects that torch's ``weights_only`` accepts. Where torch cannot read ``.metadata`` it takes one
that each rank has of its own; a folder with such is refused. Files must not change in between.
"""

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.errors import DataError
from megarl.models.inert_pickle import Form, Record, load_inert
from megarl.rundir import write_json

METADATA, FORMAT, CHECKSUMS = ".metadata", "metadata.json", "checksums.json"
COMMON_FILE = "common.pt"  # objects besides tensors, in older checkpoints

_META = "torch.distributed.checkpoint.metadata"
_PLAN = "torch.distributed.checkpoint.planner"
_FILES = "torch.distributed.checkpoint.filesystem"
_ENUMS = {(_META, "_MEM_FORMAT_ENCODING"), (_PLAN, "WriteItemType")}
_FIELDS = {  # of objects that are made without arguments, and given these
    (_META, "Metadata"): "state_dict_metadata planner_data storage_data storage_meta version "
    "all_local_plans",
    (_META, "MetadataIndex"): "fqn offset index",
    (_META, "StorageMeta"): "checkpoint_id save_id load_id modules",
    (_META, "TensorStorageMetadata"): "properties size chunks",
    (_META, "BytesStorageMetadata"): "",
    (_META, "ChunkStorageMetadata"): "offsets sizes",
    (_PLAN, "SavePlan"): "items storage_data planner_data usable",
    (_PLAN, "WriteItem"): "index type bytes_io_data tensor_data",
    (_PLAN, "TensorWriteData"): "chunk properties size",
    (_PLAN, "BytesIOWriteData"): "nbytes",
    (_FILES, "_StorageInfo"): "relative_path offset length transform_descriptors",
    (_FILES, "_StoragePrefix"): "prefix",
}


def _all(kind: type, values: Iterable[Any]) -> bool:
    return all(type(value) is kind for value in values)


def _with(fields: str) -> Form:
    names = set(fields.split())
    return Form(lambda args: not args, lambda state: type(state) is dict and set(state) <= names)


def _called(accepts: Callable[[tuple[Any, ...]], bool]) -> Form:
    return Form(accepts, lambda state: False)


def _is_member(args: tuple[Any, ...]) -> bool:
    """An enum of the table, and a name that only a member has."""
    enum, name = args if len(args) == 2 else (None, None)
    known = isinstance(enum, type) and issubclass(enum, Record) and enum.kind in _ENUMS
    return known and type(name) is str and re.fullmatch("[A-Z][A-Z_]*", name) is not None


_FORMS = {
    **{name: _with(fields) for name, fields in _FIELDS.items()},
    **{name: _called(lambda args: len(args) == 1 and _all(int, args)) for name in _ENUMS},
    (_META, "TensorProperties"): Form(
        lambda args: not args, lambda state: type(state) is tuple and len(state) == 5
    ),
    ("torch", "Size"): _called(
        lambda args: len(args) == 1 and _all(tuple, args) and _all(int, args[0])
    ),
    ("torch.serialization", "_get_layout"): _called(
        lambda args: len(args) == 1 and _all(str, args)
    ),
    # where the checkpoint was written; the second in Python 3.13
    **{(m, "PosixPath"): _called(lambda a: _all(str, a)) for m in ("pathlib", "pathlib._local")},
    # how some Pythons write a member of an enum
    ("builtins", "getattr"): _called(_is_member),
}
_DTYPES = {
    ("torch", str(dtype).removeprefix("torch.")): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class StoredBytes:
    """``length`` bytes of ``file``, from ``begin`` on."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class StoredChunk:
    """Part of a tensor, of ``sizes`` from ``offsets`` on, as ``torch.save`` writes a tensor."""

    offsets: Sizes
    sizes: Sizes
    where: StoredBytes


@dataclass(frozen=True)
class StoredTensor:
    shape: Sizes
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True)
class DistMetadata:
    """``objects``: what is stored besides tensors, each as ``torch.save`` writes it. ``writers``:
    the ranks that wrote the checkpoint, where it says so.
    """

    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredBytes]
    writers: int | None


def read_metadata(folder: Path) -> DistMetadata:
    """Raises DataError where there is no such checkpoint, where ``.metadata`` has another sha256
    than is recorded, holds what is not accepted, or is damaged.
    """
    for name in (FORMAT, METADATA):
        if not (folder / name).is_file():
            raise DataError(f"{folder} is not a Megatron distributed checkpoint (no {name})")
    path = folder / METADATA
    data = path.read_bytes()
    _check_sum(folder, data)
    found = load_inert(data, path, records=_FORMS, constants=_DTYPES)
    try:
        return _metadata(found)
    except _DamagedError as e:
        raise DataError(f"{path} is damaged: {e}") from e


def record_checksum(folder: Path) -> None:
    """Of ``.metadata``, into ``checksums.json``; nothing where ``folder`` has none."""
    if (folder / METADATA).is_file():
        sum_now = hashlib.sha256((folder / METADATA).read_bytes()).hexdigest()
        write_json(folder / CHECKSUMS, {METADATA: sum_now})


def require_safe(folder: Path) -> DistMetadata:
    """To be called before a checkpoint is given to Megatron's loader. Raises DataError as
    ``read_metadata`` does, for an object that is more than data, and for ``.metadata`` of ranks.
    """
    others = sorted(p.name for p in folder.glob("*.metadata") if p.name != METADATA)
    if others:
        raise DataError(f"{folder} holds {', '.join(others)} beside {METADATA}; accepted: none")
    metadata = read_metadata(folder)
    objects: dict[str, Any] = {
        f"{where.file}: {key}": lambda where=where: read_bytes(folder, where)
        for key, where in metadata.objects.items()
    }
    if (folder / COMMON_FILE).exists():
        objects[COMMON_FILE] = (folder / COMMON_FILE).read_bytes
    for name, read in objects.items():
        try:
            torch.load(io.BytesIO(read()), map_location="cpu", weights_only=True)
        except DataError:
            raise
        except Exception as e:  # whatever a reader of damaged data raises
            reason = str(e).partition("\n")[0]
            raise DataError(f"{folder / name} is refused, nothing of it was run: {reason}") from e
    return metadata


def read_bytes(folder: Path, where: StoredBytes) -> bytes:
    """Raises DataError where the file is missing or ends before."""
    try:
        with (folder / where.file).open("rb") as file:
            file.seek(where.begin)
            data = file.read(where.length)
    except OSError as e:
        raise DataError(f"{folder / where.file}: {e.strerror}") from e
    if len(data) != where.length:
        end = where.begin + where.length
        raise DataError(f"{folder / where.file} is truncated: {METADATA} needs {end} bytes of it")
    return data


def _check_sum(folder: Path, data: bytes) -> None:
    path = folder / CHECKSUMS
    if not path.exists():
        return
    try:
        recorded = json.loads(path.read_text())[METADATA]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise DataError(f"{path} is damaged: expected JSON with {METADATA!r} ({e!r})") from e
    found = hashlib.sha256(data).hexdigest()
    if found != recorded:
        raise DataError(
            f"{folder / METADATA} was changed after the checkpoint was written: found sha256 "
            f"{found}; {CHECKSUMS} says {recorded}"
        )


# ---- from records --------------------------------------------------------------------------------


class _DamagedError(Exception):
    """What is not as it should be."""


def _metadata(found: Any) -> DistMetadata:
    state = _state(found, "Metadata", "the file")
    places: dict[tuple[str, Sizes | None], StoredBytes] = {}
    for index, info in _of(dict, state.get("storage_data"), "storage_data").items():
        place = _state(index, "MetadataIndex", "a key of storage_data")
        name, offset = _of(str, place.get("fqn"), "a name in storage_data"), place.get("offset")
        places[name, None if offset is None else _sizes(offset, name)] = _where(info, name)
    tensors, objects = {}, {}
    for key, value in _of(dict, state.get("state_dict_metadata"), "state_dict_metadata").items():
        _of(str, key, "a key of state_dict_metadata")
        if isinstance(value, Record) and value.kind == (_META, "BytesStorageMetadata"):
            objects[key] = _place(places, key, None)
        else:
            tensors[key] = _tensor(key, value, places)
    plans = state.get("all_local_plans")
    return DistMetadata(tensors, objects, len(plans) if isinstance(plans, list) else None)


def _tensor(
    key: str, value: Any, places: dict[tuple[str, Sizes | None], StoredBytes]
) -> StoredTensor:
    state = _state(value, "TensorStorageMetadata", key)
    properties = _of(tuple, _raw_state(state.get("properties"), "TensorProperties", key), key)
    dtype = _of(torch.dtype, properties[0] if properties else None, f"{key}: dtype")
    shape = _sizes(state.get("size"), key)
    chunks = []
    for chunk in _of(list, state.get("chunks"), f"{key}: chunks"):
        its = _state(chunk, "ChunkStorageMetadata", key)
        offsets, sizes = _sizes(its.get("offsets"), key), _sizes(its.get("sizes"), key)
        if not len(offsets) == len(sizes) == len(shape):
            raise _DamagedError(f"{key} {list(shape)} has a chunk {list(sizes)}")
        chunks.append(StoredChunk(offsets, sizes, _place(places, key, offsets)))
    return StoredTensor(shape, dtype, tuple(chunks))


def _place(
    places: dict[tuple[str, Sizes | None], StoredBytes], key: str, offsets: Sizes | None
) -> StoredBytes:
    if (key, offsets) not in places:
        raise _DamagedError(f"it does not say where {key} at {list(offsets or ())} lies")
    return places[key, offsets]


def _where(info: Any, name: str) -> StoredBytes:
    state = _state(info, "_StorageInfo", name)
    file = _of(str, state.get("relative_path"), f"{name}: file")
    begin, length = (_size(state.get(k), name) for k in ("offset", "length"))
    if not file or Path(file).name != file or file.startswith(".") or "\0" in file:
        raise _DamagedError(f"{name} lies in {file!r}; accepted: a file of the folder")
    if state.get("transform_descriptors"):
        found = state["transform_descriptors"]
        raise _DamagedError(f"{name} is stored as {found!r}; accepted: as it is")
    return StoredBytes(file, begin, length)


def _sizes(value: Any, name: str) -> Sizes:
    """Of a ``torch.Size``: called with a tuple."""
    if not isinstance(value, Record) or value.kind != ("torch", "Size") or len(value.args) != 1:
        raise _DamagedError(f"{name}: found {_shown(value)}; accepted: a torch.Size")
    return tuple(_size(n, name) for n in _of(tuple, value.args[0], name))


def _size(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise _DamagedError(f"{name}: found {_shown(value)}; accepted: a size, or a position")
    return value


def _state(value: Any, kind: str, where: str) -> dict[Any, Any]:
    state: dict[Any, Any] = _of(dict, _raw_state(value, kind, where), f"{where}: {kind}")
    return state


def _raw_state(value: Any, kind: str, where: str) -> Any:
    if not isinstance(value, Record) or value.kind[1] != kind:
        raise _DamagedError(f"{where}: found {_shown(value)}; accepted: {kind}")
    return value.state


def _of(kind: type, value: Any, what: str) -> Any:
    if not isinstance(value, kind):
        raise _DamagedError(f"{what}: found {_shown(value)}; accepted: {kind.__name__}")
    return value


def _shown(value: Any) -> str:
    return ".".join(value.kind) if isinstance(value, Record) else repr(value)[:80]
