"""A model's weights from a Hugging Face folder into a distributed checkpoint (torch_dist), and
back, one parameter after another: no model is built, and memory holds what one mapping rule needs
for one layer, one expert at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megarl.checkpoint.digests import Digests, DigestSum
from megarl.checkpoint.stored import StoredWeights
from megarl.checkpoint.torch_dist import ChunkFile, Written, finish
from megarl.checkpoint.workers import Item, Thread, Workers
from megarl.models.fp8_export import Fp8Export
from megarl.models.hf_complete import check_complete
from megarl.models.hf_io import HfCheckpoint
from megarl.models.hf_parameters import read_parameter, slabs
from megarl.models.hf_write import Entry, HfWriter
from megarl.models.mapping import ModelMapping
from megarl.models.sharded import Place, megatron_mapping, parameter_names, place_of
from megarl.models.spec import ModelSpec


def places_of(mapping: ModelMapping) -> dict[str, Place]:
    """Of every parameter, by name, in the order of the layers."""
    return {name: place_of(mapping, name) for name in parameter_names(mapping)}


def items_of(places: dict[str, Place]) -> list[Item]:
    return [Item(name, place.num_bytes) for name, place in places.items()]


# ---- importing -----------------------------------------------------------------------------------


def write_weights(
    folder: Path, source: HfCheckpoint, spec: ModelSpec, workers: Workers | None = None
) -> Digests:
    """Every weight of ``source`` into ``folder``, which is empty; complete when this returns
    digests of them (in the first process; of all). Collective over ``workers``, by default this
    process alone.

    Raises DataError when a tensor is missing, unknown, or of another shape than config.json
    implies, before anything is written.
    """
    workers = workers or Workers()
    check_complete(source, spec, allow_missing=source.missing)
    mapping = megatron_mapping(spec)
    places = places_of(mapping)
    sums = DigestSum(mapping.hf_spec(), mapping.copies())
    written = workers.together(
        "writing weights", lambda: _write_share(folder, source, mapping, places, workers, sums)
    )
    chunks = [chunk for share in workers.gather(written) for chunk in share]
    workers.first("completing the checkpoint", lambda: finish(folder, places.values(), chunks))
    return gathered(sums, workers)


def _write_share(
    folder: Path,
    source: HfCheckpoint,
    mapping: ModelMapping,
    places: dict[str, Place],
    workers: Workers,
    sums: DigestSum,
) -> list[Written]:
    files = [ChunkFile(folder, workers.rank, number) for number in range(workers.threads)]

    def write(item: Item, thread: Thread) -> None:
        place = places[item.name]
        with thread.memory(place.parameter, getattr(torch, place.dtype)) as parameter:
            read_parameter(source, mapping, item.name, parameter, seen=sums.add)
            for chunk in place.chunks:
                rows = parameter[chunk.begin : chunk.end].view(chunk.sizes)
                files[thread.number].write(place.key, chunk.offsets, rows)

    try:
        workers.run(workers.share(items_of(places)), write)
    finally:
        for file in files:
            file.close()
    return [one for file in files for one in file.written]


# ---- exporting -----------------------------------------------------------------------------------

WriteItem = Callable[[Item, Thread, HfWriter], None]


def export_weights(
    folder: Path,
    out: Path,
    spec: ModelSpec,
    workers: Workers | None = None,
    *,
    files: Mapping[str, str] | None = None,
    fp8: Fp8Export | None = None,
) -> Digests:
    """The weights of the distributed checkpoint ``folder``, of any layout, with optimizer or
    without, into ``out``, which is empty, plain or in FP8 blocks: complete when this returns
    digests of them, as they are before they go into codes (in the first process; of all).
    Collective over ``workers``, by default this process alone. ``files``: as ``HfWriter``.

    Raises DataError, before anything is written, when a tensor is missing or of another shape than
    the model's.
    """
    mapping = megatron_mapping(spec)
    places = places_of(mapping)
    stored = StoredWeights(folder)
    stored.check(list(places.values()))
    sums = DigestSum(mapping.hf_spec(), mapping.copies())

    def write(item: Item, thread: Thread, writer: HfWriter) -> None:
        place = places[item.name]
        with thread.memory(place.parameter, getattr(torch, place.dtype)) as parameter:
            stored.read(place, parameter)
            add_parameter(sums, mapping, item.name, parameter)
            for hf, row, values in _tensors(mapping, item.name, parameter, fp8):
                writer.write(hf, values, row)

    workers = workers or Workers()
    specs = mapping.hf_spec() if fp8 is None else fp8.specs
    write_folder(HfWriter(out, specs, files=files), items_of(places), write, workers)
    return gathered(sums, workers)


def write_folder(
    writer: HfWriter, items: Sequence[Item], write: WriteItem, workers: Workers
) -> None:
    """Let ``write`` write all items, shared over ``workers``; durable when this returns."""
    workers.first("creating files", writer.create)

    def write_share() -> None:
        try:
            workers.run(workers.share(items), lambda item, thread: write(item, thread, writer))
        finally:
            writer.close()

    workers.together("writing weights", write_share)
    elements = workers.gather(writer.elements())
    workers.first("completing the folder", lambda: writer.complete(elements))


def add_parameter(sums: DigestSum, mapping: ModelMapping, name: str, parameter: Tensor) -> None:
    """All that a parameter holds, under Hugging Face names."""
    parts = mapping.parts(name)
    for part, view in zip(parts, mapping.views(name, parameter, parts), strict=True):
        for (begin, end), slab in slabs(view, part):
            values = slab.reshape(end - begin, *part.shape[1:])
            offset = [begin, *(0 for _ in part.shape[1:])]
            sums.add(part.name, values, part.index, offset=offset)


def gathered(sums: DigestSum, workers: Workers) -> Digests:
    """Of what all processes have added up, in the first; nothing elsewhere."""
    for others in workers.gather(sums.sums())[1:]:
        sums.merge(others)
    digests: Digests | None = workers.first("adding up digests", sums.digests)
    return digests or {}


def _tensors(
    mapping: ModelMapping, name: str, parameter: Tensor, fp8: Fp8Export | None
) -> Iterator[tuple[str, int, Tensor | Entry]]:
    """(HF tensor, first row, values) of all that a parameter holds. What goes into
    codes comes whole, the rest in slabs.
    """
    parts = mapping.parts(name)
    copies = [hf for hf, _ in mapping.exported(name)[len(parts) :]]
    names = [[parts[0].name, *copies], *([part.name] for part in parts[1:])]
    for part, view, same in zip(parts, mapping.views(name, parameter, parts), names, strict=True):
        if fp8 is not None and part.name in fp8.codes:
            for hf, tensor in fp8.parts(part.name, view.reshape(part.shape)):
                yield hf, 0, tensor
            continue
        for (begin, end), slab in slabs(view, part):
            values = slab.reshape(end - begin, *part.shape[1:])
            entry = values if part.index is None else Entry(part.index, values)
            yield from ((hf, begin, entry) for hf in same)
