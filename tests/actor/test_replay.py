"""Replayed routing trains what transformers' own routers and autograd say for the same choices.

Choices are drawn at random, so that nearly every token's drifts from what its router would choose;
the independent computation is ``helpers/forced_routing.py``. Layouts and recomputation are compared
with the same, so that a choice that reaches another layer, token or microbatch shows.
"""

from pathlib import Path
from typing import Any

import pytest

from megarl.types import Sample
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
