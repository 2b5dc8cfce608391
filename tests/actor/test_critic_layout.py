"""A critic in a layout of its own, on the actor's ranks: neither model can tell that the other is
there.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.types import Sample
from tests.actor.compare import mesh_of
from tests.actor.test_critic import TOL, assert_same_bits, numbers
from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

WORK = "tests.actor.work_critic_layout"
EP2 = {"dp": 2, "ep": 2}
VPP2 = {"pp": 2, "vpp": 2}
PAIRS = [
    ({"tp": 2}, {"dp": 2}),
    ({"tp": 2}, {"pp": 2}),
    ({"dp": 2}, {"tp": 2}),
    *(
        pytest.param(*pair, marks=pytest.mark.slow)
        for pair in [
            ({"tp": 2}, {"cp": 2}),
            ({"pp": 2}, {"tp": 2}),
            ({"cp": 2}, {"tp": 2}),
            (EP2, {"tp": 2}),
            (VPP2, EP2),
            (EP2, VPP2),
            ({"cp": 2}, {"pp": 2}),
            ({"tp": 2, "pp": 2}, {"cp": 2, "dp": 2}),
            ({"tp": 2, "dp": 2, "ep": 2}, {"pp": 2, "vpp": 2, "dp": 2}),
        ]
    ),
]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """None of token 0, which pads."""
    return [replace(s, tokens=np.maximum(s.tokens, 1)) for s in random_samples(8, 4, seed=1)]


@pytest.fixture(scope="module")
def head() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(4).normal(0, 0.1, 64).astype(np.float32))


@pytest.fixture(scope="module")
def step(pool: WorkerPool, tiny_model: Path, samples: list[Sample], head: torch.Tensor) -> Any:
    known: dict[str, Any] = {}

    def run(actor: dict[str, int], critic: dict[str, int]) -> dict[str, Any]:
        if (key := f"{actor} {critic}") not in known:
            given = {"hf": tiny_model, "samples": samples, "head": head}
            world = mesh_of(actor).world_size
            ranks = pool.run(
                f"{WORK}:step_beside", world=world, actor=actor, critic=critic, **given
            )
            assert all(r["undisturbed"] for r in ranks)
            known[key] = {
                name: {k: v for r in ranks for k, v in r[name].items()}
                for name in ("gradients", "policy", "weights")
            }
        return known[key]

    return run


@pytest.mark.parametrize(("actor", "critic"), PAIRS, ids=str)
def test_every_gradient_is_that_of_one_process(
    step: Any, actor: dict[str, int], critic: dict[str, int]
) -> None:
    """Of the critic, which has other rows than the actor, and of the actor beside it."""
    found, single = step(actor, critic), step({}, {})
    for of in ("gradients", "policy"):
        assert found[of].keys() == single[of].keys() and len(found[of]) > 40
        for name, expected in single[of].items():
            assert expected.abs().max() > 0, name
            error = (found[of][name] - expected).abs().max() / expected.abs().max()
            assert error < TOL, (of, name, float(error))


@pytest.mark.parametrize(
    ("first", "second"), [({"tp": 2}, {"pp": 2, "vpp": 2}), (EP2, {"cp": 2})], ids=str
)
def test_upstream_sees_one_layout_or_the_other(
    pool: WorkerPool, first: dict[str, int], second: dict[str, int]
) -> None:
    def degrees(layout: dict[str, int]) -> dict[str, int]:
        return {axis: layout.get(axis, 1) for axis in ("tp", "pp", "cp", "dp", "ep", "vpp")}

    for found in pool.run(f"{WORK}:variables", world=2, first=first, second=second):
        assert len(found["changed"]) > 50
        assert found["changed"] <= found["known"], found["changed"] - found["known"]
        assert found["outside"] == [degrees(first)] * 2
        assert found["inside"] == degrees(second)
        of = degrees(second)
        assert found["groups"] == [of["tp"], of["cp"], of["pp"], of["dp"] * of["cp"]]


def test_training_goes_on_from_a_checkpoint_bit_for_bit(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path
) -> None:
    """Saved and loaded through its own groups, while upstream's are the actor's."""
    work, given = "tests.actor.work_critic:trained_on", {"hf": tiny_model, "path": tmp_path / "at"}
    layouts = {"layout": {"dp": 2}, "actor": {"tp": 2}}
    optim = {"lr": 1.0, "distributed": True}
    runs = [
        pool.run(work, world=2, load=load, optim=optim, **layouts, **given)
        for load in (False, True)
    ]
    (whole, rest) = ({n: t for r in run for n, t in r["after"].items()} for run in runs)
    assert numbers(runs[0][0]["metrics"]) == numbers(runs[1][0]["metrics"])
    assert_same_bits(rest, whole)
