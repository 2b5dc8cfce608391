"""FP8 on Megatron's own linears: the products, whole models, layouts, recomputation, resuming.

``tests/ops/test_fp8_emulation.py`` shows that operands are rounded as the recipes say; here is
which operands, along which dimension, and what follows.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.ops.fp8_emulation import blockwise, mxfp8, scaled, tensorwise
from tests.actor import compare
from tests.actor.test_state import assert_same_bits, go
from tests.conftest import make_tiny_model
from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

MULTIPLIERS = [5.0, 30.0, 1e7]  # of delayed scaling, as the worker sets them
WORK = "tests.actor.work_fp8_emulated"


@pytest.fixture(scope="module")
def blocks_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Halves of its matrices are whole blocks of 128. A dense layer and one of experts."""
    sizes = ("--layers", "2", "--hidden", "256", "--heads", "2", "--kv-heads", "2")
    sizes += ("--head-dim", "128", "--ffn", "256")
    experts = ("--experts", "4", "--moe-ffn", "256", "--dense-layers", "0")
    return make_tiny_model(tmp_path_factory.mktemp("blocks") / "model", *sizes, *experts)


def emulated(**fp8: Any) -> dict[str, Any]:
    """fp32, so that only FP8 rounds: what differs then is FP8's doing."""
    return {"dtype": "fp32", "fp8": {"backend": "emulated", **fp8}}


# --- one linear -----------------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    {"recipe": recipe, "format": format, **scales}
    for recipe, all_scales in {
        "blockwise": [{"scales": "f32"}, {"scales": "power_of_two"}],
        "tensorwise": [{}],
        "mxfp8": [{}],
        "delayed": [{}],
    }.items()
    for format in ("e4m3", "hybrid")
    for scales in all_scales
]


def operands(case: dict[str, Any], x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """What the six operands are by definition: ``x over t`` is of the product that sums over T."""
    gradient = {"e4m3": "e4m3", "hybrid": "e5m2"}[case["format"]]
    power_of_two = case.get("scales") == "power_of_two"
    if case["recipe"] == "blockwise":

        def rounded(t: Tensor, format: str, rows: int, columns: int) -> Tensor:
            block = (rows, columns)
            return blockwise(t, block=block, format=format, power_of_two=power_of_two)

        return {
            "x over k": rounded(x, "e4m3", 1, 128),
            "w over k": rounded(w, "e4m3", 128, 128),
            "dy over n": rounded(dy, gradient, 1, 128),
            "w over n": rounded(w, "e4m3", 128, 128),
            "dy over t": rounded(dy, gradient, 128, 1),
            "x over t": rounded(x, "e4m3", 128, 1),
        }
    if case["recipe"] == "mxfp8":
        return {
            "x over k": mxfp8(x, format="e4m3"),
            "w over k": mxfp8(w, format="e4m3"),
            "dy over n": mxfp8(dy, format=gradient),
            "w over n": mxfp8(w.t().contiguous(), format="e4m3").t(),
            "dy over t": mxfp8(dy.t().contiguous(), format=gradient).t(),
            "x over t": mxfp8(x.t().contiguous(), format="e4m3").t(),
        }
    formats = ("e4m3", "e4m3", gradient)
    if case["recipe"] == "delayed":
        given = map(torch.tensor, MULTIPLIERS)
        x, w, dy = (
            scaled(t, m, format=f) for t, m, f in zip((x, w, dy), given, formats, strict=True)
        )
    else:
        x, w, dy = (tensorwise(t, format=f) for t, f in zip((x, w, dy), formats, strict=True))
    both = {"x over k": x, "x over t": x, "w over k": w, "w over n": w}
    return {**both, "dy over n": dy, "dy over t": dy}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_linear_multiplies_what_the_recipe_says(
    pool: WorkerPool, blocks_model: Path, dtype: torch.dtype
) -> None:
    """All three products, to the accuracy of fp32 sums in another order, or one rounding to bf16;
    1, 130 and 256 tokens.
    """
    work = {"hf": blocks_model, "cases": CASES, "tokens": [1, 130, 256], "dtype": dtype}
    (found,) = pool.run(f"{WORK}:products", world=1, **work)
    tolerance = {torch.bfloat16: 2**-8, torch.float32: 1e-6}[dtype]
    for case, by_tokens in zip(CASES, found, strict=True):
        for got in by_tokens:
            expected = operands(case, got["x"], got["weight"], got["dy"])
            e = {name: t.double() for name, t in expected.items()}
            assert got["y"].dtype == got["dweight"].dtype == dtype
            for name, product in {
                "y": e["x over k"] @ e["w over k"].t(),
                "dx": e["dy over n"] @ e["w over n"],
                "dweight": e["dy over t"].t() @ e["x over t"],
            }.items():
                error = (got[name].double() - product).abs().max()
                assert error <= tolerance * product.abs().max(), (case, name, len(got["x"]))


def test_the_linear_test_sees_blocks_along_the_wrong_dimension(
    pool: WorkerPool, blocks_model: Path
) -> None:
    """Guards its tolerance: of a weight gradient with x in 1 x 128."""
    work = {"hf": blocks_model, "cases": CASES[:1], "tokens": [256], "dtype": torch.float32}
    (((got,),),) = pool.run(f"{WORK}:products", world=1, **work)
    right = operands(CASES[0], got["x"], got["weight"], got["dy"])
    wrong = right["dy over t"].double().t() @ right["x over k"].double()
    assert (got["dweight"].double() - wrong).abs().max() > 1e-4 * wrong.abs().max()


def test_frozen_empty_and_broken_inputs(pool: WorkerPool, blocks_model: Path) -> None:
    (found,) = pool.run(f"{WORK}:special_inputs", world=1, hf=blocks_model)
    weight_gradient, x_gradient = found["frozen"]
    assert weight_gradient is None and x_gradient.abs().max() > 0
    rows, gradient = found["nan rows"]
    assert rows.all(1).tolist() == [False, True, False] and not rows[::2].any()
    assert gradient.isnan().all()  # as without FP8, where NaN * 0 is NaN
    assert found["history"]
    shape, gradient, untouched = found["no token"]
    assert shape[0] == 0 and gradient is not None and not gradient.any() and untouched
    assert "decoder.layers.0.self_attention.linear_qkv.weight cannot" in found["weight"]
    assert "at [2, 7]" in found["weight"]


# --- whole models ---------------------------------------------------------------------------------


def passes(pool: WorkerPool, hf: Path, layout: dict[str, int], **arguments: Any) -> dict[str, Any]:
    world = compare.mesh_of(layout).world_size
    samples = random_samples(6, 4, seed=3)
    ranks = pool.run(
        f"{WORK}:passes", world=world, hf=hf, layout=layout, samples=samples, **arguments
    )
    return {
        "gradients": {n: t for r in ranks for n, t in r["gradients"].items()},
        "logprobs": torch.cat([t for r in ranks for t in r["logprobs"]]),
        "emulated": sorted({n for r in ranks for n in r["emulated"]}),
    }


def error(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest of a gradient, as a share of the tensor's largest entry."""
    assert found["gradients"].keys() == expected["gradients"].keys()
    return max(
        float((found["gradients"][n] - g).abs().max() / g.abs().max())
        for n, g in expected["gradients"].items()
    )


def test_a_model_has_the_gradients_of_rounding_composed_by_hand(
    pool: WorkerPool, blocks_model: Path
) -> None:
    """Attention, a dense layer and experts: forward and backward, in plain autograd."""
    run = {"pool": pool, "hf": blocks_model, "layout": {}, "precision": emulated()}
    found, by_hand = passes(**run), passes(**run, by_hand=True)
    plain = passes(pool, blocks_model, {}, precision={"dtype": "fp32"})
    assert torch.allclose(found["logprobs"], by_hand["logprobs"], rtol=0, atol=1e-5)
    assert error(found, by_hand) < 1e-5
    assert error(plain, by_hand) > 1e-2  # FP8 is seen


def test_what_is_emulated(pool: WorkerPool, blocks_model: Path) -> None:
    """Attention projections, dense matrices and every expert's; the layers of
    ``first_layers_bf16`` are what they are without FP8.
    """
    attention = ["self_attention.linear_proj", "self_attention.linear_qkv"]
    dense = [*attention, "mlp.linear_fc1", "mlp.linear_fc2"]
    one_by_one = [f"mlp.experts.local_experts.{e}.linear_fc{k}" for e in range(4) for k in (1, 2)]
    first = {f"decoder.layers.0.{name}" for name in dense}
    second = {f"decoder.layers.1.{name}" for name in (*attention, *one_by_one)}
    found = {
        (start, end): passes(
            pool,
            blocks_model,
            {},
            precision=emulated(first_layers_bf16=start, last_layers_bf16=end),
        )
        for start, end in ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0))
    }
    assert set(found[0, 0]["emulated"]) == first | second
    assert set(found[1, 0]["emulated"]) == second
    assert set(found[0, 1]["emulated"]) == first
    plain = passes(pool, blocks_model, {}, precision={"dtype": "fp32"})
    for none in (found[1, 1], found[2, 0]):
        assert none["emulated"] == []
        assert torch.equal(none["logprobs"], plain["logprobs"])
        assert_same_bits(none["gradients"], plain["gradients"])


# --- layouts --------------------------------------------------------------------------------------

# Sums in another order, 1e-7 of each, round to another code where they come near the middle between
# two; with f32 scales such a sum is also in the scale of its block. FP8's own effect is ten times
# what is allowed, see the guard below.
LAYOUTS = [{"tp": 2}, {"tp": 2, "ep": 2, "etp": 1}, {"pp": 2}]
TOLERANCE = {"f32": 3e-2, "power_of_two": 2e-3}


@pytest.fixture(scope="module")
def single(pool: WorkerPool, blocks_model: Path) -> dict[str, dict[str, Any]]:
    return {
        scales: passes(pool, blocks_model, {}, precision=emulated(scales=scales))
        for scales in TOLERANCE
    }


@pytest.mark.parametrize("scales", ["f32", pytest.param("power_of_two", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_split_models_agree_with_one_process(
    pool: WorkerPool,
    blocks_model: Path,
    single: dict[str, dict[str, Any]],
    layout: dict[str, int],
    scales: str,
) -> None:
    found = passes(pool, blocks_model, layout, precision=emulated(scales=scales))
    assert found["emulated"] == single[scales]["emulated"]
    assert error(found, single[scales]) < TOLERANCE[scales]
    gap = (found["logprobs"] - single[scales]["logprobs"]).abs()
    assert gap.max() < TOLERANCE[scales]


def test_the_layout_tests_see_a_matrix_left_out(
    pool: WorkerPool, blocks_model: Path, single: dict[str, dict[str, Any]]
) -> None:
    fewer = passes(pool, blocks_model, {}, precision=emulated(last_layers_bf16=1))
    assert error(fewer, single["f32"]) > 2 * TOLERANCE["f32"]


def test_experts_on_other_ranks_see_the_same_numbers(pool: WorkerPool, blocks_model: Path) -> None:
    """Against the same rows without expert parallelism. An expert then has the tokens of both ranks
    in one matrix, of which dW's blocks of 128 tokens are other ones: log-probs agree, gradients to
    FP8's own error.
    """
    apart, together = (
        passes(pool, blocks_model, {"dp": 2, "ep": ep}, precision=emulated()) for ep in (1, 2)
    )
    plain = passes(pool, blocks_model, {"dp": 2}, precision={"dtype": "fp32"})
    assert torch.allclose(apart["logprobs"], together["logprobs"], rtol=0, atol=1e-5)
    assert error(together, apart) < min(error(apart, plain), 0.1)


# --- over steps -----------------------------------------------------------------------------------

DELAYED = {"recipe": "delayed", "format": "hybrid", "amax_history": 3}
# Weights stay, so that only scales move, and nothing is clipped, where small gaps decide much.
CALM = {
    "optim": {"lr": 1e-6, "distributed": False},
    "algo": {"policy": {"name": "reinforce"}, "minibatches": 1},
}


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


@pytest.mark.parametrize("fp8", [{}, DELAYED], ids=["blockwise", "delayed"])
def test_recomputed_layers_have_the_same_bits(
    pool: WorkerPool, blocks_model: Path, fp8: dict[str, Any]
) -> None:
    run = {"precision": {**emulated(**fp8), "dtype": "bf16"}, "train": {"row_tokens": 48}}
    full = {"granularity": "full", "method": "uniform", "num_layers": 1}
    parts = {"granularity": "selective", "modules": ["moe"]}
    kept, *recomputed = (
        steps(pool, blocks_model, {}, until=2, **run, recompute=recompute)[0]
        for recompute in ({}, full, parts)
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
