"""What routers do, as metrics, and what moves them: against transformers' routers one sample at a
time, closed forms, and in every layout.
"""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.types import Sample
from tests.actor import compare
from tests.helpers.dist import WorkerPool
from tests.helpers.families import save_model
from tests.helpers.routers import Routed, expected_metrics, routed
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

SAMPLES = random_samples(3, 4, seed=21)
RATE = 0.25
SETTINGS = {
    "train": {"row_tokens": 48},
    "moe": {"router_bias_update_rate": RATE},
}
LAYOUTS = [{"dp": 2, "ep": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2, "vpp": 2}]
FOUR_RANKS = [
    {"tp": 2, "ep": 2, "etp": 1},
    {"tp": 2, "dp": 2, "ep": 2},
    {"cp": 2, "dp": 2, "ep": 4},
    {"tp": 2, "cp": 2},
    {"tp": 2, "pp": 2},
    {"pp": 2, "dp": 2, "ep": 2},
]
SLOW = [pytest.param(layout, marks=pytest.mark.slow) for layout in FOUR_RANKS]
BIAS = "decoder.layers.{}.mlp.router.expert_bias"
RECOMPUTE: dict[str, dict[str, Any]] = {
    "moe": {"granularity": "selective", "modules": ["moe"]},
    "attention": {"granularity": "selective"},
    "every layer": {"granularity": "full"},
    "some layers": {"granularity": "full", "method": "block", "num_layers": 2},
}


@pytest.fixture(scope="module")
def sigmoid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers 1 to 3 have experts, chosen in groups and with a bias; one behind the last too."""
    return save_model("deepseek_v3", tmp_path_factory.mktemp("sigmoid") / "model")


@pytest.fixture(scope="module")
def softmax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 1 has no experts."""
    return save_model("qwen3_moe tied", tmp_path_factory.mktemp("softmax") / "model")


@pytest.fixture(scope="module")
def reference(sigmoid: Path) -> dict[int, Routed]:
    return routed(sigmoid, SAMPLES)


def steps(pool: WorkerPool, layout: dict[str, int], **cases: dict[str, Any]) -> dict[str, Any]:
    """By case: metrics of all ranks together, gradients, and the routers of every rank."""
    given = {name: {"samples": SAMPLES, **case} for name, case in cases.items()}
    world = compare.mesh_of(layout).world_size
    results = pool.run("tests.actor.work_routers:steps", world=world, layout=layout, cases=given)
    found = {}
    for name in cases:
        ranks = [result[name] for result in results]
        one = compare.merged(ranks)
        metrics = {k: v for k, v in one["metrics"][0].items() if v is not None}
        routers = [rank["routers"] for rank in ranks]
        found[name] = {"metrics": metrics, "gradients": one["gradients"], "routers": routers}
    return found


def of_model(hf: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    merged = {name: {**SETTINGS.get(name, {}), **values} for name, values in sections.items()}
    return {"hf": hf, "sections": {**SETTINGS, **merged}}


def biases(routers: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """After the step; all ranks that hold a layer have the same bits."""
    found: dict[str, torch.Tensor] = {}
    for rank in routers:
        for name, tensor in rank["after"].items():
            if name.endswith("expert_bias"):
                assert torch.equal(found.setdefault(name, tensor.clone()), tensor), name
    return found


def moved(reference: dict[int, Routed], routers: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Where the loads of transformers' routers move the biases."""
    start = {name: t for rank in routers for name, t in rank["before"].items()}
    return {
        BIAS.format(layer): start[BIAS.format(layer)]
        + RATE * torch.sign(of.loads.double().mean() - of.loads).float()
        for layer, of in reference.items()
    }


@pytest.mark.parametrize("layout", [{}, *LAYOUTS, *SLOW], ids=str)
def test_metrics_and_biases_follow_from_transformers_routers(
    pool: WorkerPool, sigmoid: Path, reference: dict[int, Routed], layout: dict[str, int]
) -> None:
    found = steps(pool, layout, step=of_model(sigmoid))["step"]
    expected = expected_metrics(reference, topk=4, sigmoid=True)
    assert found["metrics"] == pytest.approx(expected, rel=1e-5, abs=1e-12)
    assert found["metrics"]["moe/load_max_violation"] > 0.1
    after, wanted = biases(found["routers"]), moved(reference, found["routers"])
    assert len(wanted) == 3 and set(after) >= set(wanted)
    assert all(torch.equal(after[name], bias) for name, bias in wanted.items())


@pytest.mark.parametrize("layout", [{}, pytest.param({"tp": 2}, marks=pytest.mark.slow)], ids=str)
def test_the_entropy_of_a_softmax_router_is_that_of_its_probabilities(
    pool: WorkerPool, softmax: Path, layout: dict[str, int]
) -> None:
    settings = {"train": SETTINGS["train"], "monitor": {"moe_layers": True}}
    found = steps(pool, layout, step={"hf": softmax, "sections": settings})["step"]["metrics"]
    layers = routed(softmax, SAMPLES)
    expected = expected_metrics(layers, topk=2, sigmoid=False)
    for layer, of in layers.items():
        alone = expected_metrics({layer: of}, topk=2, sigmoid=False)
        for name in ("load_max_violation", "router_entropy"):
            expected[f"moe/layer_{layer:03d}/{name}"] = alone[f"moe/{name}"]
    assert sorted(layers) == [0, 2, 3]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-12)


def test_passes_without_gradients_and_passes_again_do_not_count(
    pool: WorkerPool, sigmoid: Path
) -> None:
    """Loads and biases exactly; sums of entropies are in one order, so they are equal as well."""
    whole = of_model(sigmoid)
    cases = {name: of_model(sigmoid, recompute=how) for name, how in RECOMPUTE.items()}
    cases |= {"thrice": {**whole, "passes": 2}, "after a step not taken": {**whole, "skipped": 1}}
    found = steps(pool, {}, once=whole, **cases)
    once = found.pop("once")
    assert len(found) == 2 + len(RECOMPUTE)
    for name, other in found.items():
        assert other["metrics"] == once["metrics"], name
        one, two = biases(once["routers"]), biases(other["routers"])
        assert all(torch.equal(two[k], bias) for k, bias in one.items()), name


LOSSES = {"aux_loss_coeff": 0.5, "z_loss_coeff": 0.125, "router_bias_update_rate": RATE}


@pytest.mark.parametrize("layout", [{}, pytest.param({"tp": 2}, marks=pytest.mark.slow)], ids=str)
def test_padding_changes_nothing(
    pool: WorkerPool, sigmoid: Path, reference: dict[int, Routed], layout: dict[str, int]
) -> None:
    """Neither losses, whose gradients are in all tensors, nor loads, nor biases. All samples lie in
    one row.
    """
    whole = of_model(sigmoid, moe=LOSSES, train={"row_tokens": 400})
    pads = (2, 6, 22)
    found = steps(pool, layout, none=whole, **{str(n): {**whole, "pad": n} for n in pads})
    none = found.pop("none")
    losses = [balance(of.logits.sigmoid(), 4) for of in reference.values()]
    assert none["metrics"]["moe/aux_loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)
    for pad, other in found.items():
        assert other["metrics"] == pytest.approx(none["metrics"], rel=1e-6, abs=1e-12), pad
        one, two = biases(none["routers"]), biases(other["routers"])
        assert all(torch.equal(two[name], bias) for name, bias in one.items()), pad
        for name, g in none["gradients"].items():
            # products of longer matrices may add in another order
            assert (other["gradients"][name] - g).abs().max() <= 2e-5 * g.abs().max(), (pad, name)


def balance(scores: torch.Tensor, topk: int) -> float:
    """docs/routers.md: the choice that counts is by ``scores`` [n, E] alone."""
    n, experts = scores.shape
    chosen = torch.bincount(scores.topk(topk).indices.flatten(), minlength=experts)
    p = (scores / scores.sum(1, keepdim=True)).mean(0)
    return float(experts * (chosen / (n * topk) * p).sum())


@pytest.fixture(scope="module")
def even(sigmoid: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Routers of zeros, and biases that decide alone: experts 2 and 3 of group 1, 6 and 7 of 3."""
    folder = tmp_path_factory.mktemp("even") / "model"
    shutil.copytree(sigmoid, folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("mlp.gate.weight"):
            tensor.zero_()
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.tensor([0.0, 0.1, 0.9, 0.8, 0.1, 0.0, 0.7, 0.6]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("layout", [{}, {"dp": 2, "ep": 2}], ids=str)
def test_routers_that_send_all_to_the_same_experts_have_a_closed_form(
    pool: WorkerPool, even: Path, layout: dict[str, int]
) -> None:
    """Half of the experts have all of the load, twice the mean, and the biases go by ``RATE``. With
    a capacity of half the mean load a quarter of their tokens stays.
    """
    one = [s for s in SAMPLES if len(s.tokens) % 8 == 0][:1]
    assert one
    full = {**of_model(even, train={"row_tokens": len(one[0].tokens)}), "samples": one}
    found = steps(pool, layout, all=of_model(even), capacity={**full, "capacity": 0.5})
    assert found["all"]["metrics"] == pytest.approx(
        {
            "moe/load_max_violation": 1.0,
            "moe/load_max_violation_worst": 1.0,
            "moe/load_min_share": 0.0,
            "moe/load_min_share_worst": 0.0,
            "moe/idle_experts": 0.5,
            "moe/dropped": 0.0,
            "moe/router_entropy": math.log(8),
            "moe/router_z": math.log(8) ** 2,
        },
        rel=1e-6,
    )
    for layer in (1, 2, 3):
        bias = torch.tensor([0.25, 0.35, 0.65, 0.55, 0.35, 0.25, 0.45, 0.35])
        assert torch.allclose(biases(found["all"]["routers"])[BIAS.format(layer)], bias, atol=1e-6)
    # 4 n choices of 8 experts are a mean load of n / 2, of which four experts keep half
    assert found["capacity"]["metrics"]["moe/dropped"] == 0.75


@pytest.mark.parametrize(
    "layout",
    [{}, {"dp": 2, "ep": 2}, *(pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS[1:])],
    ids=str,
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_replayed_choice_is_load_and_does_not_move_the_bias(
    pool: WorkerPool, even: Path, layout: dict[str, int], recompute: str
) -> None:
    """All tokens but each sample's last are sent to the experts that the routers would leave idle;
    these last ones alone move the biases, as if all tokens had gone where they did.
    """
    rng = np.random.default_rng(0)
    routings = [
        np.stack([rng.permuted([[0, 1, 4, 5]] * 3, axis=1) for _ in s.tokens[1:]]).astype(np.uint8)
        for s in SAMPLES
    ]
    samples = [replace(s, routing=r) for s, r in zip(SAMPLES, routings, strict=True)]
    given = of_model(even, moe={"routing_replay": "rollout"}, recompute={"granularity": recompute})
    found = steps(pool, layout, step={**given, "samples": samples})["step"]
    last = len(SAMPLES)
    others = sum(len(s.tokens) for s in SAMPLES) - last
    mean = (last + others) / 2
    expected = {"load_max_violation": others / mean - 1, "load_min_share": last / mean}
    for name, value in expected.items():
        assert found["metrics"][f"moe/{name}"] == pytest.approx(value)
        assert found["metrics"][f"moe/{name}_worst"] == pytest.approx(value)
    assert found["metrics"]["moe/replay_changed"] == 1.0
    bias = torch.tensor([0.25, 0.35, 0.65, 0.55, 0.35, 0.25, 0.45, 0.35])
    for layer in (1, 2, 3):
        assert torch.allclose(biases(found["routers"])[BIAS.format(layer)], bias, atol=1e-6)


FROZEN = {
    "routers": (["*.mlp.gate.weight"], {1, 2, 3}, {1, 2, 3}),
    "one router": (["model.layers.2.mlp.gate.weight"], {2}, {2}),
    "biases": (["*.e_score_correction_bias"], set(), {1, 2, 3}),
    "biases by Megatron's names": (["decoder.layers.[13].*.expert_bias"], set(), {1, 3}),
    "both of one": (["*.layers.3.mlp.gate.*"], {3}, {3}),
}


@pytest.mark.parametrize(
    "layout", [{}, {"pp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.slow)], ids=str
)
def test_frozen_routers_and_biases_stay(
    pool: WorkerPool, sigmoid: Path, layout: dict[str, int]
) -> None:
    """To the last bit, though losses, weight decay and loads would move them; the rest moves."""
    given = {"moe": LOSSES, "optim": {"lr": 1e-3, "weight_decay": 0.5, "distributed": False}}
    cases = {
        name: of_model(sigmoid, **given, train={"frozen": patterns})
        for name, (patterns, _, _) in FROZEN.items()
    }
    for name, found in steps(pool, layout, **cases).items():
        _, weights, held = FROZEN[name]
        expected = {f"decoder.layers.{k}.mlp.router.weight" for k in weights}
        expected |= {BIAS.format(k) for k in held}
        stayed = {
            tensor
            for rank in found["routers"]
            for tensor, before in rank["before"].items()
            if torch.equal(before, rank["after"][tensor]) and tensor.startswith("decoder")
        }
        assert stayed == expected, name
        assert found["metrics"]["moe/aux_loss"] > 1


def test_a_router_with_biases_of_its_own_stays_as_a_whole(pool: WorkerPool, tmp_path: Path) -> None:
    hf = save_model("gpt_oss", tmp_path / "model")
    optim = {"lr": 1e-3, "weight_decay": 0.5, "distributed": False}
    patterns = {"all": ["*.mlp.router.*"], "one": ["model.layers.1.mlp.router.*"], "none": []}
    cases = {
        name: {"hf": hf, "sections": {"optim": optim, "train": {"frozen": frozen}}}
        for name, frozen in patterns.items()
    }
    stayed = {}
    for name, found in steps(pool, {}, **cases).items():
        (rank,) = found["routers"]
        equal = {k for k, before in rank["before"].items() if torch.equal(before, rank["after"][k])}
        stayed[name] = (len(equal), len(rank["before"]))
    assert stayed == {"all": (8, 8), "one": (2, 8), "none": (0, 8)}


def test_a_stage_without_experts_has_no_metrics_and_waits_for_none(
    pool: WorkerPool, sigmoid: Path, reference: dict[int, Routed]
) -> None:
    """The first stage holds the dense layer alone."""
    layout = {"pp": 2, "first_layers": 1}
    found = steps(pool, layout, step=of_model(sigmoid))["step"]["metrics"]
    expected = expected_metrics(reference, topk=4, sigmoid=True)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-12)


def one_token_batches() -> dict[str, list[Sample]]:
    """Of two tokens, the least that has one to train; of one such; of one long and one short."""
    long = max(SAMPLES, key=lambda s: len(s.tokens))

    def cut(sample: Sample, n: int) -> Sample:
        return replace(
            sample,
            tokens=sample.tokens[:n],
            mask=torch.arange(n).ge(1).numpy(),
            rollout_logprobs=sample.rollout_logprobs[:n],
        )

    return {
        "two tokens": [cut(long, 2)],
        "two of two": [cut(s, 2) for s in SAMPLES[:2]],
        "long and short": [long, cut(long, 2)],
    }


@pytest.mark.parametrize(
    "layout",
    [{"dp": 2, "ep": 2}, pytest.param({"tp": 2, "ep": 2, "etp": 1}, marks=pytest.mark.slow)],
    ids=str,
)
def test_batches_of_a_token_or_two_run_where_experts_and_ranks_get_none(
    pool: WorkerPool, even: Path, layout: dict[str, int]
) -> None:
    algo = {"policy": {"name": "reinforce"}, "advantage": {"name": "grpo", "singleton": "raw"}}
    cases = {
        name: {**of_model(even, algo={**algo, "minibatches": 1}, moe=LOSSES), "samples": batch}
        for name, batch in one_token_batches().items()
    }
    one, two = steps(pool, {}, **cases), steps(pool, layout, **cases)
    for name, found in two.items():
        assert found["metrics"]["moe/idle_experts"] == 0.5
        same = {k: v for k, v in found["metrics"].items() if k != "moe/aux_loss"}
        expected = {k: v for k, v in one[name]["metrics"].items() if k != "moe/aux_loss"}
        assert same == pytest.approx(expected, rel=1e-6)
        for tensor, g in found["gradients"].items():
            assert torch.isfinite(g).all(), (name, tensor)
        idle = [g for t, g in found["gradients"].items() if ".experts.0." in t]
        assert idle and all((g == 0).all() for g in idle), name
