"""tools/simulate_scale.py: the bytes it tells of are those that move, and those of closed forms."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.data.moves import Moves, leaders_of
from megarl.mesh import Mesh
from megarl.types import RoutingShape, Sample
from tests.helpers.dist import WorkerPool
from tests.helpers.tools import tool

TOOLS = str(Path(__file__).parents[2] / "tools")
STAGES = {1: [[0, 1, 2, 3]], 2: [[0, 1, 2], [3]], 4: [[0], [1], [], [2, 3]]}


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(TOOLS)
    return tool("simulate_scale")


def routed_samples(lengths: list[int]) -> list[Sample]:
    rng = np.random.default_rng(0)
    ids = [rng.permuted(np.tile(np.arange(8), (n - 1, 4, 1)), axis=2) for n in lengths]
    return [
        Sample(
            prompt_id=f"p{i // 2}",
            group=i // 2,
            index=i % 2,
            tokens=np.full(n, i, np.int32),
            mask=np.arange(n) > 1,
            rollout_logprobs=np.zeros(n, np.float32),
            rewards=np.ones(1, np.float32),
            correct=True,
            truncated=False,
            routing=ids[i][..., :2].astype(np.uint8),
        )
        for i, n in enumerate(lengths)
    ]


@pytest.mark.dist
def test_simulated_bytes_are_those_that_four_ranks_move(pool: WorkerPool) -> None:
    sizes_of = tool("scale_sizes").sizes_of
    samples = routed_samples([5, 30, 17, 4, 8, 21, 2, 40, 11, 3])
    cases = [
        {
            "nodes": nodes,
            "mesh": mesh,
            "layers": STAGES[mesh.get("pp", 1)],
            "samples": samples,
            "holders": [i // 2 % len(nodes) for i in range(len(samples))],
            "dp_ranks": [i % mesh.get("dp", 1) for i in range(len(samples))],
        }
        for nodes, mesh in (
            ([4], {"dp": 4}),
            ([2, 2], {"tp": 2, "pp": 2}),
            ([2, 2], {"dp": 2, "pp": 2}),
            ([1, 3], {"dp": 2, "pp": 2}),
            ([1, 1, 1, 1], {"pp": 4}),
            ([2, 1, 1], {"cp": 2, "dp": 2}),
        )
    ]
    ranks = pool.run("tests.work_exchange:deliveries", world=4, cases=cases)
    for n, case in enumerate(cases):
        of_rank = [node for node, size in enumerate(case["nodes"]) for _ in range(size)]
        leaders = leaders_of(of_rank)
        holders = [leaders[node] for node in case["holders"]]
        facts = [s.facts for s in samples]
        moves = Moves(
            Mesh(**case["mesh"]), of_rank, case["layers"], facts, holders, case["dp_ranks"]
        )
        found = sizes_of(moves)
        assert found.received == [of[n]["received"] for of in ranks]
        carried = {rank: of[n]["carried"] for rank, of in enumerate(ranks) if rank in leaders}
        assert found.carried == carried
        assert (
            sum(found.sent.values())
            == sum(carried.values())
            == sum(of[n]["carried"] for of in ranks)
        )
        assert (len(case["nodes"]) == 1) == (not sum(carried.values()))


def test_sizes_of_a_large_step_by_hand(simulate: Any, tmp_path: Path) -> None:
    """256 samples of 100 tokens on 64 GPUs: 8 nodes, a pipeline stage each, with 5 (first and last)
    or 8 MoE layers of DeepSeek-V3 and 8 experts a token, a byte each.
    """
    out = tmp_path / "scale.json"
    arguments = "--samples 256 --median 100 --sigma 0 --gpus 64 1024 --models deepseek-v3"
    found = simulate.main([*arguments.split(), "--sizes-only", "--json", str(out)])
    assert json.loads(out.read_text()) == found
    assert found["tokens"] == 256 * 100
    of = found["models"]["deepseek-v3"]["64"]
    first, middle, last = 400 + 99 * 5 * 8, 99 * 8 * 8, 900 + 99 * 5 * 8
    sizes = of["bytes"]
    assert sizes["rank_gets_by_stage"] == [256 * n for n in (first, *[middle] * 6, last)]
    assert sizes["shared_on_a_node"] == 256 * max(first, middle, last)
    assert sizes["collector_to_leader"] == 32 * (900 + 99 * 58 * 8)
    # a node's leader lacks the 224 samples of others
    assert sizes["leader_gets"] == 224 * middle
    assert sizes["leaders_total"] == 224 * (first + 6 * middle + last)
    assert sizes["leader_sends"] == 32 * (6 * middle + last + first - min(first, last))
    held, rows = sizes["collector_to_leader"], sizes["rows_of_a_rank"]
    assert of["memory"]["node_training"] == held + 8 * max(rows)
    # 16 groups on 128 nodes: a collector has one of them, or none
    assert found["models"]["deepseek-v3"]["1024"]["bytes"]["collector_to_leader"] == 16 * (
        900 + 99 * 58 * 8
    )


def test_a_reply_is_as_long_as_its_base64_and_what_every_token_adds() -> None:
    sizes, shape = tool("scale_sizes"), RoutingShape((False,) * 3 + (True,) * 58, 8, 256)
    without, whole = (sizes.reply_bytes(700, 200, shape, layers) for layers in (0, 61))
    assert whole - without == -(-699 * 61 * 8 * 4 // 3) * 4
    near, far = (sizes.reply_bytes(200 + n, 200, shape, 61) for n in (100, 300))
    assert near + 2 * (far - near) == pytest.approx(whole, rel=1e-3)


@pytest.mark.slow
def test_rates_are_measured(simulate: Any) -> None:
    """With little to move: that every one is found, not how large it is."""
    import scale_rates  # type: ignore[import-not-found]

    found = scale_rates.measure(RoutingShape((False, True, True), 2, 8), 1)
    assert all(value > 0 for value in found.values())
    assert found["gloo_descriptors_of_a_group_of_two"] >= 1
    assert 1e-6 < found["gloo_hop_s"] < 10
