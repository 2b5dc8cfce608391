"""What a checkpoint holds, whether it is whole, and in what it differs from another.

A checkpoint is a run's ``step_N``, a converted one, or one distributed part of either
(``megatron/``, ``critic/``, ``reference/``). Values are read chunk by chunk, in whatever layout
they were written: memory holds one chunk.
"""

import io
import math
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.checkpoint.digests import DIGESTS
from megarl.checkpoint.manager import (
    CRITIC,
    CRITIC_MODEL,
    HF,
    LOOP,
    MEGATRON,
    MODEL,
    REFERENCE,
    read_json,
)
from megarl.checkpoint.models import stored_spec
from megarl.checkpoint.stored import StoredWeights, overlap, read_chunk
from megarl.checkpoint.verify import stored_digests
from megarl.errors import DataError
from megarl.models.dist_metadata import (
    FORMAT,
    DistMetadata,
    StoredChunk,
    StoredTensor,
    read_bytes,
    read_metadata,
)
from megarl.models.sharded import megatron_mapping, parameter_names, place_of
from megarl.ops.digest import digest_partial, finish, merge

_MODELS = {MEGATRON: MODEL, REFERENCE: MODEL, CRITIC: CRITIC_MODEL}
_OF_A_POLICY = "output_layer."  # which a critic has none of; its own head is of no model.json


def parts_of(checkpoint: Path) -> dict[str, Path]:
    """Its distributed parts by name; "" where ``checkpoint`` is one itself. Raises DataError where
    there is none.
    """
    if (checkpoint / FORMAT).is_file():
        return {"": checkpoint}
    found = {name: checkpoint / name for name in _MODELS if (checkpoint / name).is_dir()}
    if not found:
        raise DataError(f"{checkpoint} is no checkpoint: it holds none of {', '.join(_MODELS)}")
    return found


# ---- what it holds -------------------------------------------------------------------------------


def describe(checkpoint: Path) -> dict[str, Any]:
    """For JSON. Raises DataError where ``.metadata`` of a part cannot be used."""
    digests = stored_digests(checkpoint) if (checkpoint / DIGESTS).is_file() else {}
    return {
        "checkpoint": str(checkpoint),
        "step": _json(checkpoint / LOOP).get("step"),
        "model": _json(checkpoint / MODEL) or None,
        "critic": _json(checkpoint / CRITIC_MODEL) or None,
        "parts": {n: _describe_part(read_metadata(p)) for n, p in parts_of(checkpoint).items()},
        "imported": {
            name: {"digest": d.digest, "shape": list(d.shape), "dtype": d.dtype}
            for name, d in digests.items()
        },
    }


def _describe_part(metadata: DistMetadata) -> dict[str, Any]:
    return {
        "ranks": metadata.writers,
        "bytes": sum(map(tensor_bytes, metadata.tensors.values())),
        "tensors": {
            key: {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "chunks": len(tensor.chunks),
                "grid": _grid(tensor),
                "bytes": tensor_bytes(tensor),
            }
            for key, tensor in metadata.tensors.items()
        },
        "objects": {key: where.length for key, where in metadata.objects.items()},
    }


def tensor_bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _grid(tensor: StoredTensor) -> list[int]:
    """Into how many pieces each dimension is cut: what the file tells of the layout."""
    return [len({c.offsets[d] for c in tensor.chunks}) for d in range(len(tensor.shape))]


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


# ---- two of them ---------------------------------------------------------------------------------


def compare(first: Path, second: Path) -> list[str]:
    """Every difference between the tensors of two checkpoints, and between their models. Raises
    DataError where one cannot be read.
    """
    lines = []
    for file in (MODEL, CRITIC_MODEL):
        one, other = _json(first / file), _json(second / file)
        if one and other:
            lines += [
                f"{file}: {key}: {one.get(key)!r}, {other.get(key)!r}"
                for key in sorted(one.keys() | other.keys())
                if one.get(key) != other.get(key)
            ]
    ones, others = parts_of(first), parts_of(second)
    if "" in ones or "" in others:  # a part by itself: of a whole one, its weights
        ones, others = {"": _weights(first, ones)}, {"": _weights(second, others)}
    for name in sorted(ones.keys() | others.keys()):
        if name not in ones or name not in others:
            lines.append(f"{name}: only in {first if name in ones else second}")
        else:
            lines += _compare_parts(name, ones[name], others[name])
    return lines


def _weights(checkpoint: Path, parts: dict[str, Path]) -> Path:
    found = parts.get("", parts.get(MEGATRON))
    if found is None:
        raise DataError(f"{checkpoint} holds no {MEGATRON}; name its {' or '.join(parts)} instead")
    return found


def _compare_parts(name: str, first: Path, second: Path) -> Iterator[str]:
    one, other = (read_metadata(folder).tensors for folder in (first, second))
    for key in sorted(one.keys() | other.keys()):
        where = f"{name}: {key}" if name else key
        if key not in one or key not in other:
            yield f"{where}: only in {first if key in one else second}"
            continue
        kinds = [f"{list(t[key].shape)} {t[key].dtype}" for t in (one, other)]
        if kinds[0] != kinds[1]:
            yield f"{where}: {kinds[0]}, {kinds[1]}".replace("torch.", "")
            continue
        sums = [content_digest(f, key, t[key]) for f, t in ((first, one), (second, other))]
        if sums[0] != sums[1]:
            yield f"{where}: other values (digests {sums[0]}, {sums[1]})"


def content_digest(folder: Path, key: str, tensor: StoredTensor) -> str:
    """Of the whole tensor, from its chunks. Raises DataError where they are not all of it."""
    faults = list(_cover_faults(key, tensor))
    if faults:
        raise DataError(f"{folder}: {faults[0]}")
    partials = []
    for chunk in tensor.chunks:
        values = read_chunk(folder, key, chunk)
        if values.dtype != tensor.dtype:
            raise DataError(f"{folder}: {_dtype_fault(key, chunk, values.dtype, tensor)}")
        partials.append(digest_partial(values, full_shape=tensor.shape, offset=chunk.offsets))
    return finish(merge(partials), tensor.dtype, tensor.shape)


# ---- whether it is whole -------------------------------------------------------------------------


def check(checkpoint: Path) -> list[str]:
    """Everything that is wrong with a checkpoint: chunks that leave out a part of a tensor or
    overlap, files that are missing or too short, bytes that are not those of the checksums, and
    tensors of the model, or parts of the whole, that are not there.
    """
    faults = []
    if (checkpoint / DIGESTS).is_file():
        faults += _said(lambda: stored_digests(checkpoint))
    parts = parts_of(checkpoint)
    if "" not in parts:
        needed = (f"{MEGATRON}/{FORMAT}", f"{HF}/config.json")
        gone = [file for file in needed if not (checkpoint / file).is_file()]
        faults += [f"{checkpoint / file} is missing" for file in gone]
    for name, folder in parts.items():
        try:
            metadata = read_metadata(folder)
        except DataError as e:
            faults.append(str(e))
            continue
        faults += [f"{folder}: {fault}" for fault in _part_faults(folder, metadata)]
        faults += _model_faults(checkpoint, name, folder)
    return faults


def _part_faults(folder: Path, metadata: DistMetadata) -> Iterator[str]:
    short = dict(_file_faults(folder, metadata))
    yield from short.values()
    yield from _shared_bytes(metadata)
    for key, tensor in metadata.tensors.items():
        yield from _cover_faults(key, tensor)
        for chunk in tensor.chunks:
            if chunk.where.file not in short:
                yield from _chunk_faults(folder, key, chunk, tensor)
    for key, where in metadata.objects.items():
        if where.file not in short:
            try:
                damaged = zipfile.ZipFile(io.BytesIO(read_bytes(folder, where))).testzip()
            except zipfile.BadZipFile as e:
                damaged = str(e)
            if damaged is not None:
                yield f"{where.file}: {key} is damaged ({damaged})"


def _file_faults(folder: Path, metadata: DistMetadata) -> Iterator[tuple[str, str]]:
    """(file, what is wrong with it)."""
    needed: dict[str, int] = defaultdict(int)
    wheres = [c.where for t in metadata.tensors.values() for c in t.chunks]
    for where in [*wheres, *metadata.objects.values()]:
        needed[where.file] = max(needed[where.file], where.begin + where.length)
    for file, size in sorted(needed.items()):
        if not (folder / file).is_file():
            yield file, f"{file} is missing"
        elif (found := (folder / file).stat().st_size) < size:
            yield file, f"{file} is truncated: {found} bytes, {size} are needed"


def _shared_bytes(metadata: DistMetadata) -> Iterator[str]:
    """Where two chunks or objects are said to lie in the same bytes."""
    spans: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for key, tensor in metadata.tensors.items():
        for chunk in tensor.chunks:
            name = f"{key} at {list(chunk.offsets)}"
            spans[chunk.where.file].append((chunk.where.begin, chunk.where.length, name))
    for key, where in metadata.objects.items():
        spans[where.file].append((where.begin, where.length, key))
    for file, its in spans.items():
        end, last = 0, ""
        for begin, length, name in sorted(its):
            if begin < end and length:
                yield f"{file}: {name} lies in bytes of {last}"
            if begin + length > end:
                end, last = begin + length, name


def _cover_faults(key: str, tensor: StoredTensor) -> Iterator[str]:
    """Chunks that reach out of the tensor, overlap, or leave something out."""
    count, open_ones = 0, list[StoredChunk]()
    for chunk in sorted(tensor.chunks, key=lambda c: c.offsets):
        what = f"{key}: the chunk {list(chunk.sizes)} at {list(chunk.offsets)}"
        ends = [a + n for a, n in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > size for end, size in zip(ends, tensor.shape, strict=True)):
            yield f"{what} reaches out of {list(tensor.shape)}"
        if chunk.offsets:  # only those can overlap that reach as far in the first dimension
            begin = chunk.offsets[0]
            open_ones = [c for c in open_ones if c.offsets[0] + c.sizes[0] > begin]
        for other in open_ones:
            if overlap(chunk.offsets, chunk.sizes, other):
                yield f"{what} overlaps that at {list(other.offsets)}"
        open_ones.append(chunk)
        count += math.prod(chunk.sizes)
    wanted = math.prod(tensor.shape)
    if count < wanted:
        yield f"{key}: chunks hold {count} of {wanted} elements"


def _chunk_faults(
    folder: Path, key: str, chunk: StoredChunk, tensor: StoredTensor
) -> Iterator[str]:
    try:
        values = read_chunk(folder, key, chunk)
    except DataError as e:
        yield str(e)
        return
    if values.dtype != tensor.dtype:
        yield _dtype_fault(key, chunk, values.dtype, tensor)


def _dtype_fault(key: str, chunk: StoredChunk, found: object, tensor: StoredTensor) -> str:
    text = f"{key} at {list(chunk.offsets)}: found {found}; the tensor's is {tensor.dtype}"
    return text.replace("torch.", "")


def _model_faults(checkpoint: Path, name: str, folder: Path) -> list[str]:
    """Tensors of the model that the part has not, or in other shapes."""
    if name not in _MODELS:
        return []

    def look() -> None:
        mapping = megatron_mapping(stored_spec(checkpoint / _MODELS[name]))
        places = [place_of(mapping, parameter) for parameter in parameter_names(mapping)]
        body = [p for p in places if name != CRITIC or not p.key.startswith(_OF_A_POLICY)]
        found = StoredWeights(folder).faults(body)
        if found:
            raise DataError("\n".join(f"{folder}: {fault}" for fault in found))

    return _said(look)


def _said(look: Any) -> list[str]:
    """What a DataError says, a line each."""
    try:
        look()
    except DataError as e:
        return str(e).splitlines()
    return []
