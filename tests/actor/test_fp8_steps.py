"""FP8 on Megatron's own linears over steps: delayed scaling, recomputation, resuming."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.actor import compare
from tests.actor.compare import emulated
from tests.actor.test_state import assert_same_bits, go
from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist

WORK = "tests.actor.work_fp8_emulated"

DELAYED = {"recipe": "delayed", "format": "hybrid", "amax_history": 3}
# Weights stay, so that only scales move, and nothing is clipped, where small gaps decide much.
CALM = {
    "optim": {"lr": 1e-6, "distributed": False},
    "algo": {"policy": {"name": "reinforce"}, "minibatches": 1},
}
FULL = {"granularity": "full", "method": "uniform", "num_layers": 1}


def steps(
    pool: WorkerPool, hf: Path, layout: dict[str, int], until: int, **sections: Any
) -> list[Any]:
    world = compare.mesh_of(layout).world_size
    return pool.run(
        f"{WORK}:steps", world=world, hf=hf, layout=layout, until=until, **{**CALM, **sections}
    )


def of_all(ranks: list[Any]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    metrics = compare.merged(
        [{"metrics": [s["metrics"] for s in r], "gradients": {}, "weights": {}} for r in ranks]
    )["metrics"]
    return metrics, {name: t for r in ranks for name, t in r[-1]["fp8"].items()}


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_delayed_scales_are_those_of_one_process(
    pool: WorkerPool, blocks_model: Path, layout: dict[str, int]
) -> None:
    """Largest entries of all ranks count: over the microbatches of a step histories and multipliers
    agree, and so do gradients.
    """
    run = {"precision": emulated(**DELAYED), "train": {"row_tokens": 48}}
    (one, state), (split, split_state) = (
        of_all(steps(pool, blocks_model, where, until=1, **run)) for where in ({}, layout)
    )
    assert state.keys() == split_state.keys() and len(state) == 4 + 2 + 8
    for name, expected in state.items():
        assert torch.allclose(split_state[name], expected, rtol=2e-2, atol=0), name
        assert (expected[-1] != 1).all(), name  # every multiplier has moved
    for a, b in zip(split, one, strict=True):
        assert a["optim/grad_norm"] == pytest.approx(b["optim/grad_norm"], rel=5e-3)


def test_a_history_has_a_step_of_every_microbatch_and_weights_of_every_update(
    pool: WorkerPool, blocks_model: Path
) -> None:
    """Rows of inputs and gradients fill up within a step, those of weights one a step; and
    multipliers bring the largest of them to the format's largest, a margin below.
    """
    fp8 = {**DELAYED, "amax_history": 32, "margin": 2}
    run = {"precision": emulated(**fp8), "train": {"row_tokens": 48}}
    (ranks,) = steps(pool, blocks_model, {}, until=3, **run)
    largest = torch.tensor([448.0, 448.0, 57344.0]) / 2**2  # hybrid
    for name, state in ranks[0]["fp8"].items():
        seen = state[:-1].amax(0)
        assert (seen > 0).all(), name
        assert torch.allclose(state[-1] * seen, largest, rtol=1e-6, atol=0), name
    filled = [
        (r["fp8"]["decoder.layers.0.self_attention.linear_qkv"][:-1] > 0).sum(0) for r in ranks
    ]
    inputs, weights, gradients = zip(*(f.tolist() for f in filled), strict=True)
    assert inputs[0] >= 3 and weights == (1, 2, 3)
    assert 2 <= gradients[0] <= inputs[0]  # rows without an advantage have none


@pytest.mark.parametrize("recompute", [{}, FULL], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "frozen", [["model.layers.0.*"], ["*embed_tokens*", "model.layers.0.*"]], ids=str
)
def test_gradients_of_frozen_layers_count_in_their_own_microbatch(
    pool: WorkerPool, blocks_model: Path, frozen: list[str], recompute: dict[str, Any]
) -> None:
    """A backward pass that goes on to trained embeddings ends after them, and one that ends at the
    first trained layer there: nothing waits for the next step's. What is computed again has
    gradients down to the embeddings whether they are trained or not.
    """
    run = {"precision": emulated(**DELAYED), "train": {"row_tokens": 48, "frozen": frozen}}
    (ranks,) = steps(pool, blocks_model, {}, until=1, recompute=recompute, **run)
    through_frozen = []
    for name, state in ranks[0]["fp8"].items():
        gradients = state[:-1, 2]
        assert gradients[0] == 0, name
        if ".layers.0." in name:
            through_frozen.append(bool((gradients > 0).any()))
        else:
            assert (gradients > 0).any(), name
    assert set(through_frozen) == {len(frozen) == 1 or bool(recompute)}


@pytest.mark.parametrize("fp8", [{}, DELAYED], ids=["blockwise", "delayed"])
def test_recomputed_layers_have_the_same_bits(
    pool: WorkerPool, blocks_model: Path, fp8: dict[str, Any]
) -> None:
    run = {"precision": {**emulated(**fp8), "dtype": "bf16"}, "train": {"row_tokens": 48}}
    parts = {"granularity": "selective", "modules": ["moe"]}
    kept, *recomputed = (
        steps(pool, blocks_model, {}, until=2, **run, recompute=recompute)[0]
        for recompute in ({}, FULL, parts)
    )
    for again in recomputed:
        for a, b in zip(again, kept, strict=True):
            assert a["metrics"] == b["metrics"]
            assert_same_bits(a["fp8"], b["fp8"])
        assert_same_bits(again[-1]["weights"], kept[-1]["weights"])


@pytest.mark.parametrize(
    "layout",
    [{"dp": 2, "ep": 2}, *(pytest.param(x, marks=pytest.mark.slow) for x in ({}, {"pp": 2}))],
    ids=str,
)
def test_delayed_scaling_goes_on_from_a_checkpoint_bit_for_bit(
    pool: WorkerPool, blocks_model: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    run = {"hf": blocks_model, "path": tmp_path / "saved"}
    sections = {"optim": {"lr": 1e-3, "distributed": True}, "precision": emulated(**DELAYED)}
    whole = go(pool, "trained_on", layout, **run, **sections)
    rest = go(pool, "resumed", layout, **run, **sections)
    assert_same_bits(rest["after"], whole["after"])
    # a run without it reads the same file, and goes another way
    other = {**sections, "precision": {"dtype": "fp32"}}
    without = go(pool, "resumed", layout, **run, **other)
    assert any(not torch.equal(without["after"][n], t) for n, t in whole["after"].items())
    longer = {**sections, "precision": emulated(**{**DELAYED, "amax_history": 5})}
    said = pool.run(
        "tests.actor.work_state:load_refused",
        **{"world": compare.mesh_of(layout).world_size, "hf": blocks_model, "layout": layout},
        **{"path": run["path"], **longer},
    )
    for text in said:
        assert text.startswith("precision.fp8.amax_history: found 5; accepted: 3, as the histories")


@pytest.mark.slow
def test_a_checkpoint_without_scales_starts_with_none(
    pool: WorkerPool, blocks_model: Path, tmp_path: Path
) -> None:
    run = {"hf": blocks_model, "path": tmp_path / "saved"}
    sections = {"optim": {"lr": 1e-3, "distributed": True}}
    go(pool, "trained_on", {}, **run, **sections)
    found = go(pool, "resumed", {}, **run, **sections, precision=emulated(**DELAYED))
    assert all(t.isfinite().all() for t in found["after"].values())
