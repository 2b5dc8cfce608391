"""What only GPT-OSS has, in every layout: experts that files stack in one tensor, biases, sinks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.actor import compare
from tests.helpers.dist import WorkerPool
from tests.helpers.families import save_model
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

TP_EP = {"tp": 2, "ep": 2, "etp": 1}
LAYOUTS = [
    {"tp": 2, "etp": 1},
    TP_EP,
    *(
        pytest.param(layout, marks=pytest.mark.slow)
        for layout in ({"dp": 2, "ep": 2}, {"pp": 2, "vpp": 2}, {"cp": 2})
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("gpt_oss", tmp_path_factory.mktemp("gpt_oss") / "model")


@pytest.fixture(scope="module")
def single(pool: WorkerPool, model: Path) -> dict[str, Any]:
    return step(pool, model, {})


def step(pool: WorkerPool, model: Path, layout: dict[str, int]) -> dict[str, Any]:
    """Of one optimizer step: gradients, and their norm."""
    case = ("ppo", {"policy": {"name": "ppo_clip"}}, random_samples(4, 4, seed=5), {})
    results = pool.run(
        "tests.actor.work_split:gradients_of",
        world=compare.mesh_of(layout).world_size,
        hf=model,
        layout=layout,
        cases=[case],
    )
    ranks = [r["ppo"] for r in results]
    return {**compare.merged(ranks), "norms": {r["norm"] for r in ranks}}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_gradient_norm_counts_every_sink_and_bias_once(
    pool: WorkerPool, model: Path, single: dict[str, Any], layout: dict[str, int]
) -> None:
    """Parameters that tensor parallelism splits, or that lie on one rank alone, included."""
    found, (expected,) = step(pool, model, layout), single["norms"]
    by_hand = sum(float((g.double() ** 2).sum()) for g in single["gradients"].values()) ** 0.5
    assert expected == pytest.approx(by_hand, rel=1e-5)
    assert all(norm == pytest.approx(expected, rel=2e-5) for norm in found["norms"])
    for name, g in single["gradients"].items():
        assert g.abs().max() > 0, name
        error = (found["gradients"][name] - g).abs().max() / g.abs().max()
        assert error < 2e-5, (name, float(error))


@pytest.mark.parametrize("layout", [{}, TP_EP], ids=str)
def test_a_trainer_exports_what_it_was_given_bit_for_bit(
    pool: WorkerPool, model: Path, layout: dict[str, int]
) -> None:
    world = compare.mesh_of(layout).world_size
    ranks = pool.run("tests.actor.work:exported", world=world, hf=model, layout=layout)
    names = [n for r in ranks for n in r["tensors"]]
    given = load_file(model / "model.safetensors")
    assert sorted(names) == sorted(given)  # each once
    assert all(torch.equal(t, given[n]) for r in ranks for n, t in r["tensors"].items())


def test_stacks_are_exported_one_after_another(pool: WorkerPool, model: Path) -> None:
    """No rank holds entries of two: parameters come in the order of the tensors they belong to."""
    for layout in ({}, {"dp": 2, "ep": 2}):
        world = compare.mesh_of(layout).world_size
        ranks = pool.run("tests.actor.work:export_order", world=world, hf=model, layout=layout)
        for order in ranks:
            stacked = [name for name in order if ".mlp.experts." in name]
            runs = [n for i, n in enumerate(stacked) if i == 0 or stacked[i - 1] != n]
            assert len(runs) == len(set(runs)) == 4 * 4  # layers, tensors
            assert len(stacked) == len(runs) * 8 // world


@pytest.mark.parametrize("to", [{"dp": 2, "ep": 2}, {"pp": 2}], ids=str)
def test_a_checkpoint_of_split_heads_loads_into_other_layouts(
    pool: WorkerPool, model: Path, tmp_path: Path, to: dict[str, int]
) -> None:
    layout = {"tp": 2, "etp": 1}
    work = {"hf": model, "path": tmp_path / "saved"}
    saved = pool.run("tests.actor.work_state:saved_weights", world=2, layout=layout, **work)
    ranks = pool.run("tests.actor.work_state:loaded_weights", world=2, layout=to, **work)
    loaded = {n: t for r in ranks for n, t in r.items()}
    assert loaded.keys() == saved[0].keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved[0].items())
