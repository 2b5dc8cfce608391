"""Losses and gradients do not depend on the split, for every kind of objective and odd batch.

Real Megatron over gloo. One process is compared with every layout, with other numbers of
microbatches (``row_tokens``) and with another order of samples: loss, gradient norm, metrics and
every parameter's gradient.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.data.packing import plan_rows
from megarl.models.flops import pass_flops
from megarl.models.spec import read_spec
from tests.actor import compare
from tests.actor.split_cases import (
    ALGOS,
    BOTH,
    EDGES,
    LARGE,
    LARGE_STAGES,
    LAYOUTS,
    MANY_ROWS,
    ONE_ROW,
    SOME_ROWS,
    batches,
    cases,
    evaluate,
    presets,
)
from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist

# As in test_layouts.py: sums of fp32 in another order. The loss is compared with the sum of its
# terms' sizes, of order 1, since terms cancel.
METRIC_TOL = 2e-5
GRADIENT_TOL = 2e-5  # of the tensor's largest entry


@pytest.fixture(scope="module")
def single(pool: WorkerPool, tiny_model: Path) -> dict[str, dict[str, Any]]:
    return evaluate(pool, tiny_model, {}, cases(ONE_ROW))


@pytest.fixture(scope="module")
def large_pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_equals_one_process(
    pool: WorkerPool,
    tiny_model: Path,
    single: dict[str, dict[str, Any]],
    layout: dict[str, int],
) -> None:
    assert_same(evaluate(pool, tiny_model, layout, cases(SOME_ROWS)), single)


SLOW = [
    pytest.param(layout, marks=pytest.mark.slow) for layout in ({}, {"dp": 2}, {"cp": 2}, {"tp": 2})
]


@pytest.mark.parametrize("layout", [{"dp": 2, "ep": 2}, *SLOW], ids=str)
def test_rows_of_several_lengths_equal_one_process(
    pool: WorkerPool,
    tiny_model: Path,
    single: dict[str, dict[str, Any]],
    layout: dict[str, int],
) -> None:
    assert_same(evaluate(pool, tiny_model, layout, cases(MANY_ROWS, row_buckets=3)), single)


STAGES = [{"pp": 2}, {"pp": 2, "vpp": 2}]  # which tell each other the shapes of activations


@pytest.mark.parametrize("layout", STAGES, ids=str)
def test_stages_exchange_rows_of_several_lengths(
    pool: WorkerPool,
    tiny_model: Path,
    single: dict[str, dict[str, Any]],
    layout: dict[str, int],
) -> None:
    names = ("ppo, gae, kl, entropy", "gspo on one token")
    work = [case for case in cases(MANY_ROWS, row_buckets=3) if case[0] in names]
    assert_same(evaluate(pool, tiny_model, layout, work), {name: single[name] for name in names})


@pytest.mark.parametrize("layout", [*STAGES, *LARGE_STAGES], ids=str)
def test_these_rows_are_of_several_lengths(tiny_model: Path, layout: dict[str, int]) -> None:
    """Guards the tests of it."""
    mesh = compare.mesh_of(layout)
    lengths = [len(sample.tokens) for sample in batches()["ragged"]]
    plan = plan_rows(
        lengths,
        row_tokens=MANY_ROWS,
        dp=mesh.dp,
        segment_multiple=mesh.segment_multiple,
        row_multiple=mesh.row_multiple,
        rows_multiple=mesh.rows_multiple,
        buckets=3,
        flops=pass_flops(read_spec(tiny_model)),
    )
    assert len(set(plan.lengths)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*STAGES, *LARGE_STAGES], ids=str)
def test_rows_of_several_lengths_on_four_ranks_equal_one_process(
    large_pool: WorkerPool,
    tiny_model: Path,
    single: dict[str, dict[str, Any]],
    layout: dict[str, int],
) -> None:
    work = cases(MANY_ROWS, row_buckets=3)
    assert_same(evaluate(large_pool, tiny_model, layout, work), single)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, BOTH], ids=str)
def test_a_layout_with_more_microbatches_equals_one_process(
    pool: WorkerPool,
    tiny_model: Path,
    single: dict[str, dict[str, Any]],
    layout: dict[str, int],
) -> None:
    assert_same(evaluate(pool, tiny_model, layout, cases(MANY_ROWS)), single)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LARGE, ids=str)
def test_a_layout_of_four_ranks_equals_one_process(
    large_pool: WorkerPool,
    tiny_model: Path,
    single: dict[str, dict[str, Any]],
    layout: dict[str, int],
) -> None:
    assert_same(evaluate(large_pool, tiny_model, layout, cases(MANY_ROWS)), single)


@pytest.mark.parametrize("row_tokens", [200, 110, 48])
def test_microbatches_and_order_make_no_difference(
    pool: WorkerPool, tiny_model: Path, single: dict[str, dict[str, Any]], row_tokens: int
) -> None:
    shuffled = batches()["shuffled"]
    work = [(name, algo, shuffled, {"row_tokens": row_tokens}) for name, algo in ALGOS.items()]
    assert_same(evaluate(pool, tiny_model, {}, work), {name: single[name] for name in ALGOS})


def test_every_preset_trains_two_ranks_like_one(pool: WorkerPool, tiny_model: Path) -> None:
    samples = batches()["ragged"]
    one, two = (
        evaluate(
            pool,
            tiny_model,
            layout,
            [(n, a, samples, {"row_tokens": rows}) for n, a in presets().items()],
        )
        for layout, rows in (({}, ONE_ROW), ({"dp": 2}, SOME_ROWS))
    )
    assert_same(two, one)
    norms = {name: found["norm"] for name, found in one.items()}
    assert all(0 < norm < 100 for norm in norms.values()), norms


def test_a_batch_without_trained_tokens_gives_exact_zeros(
    single: dict[str, dict[str, Any]],
) -> None:
    for name in EDGES:
        found = single[f"{name} on all masked"]
        assert found["norm"] == 0 and found["metrics"][0]["policy/loss"] == 0
        assert all((g == 0).all() for g in found["gradients"].values())


def test_the_objectives_are_told_apart(single: dict[str, dict[str, Any]]) -> None:
    """Guards the test itself: clipping, corrections, selections and edges are really there."""
    norms = [round(single[name]["norm"], 6) for name in ALGOS]
    assert len(set(norms)) == len(norms) and all(norms)
    metrics = {name: single[name]["metrics"][0] for name in ALGOS}
    for name in ("ppo, token mean", "gspo", "gspo_token, gae", "gmpo, sequence correction"):
        for side in ("clipfrac_high", "clipfrac_low"):
            assert 0 < metrics[name][f"policy/{side}"] < 1, (name, side)
    assert metrics["gmpo, sequence correction"]["policy/opsm_dropped"] > 0
    assert 0 < metrics["kl_cov, whitened"]["policy/selected"] < 1
    assert metrics["ppo, gae, kl, entropy"]["policy/kl"] > 0


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        close = {"rel": METRIC_TOL, "abs": 1e-7}
        assert found[name]["norm"] == pytest.approx(reference["norm"], **close), name
        for part, other in zip(found[name]["metrics"], reference["metrics"], strict=True):
            assert part.keys() == other.keys(), (name, part.keys() ^ other.keys())
            for metric, number in other.items():
                near = None if number is None else pytest.approx(number, METRIC_TOL, 1e-6)
                assert part[metric] == near, (name, metric)
        gradients = found[name]["gradients"]
        assert gradients.keys() == reference["gradients"].keys()
        for tensor, g in reference["gradients"].items():
            size = float(g.abs().max())
            error = float((gradients[tensor] - g).abs().max())
            assert error <= GRADIENT_TOL * size, (name, tensor, error, size)
