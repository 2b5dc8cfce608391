"""FP8 on Megatron's own linears: the products, whole models, layouts (steps: test_fp8_steps.py).

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
from tests.actor.compare import emulated
from tests.actor.test_state import assert_same_bits
from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

MULTIPLIERS = [5.0, 30.0, 1e7]  # of delayed scaling, as the worker sets them
WORK = "tests.actor.work_fp8_emulated"


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
