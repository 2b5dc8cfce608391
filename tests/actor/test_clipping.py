"""Gradient clipping in closed form, in every layout: the norm is that of the whole model's
gradient, every matrix counted once, and the update has its direction with length ``clip_grad``.

Adam's eps is chosen so far above the gradients that a first step is lr / eps times the gradient.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.recorded import recorded_path, write_samples
from tests.actor import compare
from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist
slow = pytest.mark.slow

EPS, STEP = 1e4, 1.0  # lr = EPS * STEP: an update of STEP times the gradient
SPLIT = {"distributed": True}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rollouts")
    write_samples(recorded_path(folder, 1), random_samples(8, 4, seed=1))
    return folder


def one_step(
    pool: WorkerPool, hf: Path, recorded: Path, layout: dict[str, int], **optim: Any
) -> dict[str, Any]:
    optim = {"lr": STEP * EPS, "eps": EPS, "betas": [0.0, 0.0], **optim}
    results = pool.run(
        "tests.actor.work:train",
        world=compare.mesh_of(layout).world_size,
        **{"hf": hf, "recorded": recorded, "layout": layout, "optim": optim},
        algo={"minibatches": 1},
    )
    return compare.merged(results)


@pytest.fixture(scope="module")
def plain(pool: WorkerPool, tiny_model: Path, recorded: Path) -> dict[str, Any]:
    """The gradient, and the weights before: those after a step that clipping makes nothing."""
    before = one_step(pool, tiny_model, recorded, {}, clip_grad=1e-30)["weights"]
    gradients = one_step(pool, tiny_model, recorded, {}, clip_grad=0.0)["gradients"]
    return {"before": before, "gradients": gradients}


@pytest.mark.parametrize(
    "layout, optim",
    [
        pytest.param({}, {}, marks=slow),
        ({"dp": 2, "ep": 2}, SPLIT),
        pytest.param({"tp": 2}, {}, marks=slow),
        pytest.param({"tp": 2}, SPLIT, marks=slow),
        pytest.param({"pp": 2}, SPLIT, marks=slow),
        pytest.param({"pp": 2, "vpp": 2}, {}, marks=slow),
        pytest.param({"cp": 2}, SPLIT, marks=slow),
        pytest.param({"dp": 2}, {}, marks=slow),
        pytest.param({"tp": 2, "dp": 2, "ep": 2, "etp": 1}, SPLIT, marks=slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("limit", [0.25, pytest.param(1e3, marks=slow)])
def test_the_update_is_the_clipped_gradient(
    pool: WorkerPool,
    tiny_model: Path,
    recorded: Path,
    plain: dict[str, Any],
    layout: dict[str, int],
    optim: dict[str, Any],
    limit: float,
) -> None:
    gradients = plain["gradients"]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    share = min(1.0, limit / norm)
    assert norm > 0.5  # a limit of 0.25 clips
    found = one_step(pool, tiny_model, recorded, layout, clip_grad=limit, **optim)
    assert found["metrics"][0]["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, g in gradients.items():
        update = plain["before"][name].double() - found["weights"][name].double()
        # weights of size 1 are stored to 6e-8; 1e-4: g / (g + EPS) is not quite g / EPS
        bound = 2e-7 + 2e-4 * float(g.abs().max()) * share
        assert (update - STEP * share * g.double()).abs().max() < bound, name
    whole = torch.cat([(plain["before"][n] - found["weights"][n]).flatten() for n in gradients])
    assert float(whole.double().norm()) == pytest.approx(STEP * share * norm, rel=1e-3)
