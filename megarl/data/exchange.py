"""A step's samples, from the ranks that collected them to the ranks that train on them.

1. Facts, a few numbers a sample, go to every rank: steps, rows and statistics are made of them.
2. Then tokens move once, to the ranks that use them. Who gets what follows from facts and plan,
   which every rank has (``moves.py``): messages are bare bytes, and nobody has to be told their
   sizes. How they travel is in ``nodes.py``.

Nothing is pickled. What is here already does not move.
"""

import base64
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megarl.data.moves import ALL_STAGES, DTYPES, EVERY_RANK, Moves, Piece
from megarl.data.nodes import Nodes
from megarl.data.packing import Payload
from megarl.hostcomm import gather_and_share
from megarl.mesh import Mesh
from megarl.types import Sample, SampleFacts, VersionSpan

_ARRAYS = {"rewards": np.float32, "step_rewards": np.float32, "step_ends": np.int32}


@dataclass(frozen=True)
class Collected:
    """A sample of a step as one rank has it: its facts, and itself on the rank that ``holder``
    names, or on every rank.
    """

    facts: SampleFacts
    holder: int
    sample: Sample | None


def share_facts(
    local: Sequence[Sample], collectors: Sequence[int], rank: int, group: dist.ProcessGroup
) -> list[Collected]:
    """Every collector's samples as this rank knows them, in the order of ``collectors``. Collective
    over ``group``.
    """
    mine = encode_facts([s.facts for s in local]) if rank in collectors else None
    said = gather_and_share(mine, group)
    found: list[Collected] = []
    for collector in collectors:
        facts = decode_facts(said[collector])
        samples: Sequence[Sample | None] = local if rank == collector else [None] * len(facts)
        found += [Collected(f, collector, s) for f, s in zip(facts, samples, strict=True)]
    return found


def everywhere(samples: Sequence[Sample]) -> list[Collected]:
    """Samples that every rank has read for itself."""
    return [Collected(sample.facts, EVERY_RANK, sample) for sample in samples]


@dataclass(frozen=True)
class Delivery:
    """``payloads``: of the samples that this rank trains. ``received``: bytes of them that it got
    from others. ``carried``: bytes that a leader got from other nodes for all of its node.
    ``seconds``: of all that, waiting included.
    """

    payloads: dict[int, Payload]
    received: int
    carried: int
    seconds: float


@dataclass(frozen=True)
class Exchange:
    """``stage_layers``: which of the MoE layers, counted from 0, each pipeline stage has."""

    mesh: Mesh
    nodes: Nodes
    stage_layers: Sequence[Sequence[int]]

    def deliver(self, collected: Sequence[Collected], dp_ranks: Sequence[int]) -> Delivery:
        """``dp_ranks``: which data-parallel rank trains each sample. Collective over all trainer
        ranks.
        """
        start = time.perf_counter()
        step, nodes = _Step(self._moves(collected, dp_ranks), collected), self.nodes
        moves, at = step.moves, self.mesh.coordinates(nodes.rank)
        missing = moves.missing(nodes.rank)
        there = set(missing)
        here = {p: step.cut(p) for p in moves.used_by(nodes.rank) if p not in there}
        carried: dict[Piece, NDArray[Any]] = {}
        if any(c.holder != EVERY_RANK for c in collected):
            node = nodes.of_rank[nodes.rank]
            read = nodes.share(
                lambda: step.for_my_node(nodes, carried),
                lambda memory: step.read(memory, moves.shared(node), there),
            )
            arrived = carried if read is None else read
            here |= {p: arrived[p] for p in missing}
        payloads = {i: step.payload(i, at.pp, here) for i, dp in enumerate(dp_ranks) if dp == at.dp}
        received, num_carried = (
            sum(array.nbytes for array in arrays)
            for arrays in ((here[p] for p in missing), carried.values())
        )
        return Delivery(payloads, received, num_carried, time.perf_counter() - start)

    def _moves(self, collected: Sequence[Collected], dp_ranks: Sequence[int]) -> Moves:
        facts, holders = [c.facts for c in collected], [c.holder for c in collected]
        nodes = self.nodes
        return Moves(self.mesh, nodes.of_rank, self.stage_layers, facts, holders, dp_ranks)


@dataclass(frozen=True)
class _Step:
    """The bytes of one step's pieces."""

    moves: Moves
    collected: Sequence[Collected]

    def for_my_node(self, nodes: Nodes, carried: dict[Piece, NDArray[Any]]) -> Iterator[memoryview]:
        """For a leader: the bytes that the others of its node read. ``carried`` becomes what its
        node uses of other nodes' samples.
        """
        moves, node = self.moves, nodes.of_rank[nodes.rank]
        outgoing = {
            leader: torch.from_numpy(self._joined(pieces))
            for leader, pieces in moves.outgoing(nodes.rank).items()
        }
        incoming = moves.incoming(node)
        sizes = {source: moves.num_bytes(pieces) for source, pieces in incoming.items()}
        for source, message in nodes.exchange(outgoing, sizes).items():
            carried |= self._split(message.numpy(), incoming[source])
        return (part.data for part in self._parts(moves.shared(node), carried))

    def read(
        self, memory: memoryview, pieces: Sequence[Piece], wanted: set[Piece]
    ) -> dict[Piece, NDArray[Any]]:
        """Copies of what is wanted of ``for_my_node``'s bytes, which are those of ``pieces``."""
        everything = self._split(memory, pieces)
        return {piece: array.copy() for piece, array in everything.items() if piece in wanted}

    def payload(self, i: int, stage: int, here: Mapping[Piece, NDArray[Any]]) -> Payload:
        fields = {name: here.get(Piece(i, ALL_STAGES, name)) for name in DTYPES}
        routing = here.get(Piece(i, stage, "routing"))
        return Payload(self.collected[i].facts.length, **fields, routing=routing)

    def cut(self, piece: Piece) -> NDArray[Any]:
        """A piece of a sample that is here: a view of it, where layers follow one another."""
        sample = self.collected[piece.sample].sample
        assert sample is not None, piece
        if piece.field != "routing":
            return np.asarray(getattr(sample, piece.field))
        assert sample.routing is not None, piece
        layers = list(self.moves.stage_layers[piece.stage])
        first, end = layers[0], layers[-1] + 1
        run = layers == list(range(first, end))
        return sample.routing[:, first:end] if run else sample.routing[:, layers]

    def _parts(
        self, pieces: Sequence[Piece], known: Mapping[Piece, NDArray[Any]]
    ) -> Iterator[NDArray[np.uint8]]:
        """Piece by piece, from ``known`` or from samples that are here."""
        for piece in pieces:
            array = known[piece] if piece in known else self.cut(piece)
            assert (array.dtype, array.shape) == self.moves.kind(piece), (piece, array.dtype)
            yield np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def _joined(self, pieces: Sequence[Piece]) -> NDArray[np.uint8]:
        """The bytes of ``pieces`` end to end, from samples that are here."""
        whole, at = np.empty(self.moves.num_bytes(pieces), np.uint8), 0
        for part in self._parts(pieces, {}):
            whole[at : at + len(part)] = part
            at += len(part)
        return whole

    def _split(
        self, message: memoryview | NDArray[Any], pieces: Sequence[Piece]
    ) -> dict[Piece, NDArray[Any]]:
        """Views into the bytes of ``pieces``."""
        whole, found, at = np.frombuffer(message, np.uint8), {}, 0
        for piece in pieces:
            dtype, shape = self.moves.kind(piece)
            end = at + self.moves.num_bytes([piece])
            found[piece] = whole[at:end].view(dtype).reshape(shape)
            at = end
        assert at == len(whole), (at, len(whole))
        return found


def encode_facts(facts: Sequence[SampleFacts]) -> list[dict[str, Any]]:
    """As JSON values; numbers of samples as their bytes."""
    return [_plain(f) for f in facts]


def _plain(facts: SampleFacts) -> dict[str, Any]:
    plain = {field.name: getattr(facts, field.name) for field in fields(facts)}
    for name, dtype in _ARRAYS.items():
        if plain[name] is not None:
            assert plain[name].dtype == dtype, (name, plain[name].dtype)
            plain[name] = base64.b64encode(plain[name].tobytes()).decode()
    spans = [(s.version, s.start, s.end, s.server) for s in facts.version_spans]
    return plain | {"version_spans": spans}


def decode_facts(values: Sequence[dict[str, Any]]) -> list[SampleFacts]:
    """The inverse, bit for bit."""
    return [_facts(plain) for plain in values]


def _facts(plain: dict[str, Any]) -> SampleFacts:
    for name, dtype in _ARRAYS.items():
        if plain[name] is not None:
            plain[name] = np.frombuffer(base64.b64decode(plain[name]), dtype).copy()
    routing = plain["routing"]
    plain |= {"brings": tuple(plain["brings"]), "routing": routing and tuple(routing)}
    plain["version_spans"] = tuple(VersionSpan(*span) for span in plain["version_spans"])
    return SampleFacts(**plain)
