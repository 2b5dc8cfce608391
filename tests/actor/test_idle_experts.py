"""Experts that no token goes to, up to a whole rank of them: zero gradients, and the rest as in one
process.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.types import Sample
from tests.actor.split_cases import evaluate, masked
from tests.actor.test_split import GRADIENT_TOL
from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

REINFORCE = {"policy": {"name": "reinforce"}, "advantage": {"name": "grpo", "singleton": "raw"}}


@pytest.fixture(scope="module")
def lopsided(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Routers of zeros: all logits are equal, and so every token's choice is the same."""
    folder = tmp_path_factory.mktemp("lopsided") / "model"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("mlp.gate.weight"):
            tensor.zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def batches() -> dict[str, list[Sample]]:
    many = random_samples(3, 4, seed=2)
    return {
        "many": many,
        "one token": [masked(many[0], keep=1)],
        "two tokens": [masked(s, keep=1) for s in many[:2]],
        "nothing trained": [masked(many[0], keep=0)],
    }


def gradients(pool: WorkerPool, hf: Path, layout: dict[str, int]) -> dict[str, dict[str, Any]]:
    train = {"row_tokens": 48}
    return evaluate(pool, hf, layout, [(n, REINFORCE, b, train) for n, b in batches().items()])


@pytest.fixture(scope="module")
def single(pool: WorkerPool, lopsided: Path) -> dict[str, dict[str, Any]]:
    return gradients(pool, lopsided, {})


def experts_of(gradients: dict[str, torch.Tensor], used: bool) -> set[str]:
    """Names of the experts whose gradient is anywhere not zero, or nowhere."""
    found: dict[str, bool] = {}
    for name, g in gradients.items():
        if ".experts." in name:
            expert = name.rsplit(".", 2)[0]
            found[expert] = found.get(expert, False) or bool((g != 0).any())
    return {expert for expert, nonzero in found.items() if nonzero == used}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Of the tensor's largest entry, or of a hundredth of the largest of all: two equal gate
    weights make a router's gradient a difference that cancels.
    """
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, g in expected.items():
        size = max(float(g.abs().max()), largest / 100)
        assert float((found[name] - g).abs().max()) <= GRADIENT_TOL * size, (name, size)


def test_every_token_goes_to_the_same_two_experts_of_eight(
    single: dict[str, dict[str, Any]],
) -> None:
    found = single["many"]["gradients"]
    assert all(torch.isfinite(g).all() for g in found.values())
    assert len(experts_of(found, used=True)) == 4 * 2
    assert len(experts_of(found, used=False)) == 4 * 6
    assert experts_of(single["nothing trained"]["gradients"], used=True) == set()


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "ep": 2},
        {"cp": 2, "ep": 2},
        {"tp": 2, "ep": 2, "etp": 1},
        pytest.param({"dp": 4, "ep": 4}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "dp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2, "ep": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_whose_experts_are_idle_take_part(
    pool: WorkerPool, lopsided: Path, single: dict[str, dict[str, Any]], layout: dict[str, int]
) -> None:
    found = gradients(pool, lopsided, layout)
    for batch, result in found.items():
        assert_close(result["gradients"], single[batch]["gradients"])
        for used in (True, False):
            expected = experts_of(single[batch]["gradients"], used)
            assert experts_of(result["gradients"], used) == expected, batch
