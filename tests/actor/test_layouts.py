"""Losses, gradient norms and parameter gradients do not depend on how the work is split (real
Megatron, gloo).
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actor import compare
from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist

# fp32 sums in another order: a few ulps (6e-8 relative) a reduction, over 4 layers and some hundred
# tokens. A missing or doubled reduction is an error of order one, a wrong clip decision of order
# 1e-2.
METRIC_RTOL = 2e-5
GRADIENT_TOL = 2e-5  # of the tensor's largest entry

TWO_RANKS = [
    {"dp": 2},
    {"dp": 2, "ep": 2},
    {"tp": 2},
    {"tp": 2, "ep": 2, "etp": 1},
    {"cp": 2},
    {"cp": 2, "ep": 2},
    {"pp": 2},
    {"pp": 2, "vpp": 2},
    {"pp": 2, "first_layers": 1},
]
FOUR_RANKS = [
    {"dp": 2, "cp": 2},
    {"dp": 4, "ep": 2},
    {"tp": 2, "dp": 2},
    {"tp": 2, "dp": 2, "ep": 2},  # etp 2
    {"tp": 2, "dp": 2, "ep": 4, "etp": 1},
    {"tp": 2, "cp": 2, "ep": 2},  # etp 2
    {"tp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "etp": 1},
    {"cp": 2, "pp": 2, "ep": 2},
    {"dp": 2, "pp": 2, "ep": 2},
    {"dp": 2, "pp": 2, "ep": 2, "last_layers": 1},
    {"pp": 4},
    {"pp": 2, "vpp": 2, "cp": 2},
]
LAYOUTS = [*TWO_RANKS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in FOUR_RANKS)]


@pytest.fixture(scope="module")
def single(pool: WorkerPool, tiny_model: Path, recorded: Path) -> dict[str, Any]:
    work = {"hf": tiny_model, "recorded": recorded, "layout": {}}
    return compare.merged(pool.run("tests.actor.work:train", world=1, **work))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_equals_one_process(
    pool: WorkerPool,
    tiny_model: Path,
    recorded: Path,
    single: dict[str, Any],
    layout: dict[str, int],
) -> None:
    """Log-probs before every step, losses, gradient norms, gradients, and the weights after four
    steps.
    """
    found = trained(pool, tiny_model, recorded, layout)
    assert_same_metrics(found["metrics"], single["metrics"])
    assert found["logprobs"].keys() == single["logprobs"].keys()
    for sample, expected in single["logprobs"].items():
        assert torch.allclose(found["logprobs"][sample], expected, rtol=0, atol=2e-5), sample
    assert found["gradients"].keys() == single["gradients"].keys()
    for name, expected in single["gradients"].items():
        error = (found["gradients"][name] - expected).abs().max() / expected.abs().max()
        assert error < GRADIENT_TOL, (name, float(error))
    assert_same_weights(found["weights"], single["weights"])


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "ep": 2},
        {"tp": 2},
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in [{"cp": 2}, *FOUR_RANKS]),
    ],
    ids=str,
)
def test_the_distributed_optimizer_takes_the_same_steps(
    pool: WorkerPool,
    tiny_model: Path,
    recorded: Path,
    single: dict[str, Any],
    layout: dict[str, int],
) -> None:
    found = trained(pool, tiny_model, recorded, layout, optim={"distributed": True})
    assert_same_metrics(found["metrics"], single["metrics"])
    assert_same_weights(found["weights"], single["weights"])


def trained(
    pool: WorkerPool, hf: Path, recorded: Path, layout: dict[str, int], **sections: Any
) -> dict[str, Any]:
    world = compare.mesh_of(layout).world_size
    work = {"hf": hf, "recorded": recorded, "layout": layout, **sections}
    return compare.merged(pool.run("tests.actor.work:train", world=world, **work))


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Adam divides by the gradient's own size: where a gradient is all rounding noise the step is
    too, so the bound is a fraction of the four steps of 1e-3 that every weight takes.
    """
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert (found[name] - weight).abs().max() < 4e-3 * 0.25, name
        assert (found[name] - weight).abs().mean() < 4e-3 * 1e-3, name


def test_layers_lie_where_the_mesh_says(pool: WorkerPool, tiny_model: Path) -> None:
    cases: list[tuple[dict[str, int], int]] = [
        ({"pp": 2}, 4),
        ({"pp": 4, "vpp": 3}, 24),
        ({"pp": 2, "first_layers": 1}, 4),
        ({"pp": 2, "first_layers": 3, "last_layers": 2}, 5),
        ({"pp": 16, "last_layers": 1}, 61),
        ({"pp": 16, "first_layers": 3, "last_layers": 2}, 61),
        ({"pp": 8, "vpp": 2, "first_layers": 4, "last_layers": 2}, 54),
        ({"pp": 4, "vpp": 2, "last_layers": 6}, 18),
        ({"pp": 3, "vpp": 4, "first_layers": 4}, 20),
    ]
    (found,) = pool.run("tests.actor.work:upstream_layers", world=1, hf=tiny_model, layouts=cases)
    for (layout, layers), stages in zip(cases, found, strict=True):
        mesh = compare.mesh_of(layout)
        expected = [
            [list(mesh.layers_of(layers, stage, k)) for k in range(mesh.vpp)]
            for stage in range(mesh.pp)
        ]
        assert stages == expected, (layout, layers)


def test_the_comparison_sees_activations_and_gradients_of_stages_exchanged(
    pool: WorkerPool, tiny_model: Path, recorded: Path, single: dict[str, Any]
) -> None:
    """Guards the interleaved schedule's setting: with the other one nothing fails but the numbers.
    It shows once there are more rows than pp, when both kinds are on their way at once.
    """
    layout = {"pp": 2, "vpp": 2}
    work = {"hf": tiny_model, "recorded": recorded, "layout": layout, "train": {"row_tokens": 48}}
    right, wrong = (
        compare.merged(pool.run("tests.actor.work:train", world=2, p2p_in_batches=b, **work))
        for b in (False, True)
    )
    errors = [
        max(
            float((found["gradients"][name] - g).abs().max() / g.abs().max())
            for name, g in single["gradients"].items()
        )
        for found in (right, wrong)
    ]
    assert errors[0] < GRADIENT_TOL and errors[1] > 100 * GRADIENT_TOL, errors


def assert_same_metrics(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.keys() == b.keys(), a.keys() ^ b.keys()
        for name in b:
            # the loss of a first minibatch is a sum that cancels: compare with the size of its
            # terms
            assert a[name] == pytest.approx(b[name], rel=METRIC_RTOL, abs=2e-7), (step, name)


def test_the_comparison_sees_a_wrong_gradient(single: dict[str, Any]) -> None:
    """Guards the test itself: gradients are not zero, and a factor of two is far outside the
    tolerance.
    """
    for name, g in single["gradients"].items():
        assert g.abs().max() > 0, name
        assert not torch.allclose(2 * g, g, rtol=0, atol=GRADIENT_TOL * float(g.abs().max()))
