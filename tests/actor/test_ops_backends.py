"""The compiled operators and their torch references train alike: the same rollouts in the same
layout give the same losses and gradients, whichever of the two `MEGARL_OPS` asks for.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.ops import native_devices
from tests.actor import compare
from tests.actor.split_cases import ALGOS, BOTH, LARGE, LAYOUTS, MANY_ROWS, batches, cases, evaluate
from tests.helpers.dist import WorkerPool

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(not native_devices("policy_loss"), reason="the operators are not built"),
]

# The layout being the same, only the loss's own fp32 arithmetic differs, by an ulp or two (6e-8) of
# a token's gradient (measured: 1e-6 of a tensor's norm at most); a clip decision that came out
# otherwise would be of order 1e-2.
TOL = 1e-5
QUICK = [{"cp": 2}, {"dp": 2, "ep": 2}, {"pp": 2, "vpp": 2}]
TRAINED = {
    "gspo": {"policy": {"name": "gspo", "eps_low": 0.05, "eps_high": 0.05}, "minibatches": 2},
    "sapo": {"policy": {"name": "sapo"}, "minibatches": 2},
}
Pools = dict[str, WorkerPool]


@pytest.fixture(scope="module")
def pools(pool: WorkerPool) -> Iterator[Pools]:
    """Workers that run the compiled operators, as all do by default, and workers that do not."""
    references = WorkerPool(MEGARL_OPS="torch")
    yield {"native": pool, "torch": references}
    references.close()


@pytest.fixture(scope="module")
def large_pools() -> Iterator[Pools]:
    """Their own, so that they end: four workers stay in no other test's way."""
    workers = {name: WorkerPool(MEGARL_OPS=name) for name in ("native", "torch")}
    yield workers
    for each in workers.values():
        each.close()


def test_workers_run_the_operators_they_were_asked_for(pools: Pools, tiny_model: Path) -> None:
    """Guards the comparisons below: they are not of one with itself."""
    work = [("gspo", ALGOS["gspo"], batches()["ragged"], {"row_tokens": MANY_ROWS})]
    for name, pool in pools.items():
        evaluate(pool, tiny_model, {}, work)
        (counts,) = pool.run("tests.actor.work_ops:calls", world=1)
        assert {"policy_loss", "group_moments"} <= set(counts), counts
        assert all(set(kinds) == {name} for kinds in counts.values()), counts


@pytest.mark.parametrize("layout", QUICK, ids=str)
def test_gradients_are_the_same(pools: Pools, tiny_model: Path, layout: dict[str, int]) -> None:
    samples = batches()["ragged"]
    rows = {"row_tokens": MANY_ROWS}
    work = [(name, ALGOS[name], samples, rows) for name in ("gspo", "sapo")]
    assert_alike(*(evaluate(pool, tiny_model, layout, work) for pool in pools.values()))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, *LAYOUTS, BOTH], ids=str)
def test_every_objective_and_recorded_rollouts_train_alike(
    pools: Pools, tiny_model: Path, recorded: Path, layout: dict[str, int]
) -> None:
    assert_layout_trains_alike(pools, tiny_model, recorded, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LARGE, ids=str)
def test_four_ranks_train_alike(
    large_pools: Pools, tiny_model: Path, recorded: Path, layout: dict[str, int]
) -> None:
    assert_layout_trains_alike(large_pools, tiny_model, recorded, layout)


def assert_layout_trains_alike(
    pools: Pools, hf: Path, recorded: Path, layout: dict[str, int]
) -> None:
    """Gradients of every objective and batch; then four optimizer steps on recorded rollouts, of
    which the later ones start from what the earlier ones made of the weights.
    """
    work = cases(MANY_ROWS)
    assert_alike(*(evaluate(pool, hf, layout, work) for pool in pools.values()))
    for algo in TRAINED.values():
        found, expected = (train(pool, hf, recorded, layout, algo) for pool in pools.values())
        assert len(found["metrics"]) == 4 and found["gradients"]
        assert_metrics_alike(found["metrics"], expected["metrics"])
        assert_gradients_alike(found["gradients"], expected["gradients"])


def train(
    pool: WorkerPool, hf: Path, recorded: Path, layout: dict[str, int], algo: dict[str, Any]
) -> dict[str, Any]:
    results = pool.run(
        "tests.actor.work:train",
        world=compare.mesh_of(layout).world_size,
        timeout_s=300,
        hf=hf,
        recorded=recorded,
        layout=layout,
        algo=algo,
    )
    return compare.merged(results)


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        assert found[name]["norm"] == pytest.approx(reference["norm"], rel=TOL, abs=1e-12), name
        assert_metrics_alike(found[name]["metrics"], reference["metrics"])
        assert_gradients_alike(found[name]["gradients"], reference["gradients"])


def assert_metrics_alike(found: list[Any], expected: list[Any]) -> None:
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.keys() == b.keys(), a.keys() ^ b.keys()
        for name, number in b.items():
            # a loss is a sum that may cancel; its terms are of order 1
            near = None if number is None else pytest.approx(number, rel=TOL, abs=1e-6)
            assert a[name] == near, (step, name)


def assert_gradients_alike(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert found.keys() == expected.keys()
    for name, g in expected.items():
        error = float((found[name] - g).norm())
        assert error <= TOL * float(g.norm()), (name, error, float(g.norm()))
