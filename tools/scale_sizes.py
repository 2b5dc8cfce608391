"""What of a step's samples goes where, and what memory it takes, by the project's own arithmetic:
``plan_steps``, ``Moves``, ``build_row``, the JSON of facts and of servers' replies. For
``simulate_scale.py``.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from megarl.config.schema import Config
from megarl.data.exchange import decode_facts, encode_facts
from megarl.data.moves import EVERY_RANK, Moves, Piece, leaders_of
from megarl.data.packing import Payload, build_row
from megarl.mesh import Mesh
from megarl.models.flops import pass_flops
from megarl.models.spec import ModelSpec
from megarl.planning import StepRows, dp_ranks, plan_steps, stage_layers
from megarl.rollout.wire import Generated, GenerateRequest, SamplingParams, format_reply
from megarl.types import RoutingShape, SampleFacts, VersionSpan

NODE = 8  # GPUs
PROMPT = 200  # tokens


# --- the samples ----------------------------------------------------------------------------------


def made_up_lengths(count: int, median: float, sigma: float, longest: int, seed: int) -> list[int]:
    """Tokens of prompt and response."""
    rng = np.random.default_rng(seed)
    drawn = np.exp(rng.normal(math.log(median), sigma, count))
    lengths: list[int] = np.clip(drawn, 64, longest).astype(int).tolist()
    return lengths


def made_up_facts(
    lengths: Sequence[int], shape: RoutingShape, per_prompt: int = 16
) -> list[SampleFacts]:
    """Groups of ``per_prompt``. Every fourth sample went on under a second version elsewhere."""
    dtype, longest = "uint8" if shape.experts <= 256 else "uint16", max(lengths)
    return [
        SampleFacts(
            prompt_id=f"train-{i // per_prompt:06d}",
            group=i // per_prompt,
            index=i % per_prompt,
            length=n,
            trained_tokens=max(n - PROMPT, 1),
            response_tokens=max(n - PROMPT, 1),
            rewards=np.array([i % 3 == 0, 0.25], np.float32),
            correct=i % 3 == 0,
            truncated=n == longest,
            routing=(shape.num_moe_layers, shape.topk, dtype),
            serial=100_000 + i // per_prompt,
            version_spans=_spans(i, max(n - PROMPT, 1)),
        )
        for i, n in enumerate(lengths)
    ]


def _spans(i: int, end: int) -> tuple[VersionSpan, ...]:
    if i % 4:
        return (VersionSpan(120, 0, end, f"server-{i % 128}"),)
    middle = end // 2
    return (
        VersionSpan(119, 0, middle, f"server-{i % 128}"),
        VersionSpan(120, middle, end, f"server-{(i + 1) % 128}"),
    )


def facts_cost(facts: Sequence[SampleFacts]) -> dict[str, float]:
    """Bytes of their JSON, seconds to write it, all of it, and to read it."""
    payload, wrote = timed(lambda: json.dumps(encode_facts(facts)))
    read, parsed = timed(lambda: decode_facts(json.loads(payload)))
    assert len(read) == len(facts)
    return {"bytes": len(payload), "encode_s": wrote, "decode_s": parsed}


def reply_bytes(length: int, prompt: int, shape: RoutingShape, layers: int) -> int:
    """JSON of one response as a server answers, routed experts of ``layers`` in base64."""
    count, rng = length - prompt, np.random.default_rng(0)
    sampling = SamplingParams(1.0, count, False, frozenset(), 0)
    request = GenerateRequest("run-1-0" * 3, (1,) * prompt, sampling, True, -1, True, 0)
    made = Generated(
        rid=request.rid,
        prompt_tokens=prompt,
        token_ids=rng.integers(1000, 130_000, count).tolist(),
        logprobs=(-rng.random(count).astype(np.float32)).astype(float).tolist(),
        finish={"type": "stop", "matched": 1},
        versions=[("120", 0)],
        routing=np.zeros((length - 1, layers, shape.topk), np.int32),
    )
    return len(json.dumps(format_reply(request, made, "120")))


# --- a step ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """As every rank plans it. ``row_bytes``: of a rank of each stage, rows of the whole step."""

    moves: Moves
    shape: RoutingShape
    rows: int  # of a rank, all optimizer steps together
    row_bytes: list[int]
    plan_s: float

    @staticmethod
    def planned(
        lengths: Sequence[int], shape: RoutingShape, config: Config, mesh: Mesh, spec: ModelSpec
    ) -> "Step":
        facts = made_up_facts(lengths, shape)
        steps, seconds = timed(lambda: plan_steps(facts, config, mesh, pass_flops(spec)))
        of_rank = [rank // NODE for rank in range(mesh.world_size)]
        leaders = leaders_of(of_rank)
        groups = facts[-1].group + 1
        share = math.ceil(groups / len(leaders))  # of the prompts, a run for each collector
        holders = [leaders[f.group // share] for f in facts]
        layers = stage_layers(spec.moe_layers, mesh)
        moves = Moves(mesh, of_rank, layers, facts, holders, dp_ranks(steps, len(facts)))
        rows = sum(len(step.lengths) for step in steps)
        return Step(moves, shape, rows, [_row_bytes(moves, steps, k) for k in layers], seconds)

    def sized(self) -> dict[str, Any]:
        """Bytes by link and rank, and of memory."""
        moves, whole = self.moves, self._collected()
        sizes = sizes_of(moves)
        encoded = self._http()
        leaders = leaders_of(moves.of_rank)
        held = {leader: whole.get(leader, 0) for leader in leaders}
        http = {leader: encoded.get(leader, 0) for leader in leaders}
        stages = [moves.mesh.coordinates(r).pp for r in range(moves.mesh.world_size)]
        by_stage = [
            max(n for n, stage in zip(sizes.received, stages, strict=True) if stage == k)
            for k in range(moves.mesh.pp)
        ]
        _, arithmetic = timed(lambda: self._arithmetic_of(leaders[0]))
        return {
            "layout": {f.name: getattr(moves.mesh, f.name) for f in fields(Mesh)},
            "nodes": len(leaders),
            "rows_of_a_rank": self.rows,
            "bytes": {
                "http_total": sum(http.values()),
                "http_of_a_collector": max(http.values()),
                "collector_to_leader": max(held.values()),
                "leaders_total": sum(sizes.sent.values()),
                "leader_sends": max(sizes.sent.values(), default=0),
                "leader_gets": max(sizes.carried.values(), default=0),
                "shared_on_a_node": max(sizes.shared),
                "rank_gets_by_stage": by_stage,
                "rows_of_a_rank": self.row_bytes,
            },
            "memory": self._memory(sizes, held),
            "plan_s": self.plan_s,
            "moves_s": arithmetic,
        }

    def _collected(self) -> dict[int, int]:
        """Bytes of the samples that each leader holds, all layers."""
        moves = self.moves
        facts = moves.facts
        layers = [list(range(self.shape.num_moe_layers))]
        nobody, one = [EVERY_RANK] * len(facts), [0] * len(facts)
        alone = Moves(Mesh(), [0], layers, facts, nobody, one)
        found: dict[int, int] = {}
        for piece in alone.used_by(0):
            holder = moves.holders[piece.sample]
            found[holder] = found.get(holder, 0) + alone.num_bytes([piece])
        return found

    def _http(self) -> dict[int, int]:
        """JSON that each collector gets of its servers, which report dense layers, too."""
        layers = len(self.shape.moe_layers)
        near, far = (reply_bytes(PROMPT + n, PROMPT, self.shape, layers) for n in (100, 300))
        slope = (far - near) / 200
        found: dict[int, int] = {}
        for facts, holder in zip(self.moves.facts, self.moves.holders, strict=True):
            size = near + slope * (facts.length - PROMPT - 100)
            found[holder] = found.get(holder, 0) + round(size)
        return found

    def _arithmetic_of(self, leader: int) -> None:
        """What ``deliver`` asks of ``Moves`` on a leader."""
        moves, node = self.moves, self.moves.of_rank[leader]
        wanted: list[list[Piece]] = [moves.missing(leader), moves.used_by(leader)]
        wanted += [*moves.outgoing(leader).values(), *moves.incoming(node).values()]
        for pieces in (*wanted, moves.shared(node)):
            moves.num_bytes(pieces)

    def _memory(self, sizes: "Sizes", held: Mapping[int, int]) -> dict[str, int]:
        """Of the node that needs most: while samples are exchanged, and once rows are made (its
        leader still has what it collected).
        """
        moves, leaders = self.moves, list(held)
        rows = [self.row_bytes[moves.mesh.coordinates(r).pp] for r in range(len(moves.of_rank))]
        found = []
        for node, leader in enumerate(leaders):
            ranks = [r for r, n in enumerate(moves.of_rank) if n == node]
            carried, shared = sizes.carried[leader], sizes.shared[node]
            exchanging = held[leader] + carried + max(sizes.sent[leader], shared)
            leading = max(exchanging, held[leader] + carried + rows[leader])
            copies = sum(sizes.received[r] for r in ranks[1:])
            of_rows = sum(rows[r] for r in ranks)
            found.append(
                {
                    "leader_exchanging": exchanging,
                    "leader_peak": leading,
                    "node_peak": held[leader] + carried + copies + max(shared, of_rows),
                    "node_training": held[leader] + of_rows,
                }
            )
        return {name: max(of[name] for of in found) for name in found[0]}


@dataclass(frozen=True)
class Sizes:
    """Bytes: ``received`` by rank, ``sent`` and ``carried`` by leader, ``shared`` by node; the
    first and third are those of ``Delivery``.
    """

    received: list[int]
    sent: dict[int, int]
    carried: dict[int, int]
    shared: list[int]


def sizes_of(moves: Moves) -> Sizes:
    leaders = leaders_of(moves.of_rank)
    size = moves.num_bytes
    of_stage: dict[tuple[int, int, int], int] = {}  # tp and cp ranks that lead nothing get the same
    received = []
    for rank in range(len(moves.of_rank)):
        at = moves.mesh.coordinates(rank)
        key = (at.dp, at.pp, rank if rank in leaders else -1)
        if key not in of_stage:
            of_stage[key] = size(moves.missing(rank))
        received.append(of_stage[key])
    sent = {a: sum(map(size, moves.outgoing(a).values())) for a in leaders}
    carried = {a: sum(map(size, moves.incoming(n).values())) for n, a in enumerate(leaders)}
    return Sizes(received, sent, carried, [size(moves.shared(n)) for n in range(len(leaders))])


def _row_bytes(moves: Moves, steps: Sequence[StepRows], layers: Sequence[int]) -> int:
    """Of a rank's rows as ``build_row`` makes them, ``layers`` being its stage's."""
    assert moves.facts[0].routing is not None
    _, topk, dtype = moves.facts[0].routing
    kind = (len(layers), topk, dtype) if layers else None
    row = build_row({0: Payload(1000)}, [0], length=1000, routing=kind)
    a_token = sum(t.nbytes for t in vars(row).values() if isinstance(t, torch.Tensor)) / 1000
    return round(a_token * sum(n for step in steps for n in step.lengths))


def timed(do: Callable[[], Any]) -> tuple[Any, float]:
    """Its value, and the seconds that a core worked for it: others' load hardly alters them."""
    start = time.process_time()
    value = do()
    return value, time.process_time() - start
