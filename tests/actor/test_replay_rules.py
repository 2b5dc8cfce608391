"""Every router gets the choices of its own layer, token and microbatch, as often as it must."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.types import Mean, Sample
from tests.actor.compare import mesh_of
from tests.actor.test_expert_bias import BIAS, RATE, given
from tests.actor.test_families import LOGPROB_TOL, logprob_difference
from tests.actor.test_replay import R2, R3, RECOMPUTE, changed, evaluate
from tests.helpers.dist import WorkerPool
from tests.helpers.families import reference_logprobs, save_model
from tests.helpers.forced_routing import (
    forced_choices,
    forced_logprobs,
    shape_of,
    with_random_routing,
)
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

SAMPLES = random_samples(3, 3, seed=3)
MOE_LAYERS = [1, 2, 4, 5]  # of six
STRIDE, EXPERTS = 70, 280


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers 1 to 3 have experts, 4 of 8 for a token."""
    return save_model("deepseek_v3", tmp_path_factory.mktemp("rules") / "model")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense, two of experts, dense, two of experts; more experts than a byte counts."""
    return save_model(
        "qwen3_moe tied",
        tmp_path_factory.mktemp("mixed") / "model",
        **{"num_hidden_layers": 6, "mlp_only_layers": [0, 3], "num_experts": EXPERTS},
        moe_intermediate_size=4,
    )


@pytest.fixture(scope="module")
def random(deepseek: Path) -> list[Sample]:
    return with_random_routing(SAMPLES, shape_of(deepseek))


@pytest.mark.parametrize("recompute", ["full", pytest.param("none", marks=pytest.mark.slow)])
def test_routing_of_another_layer_token_or_microbatch_changes_the_gradients(
    pool: WorkerPool, deepseek: Path, random: list[Sample], recompute: str
) -> None:
    sections = {**R3, "recompute": RECOMPUTE[recompute]}
    (moved,) = pool.run(
        "tests.actor.work_replay:permuted",
        world=1,
        **{"hf": deepseek, "samples": random, "sections": sections},
    )
    assert moved.keys() == {"by_layer", "by_token", "by_microbatch"}
    assert all(m > 0.1 for m in moved.values()), moved  # layouts agree to 2e-5


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        ({"pp": 2, "first_layers": 2}, "none"),
        ({"pp": 2, "vpp": 3}, "full"),
        *(
            pytest.param(layout, how, marks=pytest.mark.slow)
            for layout in [{}, {"pp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2, "last_layers": 1}]
            for how in ("none", "moe", "full")
        ),
    ],
    ids=str,
)
def test_every_router_gets_its_own_layers_rows(
    pool: WorkerPool, mixed: Path, layout: dict[str, int], recompute: str
) -> None:
    """Token t of a sample goes to the experts 70 m + t and 70 m + 35 + t in the m-th layer that
    has experts; which layer of the model that is, is written down here.
    """
    samples = []
    for s in SAMPLES[:6]:
        first = np.arange(s.length - 1)[:, None] + STRIDE * np.arange(len(MOE_LAYERS))
        routing = np.stack([first, first + STRIDE // 2], -1).astype(np.uint16)
        samples.append(replace(s, routing=routing))
    sections = {**R3, "recompute": RECOMPUTE[recompute]}
    ranks = pool.run(
        "tests.actor.work_replay:seen_by_routers",
        world=mesh_of(layout).world_size,
        timeout_s=300,
        **{"hf": mixed, "layout": layout, "samples": samples, "sections": sections},
    )
    seen: dict[tuple[int, str, int, int], int] = {}
    for layer, phase, _, tokens in (call for rank in ranks for call in rank):
        first = STRIDE * MOE_LAYERS.index(layer)
        for sample, token, experts in tokens:
            assert experts == [first + token, first + STRIDE // 2 + token], (layer, phase, sample)
            key = layer, phase, sample, token
            seen[key] = seen.get(key, 0) + 1
    phases = {"forward"} | ({"recompute"} if recompute != "none" else set())
    tokens = [(i, t) for i, s in enumerate(samples) for t in range(s.length - 1)]
    assert seen == {(m, p, *at): 1 for m in MOE_LAYERS for p in phases for at in tokens}


@pytest.mark.parametrize(
    "layout", [{}, pytest.param({"pp": 2, "vpp": 3}, marks=pytest.mark.slow)], ids=str
)
def test_more_experts_than_a_byte_counts_are_recorded_as_they_are(
    pool: WorkerPool, mixed: Path, layout: dict[str, int]
) -> None:
    """Of chunks with one or two layers of experts."""
    samples = SAMPLES[:3]
    given = {"models": {"mixed": mixed}, "samples": {"mixed": samples}, "layout": layout}
    own, again = (evaluate(pool, sections=how, **given)["mixed"] for how in ({}, R2))
    assert all(torch.equal(again["gradients"][n], g) for n, g in own["gradients"].items())
    tokens = sum(s.length for s in samples)
    assert changed(again) == Mean(0, tokens * len(MOE_LAYERS))


def test_choices_that_are_left_over_or_taken_twice_end_the_run(
    pool: WorkerPool, deepseek: Path, random: list[Sample]
) -> None:
    (found,) = pool.run("tests.actor.work_replay:misused", world=1, hf=deepseek, samples=random)
    said = "RunError: routing replay:"
    of = f"{said} choices of layers"
    left = "are left over: nothing was recomputed"
    outside = "were asked for outside of the row's passes"
    assert found == {
        "a layer is left out": f"{of} [3] for microbatch 2 were not asked for in the forward pass",
        "a layer twice": f"{of} [2] for microbatch 2 were asked for twice in one forward pass",
        "a microbatch again": f"{said} microbatch 2 runs a second time in chunk 0",
        "no backward pass": f"{of} [1, 2, 3] for microbatch 3 {left}",
        "recomputed twice": f"{of} [1] for microbatch 2 {outside}",
        "outside": f"{of} [1] for no microbatch {outside}",
        "as it must be": "nothing",
        "nothing to recompute": "nothing",
    }


def test_routing_that_is_no_choice_of_the_routers_is_refused_with_the_numbers(
    pool: WorkerPool, deepseek: Path, random: list[Sample]
) -> None:
    (found,) = pool.run("tests.actor.work_replay:doctored", world=1, hf=deepseek, samples=random)
    position, length = found.pop("position"), int(found.pop("length"))
    assert all(text.startswith("DataError: microbatch 1: ") for text in found.values()), found
    assert "no routing, which moe.routing_replay=rollout replays" in found["none"]
    shapes = {
        "a token less": (length - 1, 3, 4),
        "a layer less": (length, 2, 4),
        "a layer more": (length, 4, 4),
        "an expert less": (length, 3, 3),
    }
    for name, shape in shapes.items():
        assert f"{shape}; accepted: {(length, 3, 4)}" in found[name], found[name]
    for name, layer in (("too large", 2), ("twice", 0)):
        assert f"position {position}, MoE layer {layer} of the stage" in found[name], found[name]
        assert "4 different ones from 0 to 7" in found[name]


def test_a_reference_policy_chooses_for_itself(
    pool: WorkerPool, deepseek: Path, random: list[Sample]
) -> None:
    (found,) = pool.run(
        "tests.actor.work_replay:with_a_reference", world=1, hf=deepseek, samples=random
    )
    forced, live = forced_logprobs(deepseek, random), reference_logprobs(deepseek, random)
    assert logprob_difference(found["old"], forced) < LOGPROB_TOL
    assert logprob_difference(found["reference"], live) < LOGPROB_TOL
    assert logprob_difference(found["old"], live) > 0.1


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        ({}, "full"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [({}, "none"), ({"dp": 2, "ep": 2}, "full"), ({"tp": 2}, "moe")]
        ),
    ],
    ids=str,
)
def test_an_expert_bias_moves_only_by_what_the_router_chose(
    pool: WorkerPool, deepseek: Path, random: list[Sample], layout: dict[str, int], recompute: str
) -> None:
    """In R2 every choice is another pass's; in R3 the last tokens' are the router's own. Two passes
    for log-probs come before the step, and count for nothing either.
    """
    counts = {m: torch.zeros(8, dtype=torch.int64) for m in (1, 2, 3)}
    for choices in forced_choices(deepseek, random):
        for m, chosen in enumerate(choices[-1], 1):
            counts[m] += torch.bincount(torch.from_numpy(chosen), minlength=8)
    before = given(deepseek)
    by_last = dict(before)
    for m, tokens in counts.items():
        move = RATE * torch.sign(tokens.sum() - 8 * tokens).float()
        by_last[BIAS.format(m)] = by_last[BIAS.format(m)] + move
    for how, expected in ((R2, before), (R3, by_last)):
        ranks = pool.run(
            "tests.actor.work_expert_bias:biases",
            world=mesh_of(layout).world_size,
            **{"hf": deepseek, "layout": layout, "steps": [random]},
            **{**how, "recompute": RECOMPUTE[recompute]},
        )
        found: dict[str, Any] = {name: tensor for rank in ranks for name, tensor in rank.items()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[n], bias) for n, bias in expected.items()), how
