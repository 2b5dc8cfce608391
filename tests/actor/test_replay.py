"""Replayed routing trains what transformers' own routers and autograd say for the same choices.

Choices are drawn at random, so that nearly every token's drifts from what its router would choose;
the independent computation is ``helpers/forced_routing.py``. Layouts and recomputation are compared
with the same, so that a choice that reaches another layer, token or microbatch shows.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.monitor.metrics import merge_metrics
from megarl.types import Mean, Sample
from tests.actor.compare import mesh_of
from tests.actor.test_families import (
    GRADIENT_TOL,
    LOGPROB_TOL,
    gradient_difference,
    logprob_difference,
    without_copies,
)
from tests.helpers.dist import WorkerPool
from tests.helpers.families import reference_logprobs, save_model
from tests.helpers.forced_routing import (
    forced_gradients,
    forced_logprobs,
    live_routing,
    shape_of,
    with_random_routing,
)
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

# softmax over the chosen; before top-k; sigmoid with bias, groups, scale and a layer behind the
# last; without renormalisation; without groups; a router with a parameter for a bias
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe tied", {}),
    "qwen3_moe before top-k": ("qwen3_moe yarn", {"norm_topk_prob": False}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3 plain": ("deepseek_v3 direct queries", {}),
    "glm4_moe": ("glm4_moe", {}),
    "gpt_oss": ("gpt_oss", {}),
}
SAMPLES = random_samples(3, 3, seed=3)
R2 = {"moe": {"routing_replay": "old_logprobs"}}
R3 = {"moe": {"routing_replay": "rollout"}}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "moe": {"granularity": "selective", "modules": ["moe"]},
    "full": {"granularity": "full"},
    "pairs": {"granularity": "full", "num_layers": 2},
    "block": {"granularity": "full", "method": "block", "num_layers": 1},
}
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("replayed")
    return {
        name: save_model(row, folder / name.replace(" ", "_"), **changes)
        for name, (row, changes) in MODELS.items()
    }


@pytest.fixture(scope="session")
def samples(models: dict[str, Path]) -> dict[str, list[Sample]]:
    return {n: with_random_routing(SAMPLES, shape_of(m)) for n, m in models.items()}


@pytest.fixture(scope="session")
def expected(models: dict[str, Path], samples: dict[str, list[Sample]]) -> Results:
    return {
        name: {
            "logprobs": forced_logprobs(model, samples[name]),
            "gradients": forced_gradients(model, samples[name]),
        }
        for name, model in models.items()
    }


def evaluate(
    pool: WorkerPool,
    models: dict[str, Path],
    samples: dict[str, list[Sample]],
    layout: dict[str, int],
    **given: Any,
) -> Results:
    whole = {name for name in models if name == "gpt_oss"}  # whose experts tp does not split
    ranks = pool.run(
        "tests.actor.work_replay:evaluate",
        world=mesh_of(layout).world_size,
        timeout_s=300,
        models=models,
        layouts={n: {**layout, "etp": 1} if n in whole else layout for n in models},
        samples=samples,
        **given,
    )
    return {
        name: {
            "metrics": [r[name]["metrics"] for r in ranks],
            "rows": ranks[0][name]["rows"],
            **{
                part: {k: v for r in ranks for k, v in r[name][part].items()}
                for part in ("logprobs", "gradients")
            },
        }
        for name in models
    }


def assert_same(found: Results, expected: Results) -> None:
    for name, results in found.items():
        wrong = logprob_difference(results["logprobs"], expected[name]["logprobs"])
        assert wrong < LOGPROB_TOL, (name, wrong)
        own = without_copies(results["gradients"])
        error, tensor = gradient_difference(own, expected[name]["gradients"])
        assert error < GRADIENT_TOL, (name, tensor, error)


def test_one_process_computes_what_transformers_does_with_the_same_choices(
    pool: WorkerPool, models: dict[str, Path], samples: dict[str, list[Sample]], expected: Results
) -> None:
    found = evaluate(pool, models, samples, {}, sections=R3)
    assert_same(found, expected)
    for name, results in found.items():
        live = reference_logprobs(models[name], SAMPLES)
        assert logprob_difference(results["logprobs"], live) > 0.1, name  # they are other choices
        routers = {
            n: g
            for n, g in results["gradients"].items()
            if n.endswith(("mlp.gate.weight", "mlp.router.weight"))
        }
        assert len(routers) == shape_of(models[name])[0], sorted(routers)
        assert all(float(g.abs().max()) > 1e-3 for g in routers.values()), name


# Dense layer first and a layer behind the last; a dense layer in the middle
FEW = ("deepseek_v3", "qwen3_moe")
SOME = [
    ({"tp": 2}, "moe"),  # sequence parallel
    ({"cp": 2, "ep": 2}, "none"),
    ({"pp": 2}, "block"),
    ({"pp": 2, "vpp": 2}, "full"),
]
ALL = [
    (layout, recompute)
    for layout in [
        {"tp": 2},
        {"cp": 2},
        {"pp": 2},
        {"pp": 2, "vpp": 2},
        {"pp": 2, "first_layers": 1},  # a stage without experts
        {"pp": 2, "last_layers": 1},
        {"dp": 2},
        {"dp": 2, "ep": 2},
        {"tp": 2, "ep": 2, "etp": 1},
        {"cp": 2, "ep": 2},
        {"tp": 2, "cp": 2},
        {"tp": 2, "pp": 2, "vpp": 2},
        {"cp": 2, "dp": 2, "ep": 2},
        {"pp": 4},
    ]
    for recompute in RECOMPUTE
]


@pytest.mark.parametrize(("layout", "recompute"), SOME, ids=str)
def test_a_layout_replays_the_same(
    pool: WorkerPool,
    models: dict[str, Path],
    samples: dict[str, list[Sample]],
    expected: Results,
    layout: dict[str, int],
    recompute: str,
) -> None:
    found = replayed(pool, models, samples, layout, recompute, FEW)
    assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "recompute"), ALL, ids=str)
def test_every_family_in_every_layout_replays_the_same(
    pool: WorkerPool,
    models: dict[str, Path],
    samples: dict[str, list[Sample]],
    expected: Results,
    layout: dict[str, int],
    recompute: str,
) -> None:
    assert_same(replayed(pool, models, samples, layout, recompute, tuple(MODELS)), expected)


def replayed(
    pool: WorkerPool,
    models: dict[str, Path],
    samples: dict[str, list[Sample]],
    layout: dict[str, int],
    recompute: str,
    names: tuple[str, ...],
) -> Results:
    sections = {**R3, "recompute": RECOMPUTE[recompute]}
    some = {n: models[n] for n in names}
    found = evaluate(pool, some, {n: samples[n] for n in names}, layout, sections=sections)
    assert all(results["rows"] >= (2 if layout.get("dp") else 4) for results in found.values())
    return found


# --- R2 -------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def moved(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models after an update that went far: other weights everywhere."""
    folder = tmp_path_factory.mktemp("moved")
    return {
        name: save_model(MODELS[name][0], folder / name, seed=1, **MODELS[name][1]) for name in FEW
    }


@pytest.fixture(scope="session")
def expected_of_old_choices(models: dict[str, Path], moved: dict[str, Path]) -> Results:
    found = {}
    for name in FEW:
        old = live_routing(models[name], SAMPLES)  # of the last token, too
        chosen = [replace(s, routing=r) for s, r in zip(SAMPLES, old, strict=True)]
        found[name] = {
            "logprobs": reference_logprobs(models[name], SAMPLES),
            "gradients": forced_gradients(moved[name], chosen),
        }
    return found


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        ({}, "none"),
        ({"pp": 2, "vpp": 2}, "moe"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL),
    ],
    ids=str,
)
def test_training_replays_the_pass_before_the_update(
    pool: WorkerPool,
    models: dict[str, Path],
    moved: dict[str, Path],
    expected_of_old_choices: Results,
    layout: dict[str, int],
    recompute: str,
) -> None:
    sections = {**R2, "recompute": RECOMPUTE[recompute]}
    plain = {name: SAMPLES for name in FEW}
    some = {name: models[name] for name in FEW}
    found = evaluate(pool, some, plain, layout, sections=sections, moved=moved)
    assert_same(found, expected_of_old_choices)


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        ({}, "full"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [({}, "none"), ({}, "moe"), ({}, "block"), ({"pp": 2, "vpp": 2}, "pairs")]
        ),
    ],
    ids=str,
)
def test_replaying_its_own_choices_changes_no_bit(
    pool: WorkerPool, models: dict[str, Path], layout: dict[str, int], recompute: str
) -> None:
    plain = {name: SAMPLES for name in models}
    tokens = sum(s.length for s in SAMPLES)
    own, again = (
        evaluate(pool, models, plain, layout, sections={**how, "recompute": RECOMPUTE[recompute]})
        for how in ({}, R2)
    )
    for name in models:
        gradients = again[name]["gradients"]
        assert gradients.keys() == own[name]["gradients"].keys()
        assert all(torch.equal(gradients[n], g) for n, g in own[name]["gradients"].items()), name
        assert changed(again[name]) == Mean(0, tokens * shape_of(models[name])[0])
        assert not any(m.name == "moe/replay_changed" for ms in own[name]["metrics"] for m in ms)


@pytest.mark.parametrize("layout", [{}, pytest.param({"pp": 2}, marks=pytest.mark.slow)], ids=str)
def test_frozen_layers_below_are_computed_again_as_well(
    pool: WorkerPool, models: dict[str, Path], layout: dict[str, int]
) -> None:
    """Embeddings and the first two layers, the second of which has experts."""
    name = "deepseek_v3"
    frozen = {"row_tokens": 32, "frozen": ["model.embed_tokens.*", "model.layers.[01].*"]}
    once, again = (
        evaluate(
            *(pool, {name: models[name]}, {name: SAMPLES}, layout),
            sections={**R2, "train": frozen, "recompute": RECOMPUTE[recompute]},
        )[name]
        for recompute in ("none", "full")
    )
    assert all(torch.equal(again["gradients"][n], g) for n, g in once["gradients"].items())
    assert changed(again) == changed(once) == Mean(0, 3 * sum(s.length for s in SAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "moe"])
def test_in_bf16_too(pool: WorkerPool, models: dict[str, Path], recompute: str) -> None:
    plain = {name: SAMPLES for name in models}
    sections = {"precision": {"dtype": "bf16"}, "recompute": RECOMPUTE[recompute]}
    own, again = (evaluate(pool, models, plain, {}, sections={**sections, **x}) for x in ({}, R2))
    for name in models:
        gradients = again[name]["gradients"]
        assert all(torch.equal(gradients[n], g) for n, g in own[name]["gradients"].items()), name
        assert changed(again[name]).total == 0 < changed(again[name]).count


# --- how often the router would have chosen others ------------------------------------------------


def changed(results: dict[str, Any]) -> Mean:
    """``moe/replay_changed`` of all ranks."""
    (metric,) = (m for m in merge_metrics(results["metrics"]) if m.name == "moe/replay_changed")
    assert isinstance(metric.value, Mean)
    return metric.value


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tp": 2},
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in [{"cp": 2}, {"pp": 2, "vpp": 2}, {"dp": 2, "ep": 2}, {"tp": 2, "cp": 2}]
        ),
    ],
    ids=str,
)
def test_what_would_have_been_chosen_otherwise_is_counted_once_a_token_and_layer(
    pool: WorkerPool, models: dict[str, Path], layout: dict[str, int]
) -> None:
    """One expert of one token in one layer differs, here and there; the rest is the model's own, in
    another order. Layers behind the first change see other activations: only the last is changed.
    """
    name = "deepseek_v3"
    layers, _, experts = shape_of(models[name])
    samples, others = [], 0
    for i, (s, r) in enumerate(zip(SAMPLES, live_routing(models[name], SAMPLES), strict=True)):
        routing = np.ascontiguousarray(r[:-1, :, ::-1])
        for token in range(i % 2, s.length - 1, 3):
            chosen = set(routing[token, layers - 1].tolist())
            routing[token, layers - 1, 0] = min(set(range(experts)) - chosen)
            others += 1
        samples.append(replace(s, routing=routing.astype(np.uint8)))
    tokens = sum(s.length - 1 for s in samples)
    for recompute in ("none", "full"):
        sections = {**R3, "recompute": RECOMPUTE[recompute]}
        found = evaluate(pool, {name: models[name]}, {name: samples}, layout, sections=sections)
        assert changed(found[name]) == Mean(others, tokens * layers)
