"""The experts' bias moves by the loads of the tokens that were trained on, and by nothing else.

Loads are counted by transformers, one sample at a time; the bias has the same bits in every layout,
however rows are packed and padded.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.types import Sample
from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool
from tests.helpers.families import save_model
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

RATE = 0.25  # as in work_expert_bias.py; larger than the biases' own differences
BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"
FIRST, SECOND = random_samples(4, 3, seed=11), random_samples(3, 4, seed=12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers 1 to 3 have experts; a layer behind the last has some that no token reaches."""
    return save_model("deepseek_v3", tmp_path_factory.mktemp("bias") / "model")


def given(model: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(model / "model.safetensors")
    return {n: t for n, t in tensors.items() if n.endswith("e_score_correction_bias")}


def loads(model: Path, samples: list[Sample]) -> dict[str, torch.Tensor]:
    """i64 [E]: tokens each expert gets of ``samples``, every token of them, by transformers."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found: dict[str, torch.Tensor] = {}

    def count(name: str) -> Any:
        def hook(module: Any, arguments: tuple[Any, ...]) -> None:
            chosen = arguments[1]  # [T, K]
            tokens = torch.bincount(chosen.flatten(), minlength=8)
            found[name] = found.get(name, torch.zeros(8, dtype=torch.int64)) + tokens

        return hook

    for layer in (1, 2, 3):
        experts = reference.model.layers[layer].mlp.experts
        experts.register_forward_pre_hook(count(BIAS.format(layer)))
    with torch.no_grad():
        for sample in samples:
            reference(torch.from_numpy(sample.tokens).long()[None])
    return found


def biases(pool: WorkerPool, hf: Path, layout: dict[str, int], **options: Any) -> dict[str, Any]:
    ranks = pool.run(
        "tests.actor.work_expert_bias:biases",
        world=mesh_of(layout).world_size,
        **{"hf": hf, "layout": layout, "steps": [FIRST], **options},
    )
    return {name: tensor for found in ranks for name, tensor in found.items()}


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, torch.Tensor]:
    """After one step on ``FIRST``."""
    counts = loads(model, FIRST)
    assert set(counts) == {BIAS.format(layer) for layer in (1, 2, 3)}
    moved = given(model)
    for name, tokens in counts.items():
        assert tokens.sum() == 4 * sum(len(s.tokens) for s in FIRST)  # 4 experts a token
        moved[name] = moved[name] + RATE * torch.sign(tokens.double().mean() - tokens).float()
    return moved


LAYOUTS = [
    {},
    {"dp": 2},
    {"tp": 2},
    {"cp": 2},
    {"dp": 2, "ep": 2},
    {"pp": 2, "vpp": 2},
    *(
        pytest.param(layout, marks=pytest.mark.slow)
        for layout in [
            {"tp": 2, "ep": 2, "etp": 1},
            {"pp": 2, "first_layers": 1},
            {"cp": 2, "dp": 2, "ep": 2},
            {"tp": 2, "dp": 2, "ep": 2},
            {"tp": 2, "pp": 2},
        ]
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_moves_towards_experts_with_less_than_the_mean(
    pool: WorkerPool, model: Path, expected: dict[str, torch.Tensor], layout: dict[str, int]
) -> None:
    found = biases(pool, model, layout)
    assert found.keys() == expected.keys()
    for name, bias in expected.items():
        assert bias.dtype == found[name].dtype == torch.float32
        assert torch.equal(found[name], bias), name
    assert not torch.equal(found[BIAS.format(2)], given(model)[BIAS.format(2)])


@pytest.mark.parametrize("row_tokens", [24, 31, 64, 400])
def test_padding_and_packing_do_not_count(
    pool: WorkerPool, model: Path, expected: dict[str, torch.Tensor], row_tokens: int
) -> None:
    found = biases(pool, model, {"cp": 2}, train={"row_tokens": 4 * (row_tokens // 4)})
    assert all(torch.equal(found[name], bias) for name, bias in expected.items())


@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"dp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("option", ["frozen", "skip"])
def test_a_frozen_router_and_a_step_not_taken_keep_it(
    pool: WorkerPool, model: Path, layout: dict[str, int], option: str
) -> None:
    found = biases(pool, model, layout, **{option: True})
    assert all(torch.equal(found[name], bias) for name, bias in given(model).items())


def test_every_step_counts_its_own_tokens(pool: WorkerPool, model: Path) -> None:
    """The same twice in one layout; and a second step's move is a whole one for every expert that
    is not at the mean, from where the first left it.
    """
    one = biases(pool, model, {})
    two = [biases(pool, model, layout, steps=[FIRST, SECOND]) for layout in ({}, {"dp": 2})]
    for name, bias in one.items():
        assert torch.equal(two[0][name], two[1][name])
        if "layers.4" not in name:
            move = (two[0][name].double() - bias.double()) / RATE
            assert set(move.round(decimals=4).tolist()) <= {-1.0, 0.0, 1.0}
            assert move.abs().sum() >= 2


@pytest.mark.parametrize("layout", [{}, pytest.param({"dp": 2}, marks=pytest.mark.slow)], ids=str)
def test_a_step_that_was_not_taken_counts_for_none_after_it(
    pool: WorkerPool, model: Path, layout: dict[str, int]
) -> None:
    """Many tokens in it, few in the next."""
    many, few = loads(model, FIRST), loads(model, SECOND[:1])
    found = biases(pool, model, layout, steps=[FIRST, SECOND[:1]], skip_first=True)

    def moves(tokens: torch.Tensor) -> torch.Tensor:
        return torch.sign(tokens.sum() - 8 * tokens).float()

    for name, tokens in few.items():
        assert torch.equal(found[name], given(model)[name] + RATE * moves(tokens))
    assert any(not torch.equal(moves(few[n]), moves(few[n] + many[n])) for n in few)


def test_bf16_keeps_the_bias_in_fp32(pool: WorkerPool, model: Path) -> None:
    found = biases(pool, model, {}, precision={"dtype": "bf16"})
    start = given(model)
    for name, bias in found.items():
        assert bias.dtype == torch.float32
        moves = (bias.double() - start[name].double()) / RATE
        assert set(moves.round(decimals=4).tolist()) <= {-1.0, 0.0, 1.0}, name
