"""Parameters read from a Hugging Face folder, slab by slab into the memory they are to lie in: of a
whole model's tensors only what a shard takes is read, and nothing is held twice.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from megarl.models.hf_io import HfCheckpoint
from megarl.models.mapping import ModelMapping, Part
from megarl.models.operators import Span

SLAB = 16 * 2**20  # bytes; more where one row of a tensor, or of a view, has more


class Seen(Protocol):
    """Told of what was read: ``values`` are of HF tensor ``name``, or of its entry ``index``, from
    ``offset`` on, in the dtype of the parameter.
    """

    def __call__(
        self, name: str, values: Tensor, index: int | None, *, offset: Sequence[int]
    ) -> None: ...


def read_parameter(
    source: HfCheckpoint,
    mapping: ModelMapping,
    name: str,
    shard: Tensor,
    tp_rank: int = 0,
    tp_size: int = 1,
    seen: Seen | None = None,
) -> None:
    """Fill ``shard``, of ``tp_rank``, of parameter ``name``; its padding is 0.

    Raises DataError as ``HfCheckpoint.get``, or where ``tp_size`` does not divide the parameter.
    """
    parts = mapping.parts(name, tp_rank, tp_size)
    assert tuple(shard.shape) == mapping.shape(name, tp_size), (name, tuple(shard.shape))
    if sum(math.prod(part.shape) for part in parts) < shard.numel():
        shard.zero_()
    for part, view in zip(parts, mapping.views(name, shard, parts), strict=True):
        for rows, slab in slabs(view, part):
            values = _read(source, part, rows, slab)
            if seen is not None:
                offset = [rows[0], *(0 for _ in part.shape[1:])]
                offset[part.axis] += part.span[0]
                seen(part.name, values.to(slab.dtype), part.index, offset=offset)


def _read(source: HfCheckpoint, part: Part, rows: Span, slab: Tensor) -> Tensor:
    """``rows`` of ``part``, of which ``slab`` has the place."""
    if part.name in source.missing:
        return slab.zero_().reshape(rows[1] - rows[0], *part.shape[1:])
    first = part.span[0] if part.axis == 0 else 0
    here = (first + rows[0], first + rows[1])
    columns = part.span if part.axis == 1 else None
    return source.get(part.name, part.index, rows=here, columns=columns, into=slab)


def slabs(view: Tensor, part: Part) -> Iterator[tuple[Span, Tensor]]:
    """(rows of ``part``, the view of them), each of about ``SLAB`` bytes."""
    while view.dim() > len(part.shape) and len(view) == 1:
        view = view[0]
    if not view.numel():
        return
    rows = part.shape[0] // len(view)  # of an entry of the view
    step = max(1, SLAB // (view[0].numel() * view.element_size()))
    for begin in range(0, len(view), step):
        slab = view[begin : begin + step]
        yield (begin * rows, (begin + len(slab)) * rows), slab
