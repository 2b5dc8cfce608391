"""A model's weights from a Hugging Face folder into Megatron's distributed checkpoint format
(torch_dist), and back, one parameter after another: no model is built, and memory holds what one
mapping rule needs for one layer, one expert at a time.

A checkpoint of weights is::

    metadata.json     the format's name and version
    .metadata         a pickle: every tensor's shape, dtype and chunks, and where each chunk lies
    __0_0.distcp      the chunks one after another, each as ``torch.save`` writes a tensor; before
                      them what is not a tensor, of which a model has nothing

Upstream's own writer keeps the last chunk of every tensor until a file is complete (torch 2.13,
``_write_files_from_queue``): its files are written here, its ``.metadata`` by it.
"""

import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

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

from megarl.checkpoint.digests import Digests, DigestSum
from megarl.checkpoint.stored import StoredWeights
from megarl.models.hf_complete import check_complete
from megarl.models.hf_io import HfCheckpoint
from megarl.models.hf_write import Entry, write_checkpoint
from megarl.models.mapping import ModelMapping
from megarl.models.sharded import Chunk, Place, megatron_mapping, parameter_names, place_of
from megarl.models.spec import ModelSpec
from megarl.rundir import write_json

_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON = "common_state/shard_0_1"  # what is not a tensor
_FILE = "__0_0.distcp"


def _places(mapping: ModelMapping) -> dict[str, Place]:
    return {name: place_of(mapping, name) for name in parameter_names(mapping)}


# ---- importing -----------------------------------------------------------------------------------


def write_weights(folder: Path, source: HfCheckpoint, spec: ModelSpec) -> Digests:
    """Every weight of ``source`` into ``folder``, which is empty; complete when this returns
    digests of them.

    Raises DataError when a tensor is missing, unknown, or of another shape than config.json
    implies, before anything is written.
    """
    check_complete(source, spec, ())
    mapping = megatron_mapping(spec)
    places = _places(mapping)
    sums = DigestSum(mapping.hf_spec(), mapping.copies())
    with (folder / _FILE).open("wb") as file:
        results = [_write(file, MetadataIndex(_COMMON), _bytes([{}]))]
        for name, place in places.items():
            results += _write_parameter(file, place, _parameter(mapping, source, name, sums))
        file.flush()
        os.fsync(file.fileno())
    writer = FileSystemWriter(folder)
    writer.finish(Metadata(_tensors(list(places.values()))), [results])
    write_json(folder / "metadata.json", _FORMAT)
    return sums.digests()


def _write_parameter(file: Any, place: Place, tensor: Tensor) -> list[WriteResult]:
    tensor = tensor.to(getattr(torch, place.dtype))
    return [
        _write(file, MetadataIndex(place.key, chunk.offsets), _part(tensor, chunk))
        for chunk in place.chunks
    ]


def _parameter(mapping: ModelMapping, source: HfCheckpoint, name: str, sums: DigestSum) -> Tensor:
    index = mapping.slice_of(name)
    dtype = getattr(torch, mapping.rule_of(name).dtype or mapping.spec.dtype)
    tensors = {hf: source.get(hf, index).to(dtype) for hf in mapping.hf_names(name)}
    for hf, tensor in tensors.items():
        sums.add(hf, tensor, index)
    return mapping.to_megatron(name, list(tensors.values()))


def _part(tensor: Tensor, chunk: Chunk) -> Tensor:
    """In memory of its own: ``torch.save`` writes all of a tensor's."""
    rows = tensor[chunk.begin : chunk.end]
    return (rows if len(rows) == len(tensor) else rows.clone()).view(chunk.sizes)


def _bytes(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream


def _write(file: Any, index: MetadataIndex, data: Tensor | io.BytesIO) -> WriteResult:
    begin = file.tell()
    if isinstance(data, Tensor):
        torch.save(data, file)
    else:
        file.write(data.getbuffer())
    length = file.tell() - begin
    return WriteResult(index, length, _StorageInfo(_FILE, begin, length))


def _tensors(places: Sequence[Place]) -> dict[str, Any]:
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


# ---- exporting -----------------------------------------------------------------------------------


def export_weights(
    folder: Path,
    out: Path,
    spec: ModelSpec,
    metadata_from: Path,
    verify: Callable[[Path], None] | None = None,
) -> Digests:
    """The weights of the distributed checkpoint ``folder``, of any layout, with optimizer or
    without, as the Hugging Face folder ``out``:
    whole or not at all (``hf_write.write_checkpoint``). Returns digests of what was written.
    ``verify``: is given the folder before it appears.

    Raises DataError, before anything is written, when a tensor is missing or of another shape than
    the model's.
    """
    mapping = megatron_mapping(spec)
    stored = StoredWeights(folder)
    places = _places(mapping)
    stored.check(list(places.values()))
    sums = DigestSum(mapping.hf_spec(), mapping.copies())
    tensors = _exported(mapping, places, stored, sums)
    write_checkpoint(out, tensors, mapping.hf_spec(), metadata_from, verify=verify)
    return sums.digests()


def _exported(
    mapping: ModelMapping, places: dict[str, Place], stored: StoredWeights, sums: DigestSum
) -> Iterator[tuple[str, Tensor | Entry]]:
    for name, place in places.items():
        index = mapping.slice_of(name)
        for hf, tensor in mapping.to_hf(name, [stored.read(place)]):
            sums.add(hf, tensor, index)
            yield hf, tensor if index is None else Entry(index, tensor)
