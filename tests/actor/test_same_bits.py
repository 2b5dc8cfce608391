"""Settings for memory and speed that must not change a number: recomputation and overlap.

Training with them is compared bit for bit with training without, in the same layout: losses,
gradients of the first optimizer step and weights after the last of four, between which log-probs
are computed anew (a parameter that was not gathered in time would show in them).
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actor import compare
from tests.helpers.dist import WorkerPool
from tests.helpers.families import save_model
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist
slow = pytest.mark.slow

FULL = {"recompute": {"granularity": "full"}}
BLOCK = {"recompute": {"granularity": "full", "method": "block", "num_layers": 1}}
PARTS = ("core_attn", "moe")
TP2, PP2, EP2 = {"tp": 2}, {"pp": 2}, {"dp": 2, "ep": 2}
VPP = {"pp": 2, "vpp": 2}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute": {"granularity": "selective", "modules": modules}}


def train(
    pool: WorkerPool, hf: Path, recorded: Path, layout: dict[str, int], **sections: Any
) -> dict[str, Any]:
    work = {"hf": hf, "recorded": recorded, "layout": layout, "train": {"row_tokens": 48}}
    world = compare.mesh_of(layout).world_size
    return compare.merged(pool.run("tests.actor.work:train", world=world, **work, **sections))


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["metrics"] == expected["metrics"]
    for part in ("gradients", "weights"):
        assert found[part].keys() == expected[part].keys()
        for name, tensor in expected[part].items():
            assert torch.equal(found[part][name], tensor), (part, name)


@pytest.mark.parametrize(
    "layout, sections",
    [
        (EP2, selective(*PARTS)),
        pytest.param(VPP, FULL, marks=slow),
        pytest.param({}, selective("core_attn"), marks=slow),
        pytest.param({}, selective("moe"), marks=slow),
        pytest.param({}, FULL, marks=slow),
        pytest.param({}, BLOCK, marks=slow),
        pytest.param(TP2, selective(*PARTS), marks=slow),
        pytest.param(TP2, FULL, marks=slow),
        pytest.param(PP2, selective(*PARTS), marks=slow),
        pytest.param(PP2, BLOCK, marks=slow),
        pytest.param(VPP, BLOCK, marks=slow),
        pytest.param(EP2, FULL, marks=slow),
        pytest.param({"cp": 2}, FULL, marks=slow),
        pytest.param({"tp": 2, "dp": 2, "ep": 2, "etp": 1}, FULL, marks=slow),
    ],
    ids=str,
)
def test_recomputation(
    pool: WorkerPool,
    tiny_model: Path,
    recorded: Path,
    layout: dict[str, int],
    sections: dict[str, Any],
) -> None:
    plain = train(pool, tiny_model, recorded, layout)
    assert_same_bits(train(pool, tiny_model, recorded, layout, **sections), plain)


@slow
@pytest.mark.parametrize(
    "layout, sections",
    [
        ({}, selective("core_attn", "mlp", "moe")),
        ({}, selective("shared_experts")),
        (PP2, FULL),
        (EP2, selective("core_attn", "moe")),
    ],
    ids=str,
)
def test_recomputation_of_latent_attention_shared_experts_and_biases(
    pool: WorkerPool,
    recorded: Path,
    tmp_path: Path,
    layout: dict[str, int],
    sections: dict[str, Any],
) -> None:
    """A token that is routed again in the backward pass counts once towards its expert's bias."""
    model = save_model("deepseek_v3", tmp_path / "model")
    plain = train(pool, model, recorded, layout)
    assert_same_bits(train(pool, model, recorded, layout, **sections), plain)


@slow
def test_shared_experts_beside_the_exchange(
    pool: WorkerPool, recorded: Path, tmp_path: Path
) -> None:
    """To rounding: gradients of shared experts and router are added in another order."""
    model = save_model("deepseek_v3", tmp_path / "model")
    plain = train(pool, model, recorded, EP2)
    beside = train(pool, model, recorded, EP2, overlap={"moe_shared_expert": True})
    for name, g in plain["gradients"].items():
        assert (beside["gradients"][name] - g).abs().max() <= 2e-5 * g.abs().max(), name


SPLIT = {"optim": {"distributed": True}}
REDUCE = {"overlap": {"grad_reduce": True}}
BOTH = {**SPLIT, "overlap": {"grad_reduce": True, "param_gather": True}}


@pytest.mark.parametrize(
    "layout, without, overlapped",
    [
        (EP2, SPLIT, BOTH),
        pytest.param({"dp": 2}, {}, REDUCE, marks=slow),
        pytest.param({"dp": 2}, SPLIT, BOTH, marks=slow),
        pytest.param({"dp": 2, "pp": 2}, SPLIT, BOTH, marks=slow),
        pytest.param({"dp": 2, "pp": 2, "vpp": 2}, SPLIT, BOTH, marks=slow),
        pytest.param({"cp": 2}, SPLIT, BOTH, marks=slow),
        pytest.param({"dp": 2, "tp": 2}, SPLIT, {**BOTH, **FULL}, marks=slow),
    ],
    ids=str,
)
def test_overlap(
    pool: WorkerPool,
    tiny_model: Path,
    recorded: Path,
    layout: dict[str, int],
    without: dict[str, Any],
    overlapped: dict[str, Any],
) -> None:
    plain = train(pool, tiny_model, recorded, layout, **without)
    assert_same_bits(train(pool, tiny_model, recorded, layout, **overlapped), plain)


@slow
@pytest.mark.parametrize("layout", [EP2, pytest.param({"tp": 2, "ep": 2, "etp": 1}, marks=slow)])
def test_both_dispatchers_compute_the_same(
    pool: WorkerPool, tiny_model: Path, recorded: Path, layout: dict[str, int]
) -> None:
    """To rounding: a token's experts are summed in another order."""
    one, other = (
        train(pool, tiny_model, recorded, layout, moe={"token_dispatcher": kind})
        for kind in ("alltoall", "allgather")
    )
    for name, g in one["gradients"].items():
        error = (other["gradients"][name] - g).abs().max() / g.abs().max()
        assert error < 2e-5, (name, float(error))
    for found, expected in zip(other["metrics"], one["metrics"], strict=True):
        assert found == pytest.approx(expected, rel=2e-5, abs=2e-7)


def test_recomputation_computes_attention_twice(pool: WorkerPool, tiny_model: Path) -> None:
    """Guards the comparison: with a setting that did nothing it would pass as well."""
    work = {"hf": tiny_model, "samples": random_samples(2, 2, seed=4)}
    plain, again, layers = (
        pool.run("tests.actor.work_same_bits:attention_calls", world=1, **work, sections=sections)[
            0
        ]
        for sections in ({}, selective("core_attn"), BLOCK)
    )
    assert (again, layers) == (2 * plain, plain + plain // 4)  # of four layers the first
