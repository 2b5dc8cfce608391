"""A step's samples, from the ranks that collected them to the ranks that train on them.

1. Facts, a few numbers a sample, go to every rank: steps, rows and statistics are made of them.
2. Then tokens move once. A rank gets pieces of the samples of its own data-parallel rank alone: the
   first pipeline stage their tokens, the last one tokens (its labels), masks, log-probs and what
   else they bring, every stage the routing of its own MoE layers. Tensor- and context-parallel
   ranks get the same.
3. Who gets what follows from facts and plan, which every rank has: messages are bare bytes, pieces
   in order of sample, stage and field, and nobody has to be told their sizes. How they travel is
   in ``nodes.py``.

Nothing is pickled. What is here already does not move.
"""

import base64
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megarl.data.nodes import Nodes
from megarl.data.packing import Payload
from megarl.hostcomm import broadcast_bytes
from megarl.mesh import Mesh
from megarl.types import Sample, SampleFacts, VersionSpan

ALL_STAGES = -1
_DTYPES = {
    "tokens": np.dtype(np.int32),
    "mask": np.dtype(np.bool_),
    "rollout_logprobs": np.dtype(np.float32),
    "values": np.dtype(np.float32),
    "ref_logprobs": np.dtype(np.float32),
}
_ARRAYS = {"rewards": np.float32, "step_rewards": np.float32, "step_ends": np.int32}


EVERY_RANK = -1


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
    found: list[Collected] = []
    for collector in collectors:
        here = rank == collector
        payload = _encode([s.facts for s in local]) if here else None
        received = _decode(broadcast_bytes(payload, collector, group))
        samples: Sequence[Sample | None] = local if here else [None] * len(received)
        found += [Collected(f, collector, s) for f, s in zip(received, samples, strict=True)]
    return found


def everywhere(samples: Sequence[Sample]) -> list[Collected]:
    """Samples that every rank has read for itself."""
    return [Collected(sample.facts, EVERY_RANK, sample) for sample in samples]


class Piece(NamedTuple):
    """A field of a sample; of routing the layers of one stage."""

    sample: int
    stage: int  # ALL_STAGES for what is no stage's own
    field: str


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
        step, nodes = _Step(self, collected, dp_ranks), self.nodes
        at = self.mesh.coordinates(nodes.rank)
        wanted = step.pieces([nodes.rank])
        here = {p: step.cut(p) for p in wanted if collected[p.sample].sample is not None}
        carried: dict[Piece, NDArray[Any]] = {}
        if any(c.holder != EVERY_RANK for c in collected):
            missing = {p for p in wanted if p not in here}
            read = nodes.share(
                lambda: step.for_my_node(carried), lambda memory: step.read(memory, missing)
            )
            arrived = carried if read is None else read
            here |= {p: arrived[p] for p in missing}
        received = sum(here[p].nbytes for p in wanted if collected[p.sample].sample is None)
        payloads = {i: step.payload(i, at.pp, here) for i, dp in enumerate(dp_ranks) if dp == at.dp}
        num_carried = sum(array.nbytes for array in carried.values())
        return Delivery(payloads, received, num_carried, time.perf_counter() - start)


@dataclass(frozen=True)
class _Step:
    """Who gets what of one step's samples."""

    exchange: Exchange
    collected: Sequence[Collected]
    dp_ranks: Sequence[int]

    def pieces(self, ranks: Iterable[int]) -> list[Piece]:
        """What these ranks use together, each piece once, in order."""
        mesh = self.exchange.mesh
        stages: dict[int, set[int]] = {}
        for at in map(mesh.coordinates, ranks):
            stages.setdefault(at.dp, set()).add(at.pp)
        return [
            piece
            for i, dp in enumerate(self.dp_ranks)
            if dp in stages
            for piece in self._of_sample(i, stages[dp])
        ]

    def _of_sample(self, i: int, stages: set[int]) -> Iterator[Piece]:
        facts, names = self.collected[i].facts, set()
        if 0 in stages:
            names |= {"tokens"}
        if self.exchange.mesh.pp - 1 in stages:
            names |= {"tokens", "mask", "rollout_logprobs", *facts.brings}
        yield from (Piece(i, ALL_STAGES, name) for name in _DTYPES if name in names)
        if facts.routing is not None:
            layers = self.exchange.stage_layers
            yield from (Piece(i, stage, "routing") for stage in sorted(stages) if layers[stage])

    def for_my_node(self, carried: dict[Piece, NDArray[Any]]) -> bytes:
        """For a leader: the bytes that the others of its node read. ``carried`` becomes what its
        node uses of other nodes' samples.
        """
        nodes, rank = self.exchange.nodes, self.exchange.nodes.rank
        outgoing, incoming = {}, {}
        for node, leader in enumerate(nodes.leaders):
            used = self.pieces(r for r, n in enumerate(nodes.of_rank) if n == node)
            if leader == rank:
                incoming = {source: self._held(used, source) for source in nodes.leaders}
            elif held := self._held(used, rank):
                outgoing[leader] = torch.from_numpy(self._joined(held, {}))
        incoming = {s: held for s, held in incoming.items() if held and s != rank}
        sizes = {source: sum(map(self._bytes, held)) for source, held in incoming.items()}
        for source, message in nodes.exchange(outgoing, sizes).items():
            carried |= self._split(message.numpy(), incoming[source])
        return self._joined(self.pieces(nodes.mine[1:]), carried).tobytes()

    def read(self, memory: memoryview, wanted: set[Piece]) -> dict[Piece, NDArray[Any]]:
        """Copies of what is wanted of ``for_my_node``'s bytes."""
        everything = self._split(memory, self.pieces(self.exchange.nodes.mine[1:]))
        return {piece: array.copy() for piece, array in everything.items() if piece in wanted}

    def payload(self, i: int, stage: int, here: Mapping[Piece, NDArray[Any]]) -> Payload:
        fields = {name: here.get(Piece(i, ALL_STAGES, name)) for name in _DTYPES}
        routing = here.get(Piece(i, stage, "routing"))
        return Payload(self.collected[i].facts.length, **fields, routing=routing)

    def cut(self, piece: Piece) -> NDArray[Any]:
        """A piece of a sample that is here."""
        sample = self.collected[piece.sample].sample
        assert sample is not None, piece
        if piece.field == "routing":
            assert sample.routing is not None, piece
            return sample.routing[:, list(self.exchange.stage_layers[piece.stage])]
        return np.asarray(getattr(sample, piece.field))

    def _held(self, pieces: Sequence[Piece], rank: int) -> list[Piece]:
        return [p for p in pieces if self.collected[p.sample].holder == rank]

    def _kind(self, piece: Piece) -> tuple[np.dtype[Any], tuple[int, ...]]:
        facts = self.collected[piece.sample].facts
        if piece.field != "routing":
            return _DTYPES[piece.field], (facts.length,)
        assert facts.routing is not None, piece
        _, experts, dtype = facts.routing
        layers = len(self.exchange.stage_layers[piece.stage])
        return np.dtype(dtype), (facts.length - 1, layers, experts)

    def _bytes(self, piece: Piece) -> int:
        dtype, shape = self._kind(piece)
        return dtype.itemsize * math.prod(shape)

    def _joined(
        self, pieces: Sequence[Piece], known: Mapping[Piece, NDArray[Any]]
    ) -> NDArray[np.uint8]:
        """The bytes of ``pieces`` end to end, from ``known`` or from samples that are here."""
        whole, at = np.empty(sum(map(self._bytes, pieces)), np.uint8), 0
        for piece in pieces:
            array = known[piece] if piece in known else self.cut(piece)
            assert (array.dtype, array.shape) == self._kind(piece), (piece, array.dtype)
            whole[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            at += array.nbytes
        return whole

    def _split(
        self, message: memoryview | NDArray[Any], pieces: Sequence[Piece]
    ) -> dict[Piece, NDArray[Any]]:
        """Views into what ``_joined`` made of ``pieces``."""
        whole, found, at = np.frombuffer(message, np.uint8), {}, 0
        for piece in pieces:
            dtype, shape = self._kind(piece)
            end = at + self._bytes(piece)
            found[piece] = whole[at:end].view(dtype).reshape(shape)
            at = end
        assert at == len(whole), (at, len(whole))
        return found


def _encode(facts: Sequence[SampleFacts]) -> bytes:
    """JSON; numbers of samples as their bytes."""
    return json.dumps([_plain(f) for f in facts]).encode()


def _plain(facts: SampleFacts) -> dict[str, Any]:
    plain = {field.name: getattr(facts, field.name) for field in fields(facts)}
    for name, dtype in _ARRAYS.items():
        if plain[name] is not None:
            assert plain[name].dtype == dtype, (name, plain[name].dtype)
            plain[name] = base64.b64encode(plain[name].tobytes()).decode()
    spans = [(s.version, s.start, s.end, s.server) for s in facts.version_spans]
    return plain | {"version_spans": spans}


def _decode(payload: bytes) -> list[SampleFacts]:
    return [_facts(plain) for plain in json.loads(payload)]


def _facts(plain: dict[str, Any]) -> SampleFacts:
    for name, dtype in _ARRAYS.items():
        if plain[name] is not None:
            plain[name] = np.frombuffer(base64.b64decode(plain[name]), dtype).copy()
    routing = plain["routing"]
    plain |= {"brings": tuple(plain["brings"]), "routing": routing and tuple(routing)}
    plain["version_spans"] = tuple(VersionSpan(*span) for span in plain["version_spans"])
    return SampleFacts(**plain)
