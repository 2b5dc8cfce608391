"""Parameters read from a Hugging Face folder, slab by slab into the memory they are to lie in: of a
whole model's tensors only what a shard takes is read, and nothing is held twice.
"""

import math
from collections.abc import Callable, Iterator

from torch import Tensor

from megarl.models.hf_io import HfCheckpoint
from megarl.models.mapping import ModelMapping, Part
from megarl.models.operators import Span

SLAB = 16 * 2**20  # bytes; more where one row of a tensor, or of a view, has more
Seen = Callable[[str, int | None, int, Tensor], None]


def read_parameter(
    source: HfCheckpoint,
    mapping: ModelMapping,
    name: str,
    shard: Tensor,
    tp_rank: int = 0,
    tp_size: int = 1,
    seen: Seen | None = None,
) -> None:
    """Fill ``shard``, of ``tp_rank``, of parameter ``name``; its padding is 0. ``seen`` is told of
    everything that is read: HF tensor, entry of it or None, first row, values as the folder has
    them.

    Raises DataError as ``HfCheckpoint.get``, or where ``tp_size`` does not divide the parameter.
    """
    parts = mapping.parts(name, tp_rank, tp_size)
    assert tuple(shard.shape) == mapping.shape(name, tp_size), (name, tuple(shard.shape))
    if sum(math.prod(part.shape) for part in parts) < shard.numel():
        shard.zero_()
    for part, view in zip(parts, mapping.views(name, shard, parts), strict=True):
        if part.name in source.missing:
            view.zero_()
            continue
        for rows, slab in slabs(view, part):
            spans = {"columns": part.span} if part.axis == 1 else {}
            first = part.span[0] if part.axis == 0 else 0
            here = (first + rows[0], first + rows[1])
            values = source.get(part.name, part.index, rows=here, into=slab, **spans)
            if seen is not None:
                seen(part.name, part.index, here[0], values)


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
