"""Per-token numbers of a step, from the rows of one layout to those of another.

A critic in a layout of its own has rows of its own: the same samples, packed for its mesh. Its
values are needed where advantages are computed, in the actor's rows; the returns that come of them
are needed in its own.

1. Every sample has a place in one vector of the step's tokens, which follows from the samples'
   lengths alone.
2. Of the ranks that hold a row, one writes it into the vector; the rest of the vector is zero.
3. The vectors' sum over all ranks holds every number once. It is taken of the floats' bits, as
   integers, so a number arrives as it was, also a NaN or -0.0.
4. 4 bytes a token cross the ranks: a step of 4 million tokens is an all-reduce of 16 MB.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from megarl.actor.setup import Parallel
from megarl.types import PackedBatch, SampleFacts, TrainPlan

Side = tuple[TrainPlan, Parallel]


def move(name: str, samples: Sequence[SampleFacts], source: Side, target: Side) -> None:
    """Give the rows of ``target``'s last stage the field ``name`` (f32 [T]) that ``source``'s last
    stage has. Collective over all ranks.
    """
    places = [0, *accumulate(s.length for s in samples)]
    bits = torch.zeros(places[-1], dtype=torch.int32)
    plan, parallel = source
    for row in _rows(plan) if parallel.speaks_for_rows else ():
        values = getattr(row, name)
        for i, start, n in row.segments():
            bits[places[i] : places[i + 1]] = values[start : start + n].view(torch.int32)
    shared = bits.to(parallel.device)
    dist.all_reduce(shared)
    found = shared.cpu().view(torch.float32)
    plan, parallel = target
    for row in _rows(plan) if parallel.last_stage else ():
        values = torch.zeros(len(row.tokens))
        for i, start, n in row.segments():
            values[start : start + n] = found[places[i] : places[i + 1]]
        setattr(row, name, values)


def _rows(plan: TrainPlan) -> list[PackedBatch]:
    return [row for rows in plan.steps for row in rows]
