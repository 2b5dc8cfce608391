"""Frozen parameters stay, the rest trains as it would, in every layout."""

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.types import Sample
from tests.actor.compare import mesh_of
from tests.actor.test_critic import TOL, assert_same_bits
from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

CASES = {
    "nothing": [],
    "embeddings": ["model.embed_tokens.weight"],
    "routers": ["*.mlp.gate.weight"],
    "the first half": ["model.embed_tokens.*", "model.layers.[01].*"],  # of pp 2: a whole stage
    "experts": ["model.layers.[12].mlp.experts.*"],
    "by Megatron's names": ["decoder.layers.2.self_attention.*", "output_layer.*"],
    "all but the head": ["model.*"],
    "all but the experts": ["*embed*", "*attn*", "*norm.weight", "*.gate.weight", "lm_head.*"],
}
# What the Hugging Face names of the frozen tensors are, where patterns name Megatron's
HF_NAMES = {"by Megatron's names": ["model.layers.2.self_attn.*", "lm_head.weight"]}
LAYOUTS: list[Any] = [{"dp": 2, "ep": 2}, {"pp": 2, "vpp": 2}]
REST = ({"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp": 2})
LAYOUTS += [pytest.param(x, marks=pytest.mark.slow) for x in REST]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return [replace(s, tokens=np.maximum(s.tokens, 1)) for s in random_samples(6, 4, seed=3)]


@pytest.fixture(scope="module")
def trained(pool: WorkerPool, tiny_model: Path, samples: list[Sample]) -> Any:
    """By case, one result from those of all ranks; once a layout."""
    known: dict[str, Any] = {}

    def run(layout: dict[str, int]) -> dict[str, Any]:
        if str(layout) not in known:
            given = {"hf": tiny_model, "layout": layout, "cases": CASES, "samples": samples}
            world = mesh_of(layout).world_size
            ranks = pool.run("tests.actor.work_frozen:trained", world=world, timeout_s=200, **given)
            known[str(layout)] = {case: merged([r[case] for r in ranks]) for case in CASES}
        return known[str(layout)]

    return run


def merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    tensors = {
        # copies: what comes from a worker keeps a file open
        name: {k: v.clone() for r in ranks for k, v in r[name].items()}
        for name in ("gradients", "before", "after")
    }
    numbers = {name: sum(r[name] for r in ranks) for name in ("trainable", "optimized")}
    return {**tensors, **numbers, "frozen": set().union(*(r["frozen"] for r in ranks))}


def is_frozen(case: str, name: str) -> bool:
    return any(fnmatchcase(name, p) for p in HF_NAMES.get(case, CASES[case]))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_rest_has_the_gradients_of_a_run_without(trained: Any, layout: dict[str, int]) -> None:
    whole = trained({})["nothing"]["gradients"]
    for case in CASES:
        found = trained(layout)[case]["gradients"]
        assert found.keys() == whole.keys()
        for name, expected in whole.items():
            if is_frozen(case, name):
                assert found[name].isnan().all(), (case, name)
            else:
                error = (found[name] - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
                assert error < TOL, (case, name, float(error))


RECOMPUTE: dict[str, dict[str, Any]] = {
    "every layer": {"granularity": "full"},
    "experts": {"granularity": "selective", "modules": ["moe"]},
}
BELOW_THE_FIRST = {
    "embeddings": ["model.embed_tokens.weight"],
    "and attention": ["*embed_tokens*", "*.self_attn.*", "model.layers.*norm.weight"],
    "and a layer": ["*embed_tokens*", "model.layers.0.*"],
}


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        ({}, "every layer"),
        ({}, "experts"),
        pytest.param({"pp": 2}, "every layer", marks=pytest.mark.slow),
        pytest.param({"tp": 2}, "every layer", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_is_computed_again_above_frozen_embeddings_is_trained(
    pool: WorkerPool,
    tiny_model: Path,
    samples: list[Sample],
    trained: Any,
    layout: dict[str, int],
    recompute: str,
) -> None:
    whole = trained({})["nothing"]["gradients"]
    ranks = pool.run(
        "tests.actor.work_frozen:trained",
        world=mesh_of(layout).world_size,
        **{"hf": tiny_model, "layout": layout, "cases": BELOW_THE_FIRST, "samples": samples},
        recompute=RECOMPUTE[recompute],
    )
    for case, patterns in BELOW_THE_FIRST.items():
        found = merged([r[case] for r in ranks])["gradients"]
        for name, expected in whole.items():
            if not any(fnmatchcase(name, p) for p in patterns):
                error = (found[name] - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
                assert error < TOL, (case, name, float(error))


@pytest.mark.parametrize("layout", [{}, *LAYOUTS], ids=str)
def test_frozen_tensors_stay_to_the_last_bit_and_are_exported(
    trained: Any, layout: dict[str, int]
) -> None:
    """With weight decay, which would move them without a gradient; the others move."""
    names = trained({})["nothing"]["after"].keys()
    for case in CASES:
        before, after = trained(layout)[case]["before"], trained(layout)[case]["after"]
        assert after.keys() == names
        stayed = {n for n in names if torch.equal(before[n], after[n])}
        assert stayed == {n for n in names if is_frozen(case, n)}, case
        assert (case == "nothing") == (not stayed)


def test_frozen_parameters_have_no_optimizer_state(trained: Any) -> None:
    for case, found in trained({}).items():
        assert found["optimized"] == found["trainable"], case
    expert = trained({"dp": 2, "ep": 2})["experts"]["frozen"]
    assert len(expert) == 2 * 8 * 2 and all(".local_experts." in name for name in expert)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "case", "distributed"),
    [
        ({"pp": 2}, "the first half", True),
        ({"dp": 2, "ep": 2}, "all but the experts", True),
        pytest.param({"pp": 2}, "the first half", False, marks=SLOW),
        pytest.param({"dp": 2, "ep": 2}, "experts", True, marks=SLOW),
        pytest.param({"pp": 2, "vpp": 2}, "all but the head", True, marks=SLOW),
        pytest.param({"tp": 2}, "routers", True, marks=SLOW),
    ],
    ids=str,
)
def test_training_goes_on_from_a_checkpoint_bit_for_bit(
    pool: WorkerPool,
    tiny_model: Path,
    tmp_path: Path,
    samples: list[Sample],
    layout: dict[str, int],
    case: str,
    distributed: bool,
) -> None:
    given = {"hf": tiny_model, "path": tmp_path / "at", "samples": samples}
    given |= {"layout": layout, "patterns": CASES[case], "distributed": distributed}
    ranks = pool.run("tests.actor.work_frozen:resumed", world=2, timeout_s=200, **given)
    whole, rest = ({n: t for r in ranks for n, t in r[k].items()} for k in ("whole", "rest"))
    assert_same_bits(rest, whole)
