"""Facts reach every rank, tokens the ranks that use them: bit for bit, and counted."""

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from megarl.data.packing import Payload
from megarl.mesh import Mesh
from megarl.planning import dp_ranks, plan_steps
from megarl.types import Sample, SampleFacts, VersionSpan
from tests.helpers.dist import WorkerPool
from tests.helpers.plans import config_of
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist


def assert_same_bits(found: Sequence[SampleFacts], expected: Sequence[SampleFacts]) -> None:
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        for field in fields(SampleFacts):
            a, b = getattr(one, field.name), getattr(two, field.name)
            if isinstance(b, np.ndarray):
                assert (a.dtype, a.shape) == (b.dtype, b.shape), field.name
                assert a.tobytes() == b.tobytes(), field.name
            else:
                assert type(a) is type(b) and a == b, field.name


def unusual_samples() -> list[Sample]:
    """Every field at its limits: several rewards or none, routing or none, versions, NaN bits."""
    plain, routed, bare = random_samples(1, 3, seed=6)
    length = len(routed.tokens)
    first = np.random.default_rng(0).integers(0, 8, (length - 1, 3))
    routing = np.stack([first, (first + 5) % 8], -1).astype(np.uint16)
    odd = np.array([np.nan, -np.nan, -0.0, np.inf], np.float32)
    logprobs = np.resize(odd, length)
    spans = (VersionSpan(7, 0, 2), VersionSpan(9, 2, 5))
    return [
        plain,
        Sample(
            **vars(routed)
            | {"prompt_id": "päß,\n\0x", "routing": routing, "rollout_logprobs": logprobs}
            | {"version_spans": spans, "rewards": np.array([1, -0.0, 2], np.float32)}
            | {"trajectory": 3, "values": logprobs, "ref_logprobs": logprobs[::-1].copy()}
            | {"step_rewards": odd, "step_ends": np.arange(4, dtype=np.int32)}
        ),
        Sample(**vars(bare) | {"rewards": np.zeros(0, np.float32), "truncated": True}),
    ]


@pytest.mark.parametrize("collected", ["both", "first empty", "second empty", "none"])
def test_every_rank_has_the_facts_of_all_collectors_in_their_order(
    pool: WorkerPool, collected: str
) -> None:
    zero = [] if collected in ("first empty", "none") else random_samples(2, 3, seed=1)
    one = [] if collected in ("second empty", "none") else unusual_samples()
    ranks = pool.run(
        "tests.work_exchange:facts",
        world=2,
        collected={0: zero, 1: one},
        orders=[[0, 1], [1, 0], [1]],
    )
    held = {0: [(s.facts, 0) for s in zero], 1: [(s.facts, 1) for s in one]}
    for rank, seen in enumerate(ranks):
        for found, order in zip(seen, [[0, 1], [1, 0], [1]], strict=True):
            expected = [pair for collector in order for pair in held[collector]]
            assert_same_bits([f for f, _, _ in found], [f for f, _ in expected])
            assert [(h, here) for _, h, here in found] == [(h, h == rank) for _, h in expected]


def test_facts_are_what_they_are_facts_of() -> None:
    for sample in unusual_samples():
        facts = sample.facts
        for name in ("name", "length", "trained_tokens", "response_tokens", "brings", "correct"):
            assert getattr(facts, name) == getattr(sample, name)
        assert facts.truncated == sample.truncated
        assert (facts.untrained().trained_tokens, sample.untrained().trained_tokens) == (0, 0)
        assert facts.reward == sample.reward
    assert unusual_samples()[1].facts.routing == (3, 2, "uint16")


# --- who gets what --------------------------------------------------------------------------------

LAYERS = {1: [[0, 1, 2]], 2: [[0], [1, 2]], 4: [[0], [], [1], [2]]}  # MoE layers by stage
CHUNKS = [[0, 2], [1]]  # of two stages with two chunks each
FIELDS = ("tokens", "mask", "rollout_logprobs", "values", "ref_logprobs", "routing")


def step_of(lengths: Sequence[int], brings: bool) -> list[Sample]:
    rng = np.random.default_rng(len(lengths))

    def numbers(n: int) -> Any:
        return rng.random(n).astype(np.float32)

    return [
        Sample(
            prompt_id=f"p{i}",
            group=i,
            index=0,
            tokens=rng.integers(1, 99, n).astype(np.int32),
            mask=rng.random(n) < 0.5,
            rollout_logprobs=numbers(n),
            rewards=numbers(1),
            correct=False,
            truncated=False,
            values=numbers(n) if brings else None,
            ref_logprobs=numbers(n) if brings else None,
            routing=rng.integers(0, 8, (n - 1, 3, 2)).astype(np.uint8) if brings else None,
        )
        for i, n in enumerate(lengths)
    ]


def case(
    nodes: list[int], lengths: Sequence[int], brings: bool = True, held: bool = True, **mesh: int
) -> dict[str, Any]:
    """Samples dealt to the nodes' leaders in turn, and to data-parallel ranks by the planner."""
    samples = step_of(lengths, brings)
    steps = plan_steps(samples, config_of(train={"row_tokens": 64}), Mesh(**mesh))
    return {
        "nodes": nodes,
        "mesh": mesh,
        "layers": CHUNKS if mesh.get("vpp", 1) > 1 else LAYERS[mesh.get("pp", 1)],
        "samples": samples,
        "holders": [i % len(nodes) for i in range(len(samples))] if held else None,
        "dp_ranks": dp_ranks(steps, len(samples)),
    }


def bytes_of(case: dict[str, Any], i: int, stages: Collection[int]) -> int:
    """Of what these stages use of sample i: 4 bytes a token or number, 1 a mask or expert."""
    sample, last = case["samples"][i], case["mesh"].get("pp", 1) - 1
    brings = sample.values is not None
    a_token = 4 * (0 in stages or last in stages) + (last in stages) * (1 + 4 + 8 * brings)
    layers = sum(len(case["layers"][stage]) for stage in stages)
    return a_token * sample.length + brings * (sample.length - 1) * layers * 2


def expected_bytes(case: dict[str, Any]) -> list[tuple[int, int]]:
    """(received, carried) of every rank."""
    mesh = Mesh(**case["mesh"])
    node_of = [node for node, size in enumerate(case["nodes"]) for _ in range(size)]
    found = []
    for rank, node in enumerate(node_of):
        at, leads = mesh.coordinates(rank), node_of.index(node) == rank
        received = carried = 0
        for i, dp in enumerate(case["dp_ranks"]):
            home = None if case["holders"] is None else case["holders"][i]
            if home is None or (home == node and leads):
                continue  # it is here
            if dp == at.dp:
                received += bytes_of(case, i, {at.pp})
            stages = {
                mesh.coordinates(r).pp
                for r, n in enumerate(node_of)
                if n == node and mesh.coordinates(r).dp == dp
            }
            carried += bytes_of(case, i, stages) if leads else 0
        found.append((received, carried))
    return found


TWO = [  # ranks of each node, lengths, layout
    case([2], [5, 3, 9, 4], pp=2),
    case([1, 1], [5, 3, 9, 4], pp=2),
    case([2], [5, 3, 9, 4, 1], dp=2),
    case([1, 1], [5, 3, 9, 4, 1], dp=2),
    case([2], [5, 3], tp=2),
    case([1, 1], [5, 3], brings=False, cp=2),
    case([1, 1], [5, 3, 9], held=False, pp=2, vpp=1),
    case([2], [], dp=2),
    case([1, 1], [], pp=2),
    case([1, 1], [7], dp=2),
    case([2], [2], pp=2),
]
LENGTHS_206 = (3 + np.random.default_rng(0).integers(0, 30, 206)).tolist()
FOUR = [
    case([4], LENGTHS_206, dp=4),
    case([2, 2], LENGTHS_206, brings=False, dp=4),
    case([1, 1, 1, 1], [8, 20, 3], dp=4),
    case([1, 3], [8, 20, 3, 4, 5], dp=2, pp=2),
    case([2, 2], [8, 20, 3, 4, 5], dp=2, pp=2),
    case([3, 1], [8, 20, 3, 4, 5, 6], pp=4),
    case([2, 2], [8, 20, 3, 4, 5, 6], tp=2, pp=2),
    case([2, 1, 1], [30] * 17, cp=2, dp=2),
    case([2, 2], [11] * 9, held=False, pp=2, dp=2),
    case([1, 3], [40, 2, 2, 2, 2], pp=2, vpp=2, dp=2),
]


@pytest.mark.parametrize("cases", [TWO, FOUR], ids=["two ranks", "four ranks"])
def test_ranks_get_what_they_use_bit_for_bit_and_no_more(
    pool: WorkerPool, cases: list[dict[str, Any]]
) -> None:
    ranks = pool.run("tests.work_exchange:deliveries", world=sum(cases[0]["nodes"]), cases=cases)
    for n, case in enumerate(cases):
        deliveries = [found[n] for found in ranks]
        counted = [(d["received"], d["carried"]) for d in deliveries]
        assert counted == expected_bytes(case), (case["nodes"], case["mesh"])
        mesh = Mesh(**case["mesh"])
        of_stage: Counter[tuple[int, int, int, int]] = Counter()
        for rank, delivery in enumerate(deliveries):
            at = mesh.coordinates(rank)
            of_stage.update((at.pp, at.tp, at.cp, i) for i in delivery["payloads"])
            for i, payload in delivery["payloads"].items():
                assert case["dp_ranks"][i] == at.dp
                assert_piece_by_piece(payload, case, i, at.pp)
        # nothing lost, nothing doubled: every sample once on every stage and its tp and cp ranks
        grid = itertools.product(range(mesh.pp), range(mesh.tp), range(mesh.cp))
        count = len(case["samples"])
        assert of_stage == Counter((*place, i) for place in grid for i in range(count))


def assert_piece_by_piece(payload: Payload, case: dict[str, Any], i: int, stage: int) -> None:
    sample, last = case["samples"][i], case["mesh"].get("pp", 1) - 1
    used = {"tokens"} if stage in (0, last) else set()
    used |= {"mask", "rollout_logprobs", "values", "ref_logprobs"} if stage == last else set()
    layers = case["layers"][stage]
    used |= {"routing"} if layers else set()
    assert payload.length == sample.length
    for name in FIELDS:
        whole, found = getattr(sample, name), getattr(payload, name)
        if name not in used or whole is None:
            assert found is None, (name, stage)
            continue
        expected = whole[:, layers] if name == "routing" else whole
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
        assert found.tobytes() == expected.tobytes(), name


def test_the_bytes_of_two_stages_by_hand() -> None:
    """Lengths 5, 3, 9, 4 on two nodes: stage 0 lacks the 7 tokens of the second and last sample,
    the last stage the 14 of the others; one layer of routing for stage 0, two for the last.
    """
    assert expected_bytes(TWO[1]) == [(7 * 4 + 5 * 2, 7 * 4 + 5 * 2), (14 * 17 + 12 * 4,) * 2]


def test_what_a_node_shares_is_written_part_by_part(pool: WorkerPool) -> None:
    """32 parts of a MiB, of which a leader has one or two at a time."""
    leader, _ = pool.run("tests.work_exchange:memory_of_sharing", world=2, parts=32, size=2**20)
    assert 2**20 < leader < 4 * 2**20


def test_layers_that_follow_one_another_are_not_copied_where_they_were_collected(
    pool: WorkerPool,
) -> None:
    cases = [
        {"layers": layers, "samples": step_of([9, 4], brings=True)}
        for layers in ([[0, 1], [2]], [[1], [0, 2]], [[0, 2], [1]])
    ]
    here, elsewhere = pool.run("tests.work_exchange:copied_here", world=2, cases=cases)
    assert here == [False] * 4 + [True] * 2
    assert elsewhere == [True] * 6


def test_a_message_that_does_not_come_names_the_rank_that_is_waited_for(pool: WorkerPool) -> None:
    error, _ = pool.run("tests.work_exchange:late_leader", world=2, nodes=[1, 1], samples=[])
    assert "RunError: rank 0 waited up to 0.3 s (run.timeout_s) for 10 bytes from rank 1" in error


def test_a_rank_that_does_not_come_is_named(pool: WorkerPool) -> None:
    errors = pool.run("tests.work_exchange:late_rank", world=2)
    assert "RunError: rank 0 waited up to 0.5 s (run.timeout_s) for other ranks" in errors[0]
    assert "Ranks 1 failed to pass monitoredBarrier" in errors[0]
    assert "RunError: rank 1 waited up to 0.5 s (run.timeout_s) for other ranks" in errors[1]


@pytest.mark.parametrize(
    ("where", "on_leader", "elsewhere"),
    [
        ("nowhere", "None", "b'abc'"),
        (
            "prepare",
            "MemoryError: no room",
            "RunError: collecting what the ranks of a node use failed on rank 0: MemoryError: "
            "no room",
        ),
        (
            "read",
            "RunError: reading what the leader of a node collected failed on rank 1: ValueError: "
            "odd bytes",
            "ValueError: odd bytes",
        ),
    ],
)
def test_what_fails_on_one_rank_of_a_node_fails_on_all(
    pool: WorkerPool, where: str, on_leader: str, elsewhere: str
) -> None:
    found = pool.run("tests.work_exchange:failure", world=2, where=where)
    assert found == [on_leader, elsewhere]
