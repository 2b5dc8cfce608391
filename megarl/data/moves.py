"""Who gets what of a step's samples: arithmetic on facts and plan, the same on every rank.

1. A rank uses pieces of the samples of its own data-parallel rank: the first pipeline stage their
   tokens, the last one tokens (its labels), masks, log-probs and what else they bring, every stage
   the routing of its own MoE layers. Tensor- and context-parallel ranks use the same.
2. What a node uses and another collected goes from leader to leader, once, whoever uses it there;
   what the ranks of a node beside its leader use lies in memory that they share.
3. Pieces of a message, or of that memory, lie end to end: by sample, then ALL_STAGES before the
   stages, fields in the order of ``DTYPES``.

``exchange.py`` moves these bytes; nothing else decides them.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megarl.mesh import Mesh
from megarl.types import SampleFacts

ALL_STAGES = -1
EVERY_RANK = -1  # as a holder
DTYPES = {
    "tokens": np.dtype(np.int32),
    "mask": np.dtype(np.bool_),
    "rollout_logprobs": np.dtype(np.float32),
    "values": np.dtype(np.float32),
    "ref_logprobs": np.dtype(np.float32),
}


class Piece(NamedTuple):
    """A field of a sample; of routing the layers of one stage."""

    sample: int
    stage: int  # ALL_STAGES for what is no stage's own
    field: str


def leaders_of(of_rank: Sequence[int]) -> list[int]:
    """The first rank of every node."""
    return [of_rank.index(node) for node in range(of_rank[-1] + 1)]


@dataclass(frozen=True)
class Moves:
    """``of_rank``: the node of every rank. ``stage_layers``: which of the MoE layers, counted from
    0, each pipeline stage has. By sample: ``facts``, ``holders``: the leader that has it or
    EVERY_RANK, ``dp_ranks``: who trains it.
    """

    mesh: Mesh
    of_rank: Sequence[int]
    stage_layers: Sequence[Sequence[int]]
    facts: Sequence[SampleFacts]
    holders: Sequence[int]
    dp_ranks: Sequence[int]

    def used_by(self, rank: int) -> list[Piece]:
        """What a rank builds its rows of."""
        return self._pieces([rank])

    def missing(self, rank: int) -> list[Piece]:
        """Of that, what it gets from others."""
        here = (rank, EVERY_RANK)
        return [p for p in self.used_by(rank) if self.holders[p.sample] not in here]

    def shared(self, node: int) -> list[Piece]:
        """What the ranks of a node beside its leader use."""
        return self._pieces(self._ranks(node)[1:])

    def incoming(self, node: int) -> dict[int, list[Piece]]:
        """What a node's leader gets from each of the others that send it something."""
        mine = self._ranks(node)
        found: dict[int, list[Piece]] = {}
        for piece in self._pieces(mine):
            holder = self.holders[piece.sample]
            if holder not in (mine[0], EVERY_RANK):
                found.setdefault(holder, []).append(piece)
        return found

    def outgoing(self, leader: int) -> dict[int, list[Piece]]:
        """What a leader sends, by the leader that gets it."""
        found = {
            other: self._pieces(self._ranks(node), held_by=leader)
            for node, other in enumerate(leaders_of(self.of_rank))
            if other != leader
        }
        return {other: pieces for other, pieces in found.items() if pieces}

    def kind(self, piece: Piece) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Type and shape."""
        facts = self.facts[piece.sample]
        if piece.field != "routing":
            return DTYPES[piece.field], (facts.length,)
        assert facts.routing is not None, piece
        _, experts, dtype = facts.routing
        return np.dtype(dtype), (facts.length - 1, len(self.stage_layers[piece.stage]), experts)

    def num_bytes(self, pieces: Iterable[Piece]) -> int:
        kinds = map(self.kind, pieces)
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in kinds)

    def _pieces(self, ranks: Iterable[int], held_by: int | None = None) -> list[Piece]:
        """What these ranks use together, each piece once, in order."""
        stages: dict[int, set[int]] = {}
        for at in map(self.mesh.coordinates, ranks):
            stages.setdefault(at.dp, set()).add(at.pp)
        samples = sorted(i for dp in stages for i in self._samples.get(dp, ()))
        return [
            piece
            for i in samples
            if held_by is None or self.holders[i] == held_by
            for piece in self._of_sample(i, stages[self.dp_ranks[i]])
        ]

    def _of_sample(self, i: int, stages: set[int]) -> Iterator[Piece]:
        facts, names = self.facts[i], set()
        if 0 in stages:
            names |= {"tokens"}
        if self.mesh.pp - 1 in stages:
            names |= {"tokens", "mask", "rollout_logprobs", *facts.brings}
        yield from (Piece(i, ALL_STAGES, name) for name in DTYPES if name in names)
        if facts.routing is not None:
            layers = self.stage_layers
            yield from (Piece(i, stage, "routing") for stage in sorted(stages) if layers[stage])

    def _ranks(self, node: int) -> list[int]:
        return [r for r, n in enumerate(self.of_rank) if n == node]

    @cached_property
    def _samples(self) -> dict[int, list[int]]:
        """Of every data-parallel rank."""
        found: dict[int, list[int]] = {}
        for i, dp in enumerate(self.dp_ranks):
            found.setdefault(dp, []).append(i)
        return found
