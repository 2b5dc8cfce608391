"""The critic's loss: values, gradients by finite differences, clipping and masks."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.algos.value import value_loss
from megarl.config.algo import ValueSection
from megarl.types import Mean, Sum

STEP = 1e-6
OLD = [0.0, 0.5, -1.0, 2.0, 0.25, 0.1, 1.0, -0.3]
VALUES = [0.1, 1.2, -1.9, 2.15, -0.4, 0.1, 0.7, 0.3]
RETURNS = [1.0, 0.0, -3.0, 2.5, 1.0, 0.1, 1.5, -1.0]
WEIGHT = [0.125, 0.25, 0.5, 1.0, 0.0625, 0.3, 0.2, 0.7]
MASK = [1, 1, 1, 1, 0, 1, 1, 1]


def evaluate(values: Any, clip: float | None, dtype: Any = torch.float64) -> tuple[Any, Any]:
    """Garbage where nothing is trained."""
    mask = torch.tensor(MASK).bool()

    def of(numbers: list[float]) -> torch.Tensor:
        return torch.where(mask, torch.tensor(numbers, dtype=dtype), math.nan)

    v = of(values).requires_grad_()
    found = value_loss(ValueSection(clip=clip), v, of(OLD), of(RETURNS), of(WEIGHT), mask)
    found.loss.backward()
    return replace(found, loss=found.loss.detach()), v.grad


def naive(values: list[float], clip: float | None) -> float:
    total = 0.0
    for v, old, r, w, m in zip(values, OLD, RETURNS, WEIGHT, MASK, strict=True):
        plain = (v - r) ** 2
        if clip is not None:
            plain = max(plain, (max(old - clip, min(old + clip, v)) - r) ** 2)
        total += w * plain / 2 if m else 0.0
    return total


@pytest.mark.parametrize("clip", [None, 0.2, 0.5, 5.0])
def test_value_and_gradient_are_those_of_the_formula(clip: float | None) -> None:
    """Central differences of a piecewise square: exact up to rounding, 1e-9."""
    found, grad = evaluate(VALUES, clip)
    assert float(found.loss) == pytest.approx(naive(VALUES, clip), rel=1e-12)
    for t in range(len(VALUES)):
        up, down = ([v + s * STEP * (k == t) for k, v in enumerate(VALUES)] for s in (1, -1))
        numeric = (naive(up, clip) - naive(down, clip)) / (2 * STEP)
        assert float(grad[t]) == pytest.approx(numeric, rel=1e-8, abs=1e-9)
    if clip == 0.2:
        assert found.clipped.any() and not found.clipped.all()


@pytest.mark.parametrize("clip", [None, 0.2])
def test_masked_tokens_have_no_part_whatever_lies_there(clip: float | None) -> None:
    found, grad = evaluate(VALUES, clip)
    assert math.isfinite(float(found.loss))
    assert grad[4] == 0 and not found.clipped[4] and torch.isfinite(grad).all()
    assert {m.name: m.value for m in found.metrics}["value/clipfrac"] == Mean(
        float(found.clipped.sum()), 7.0
    )


def test_float32_is_float64_up_to_rounding() -> None:
    one, two = evaluate(VALUES, 0.2, torch.float32), evaluate(VALUES, 0.2)
    assert float(one[0].loss) == pytest.approx(float(two[0].loss), rel=1e-6)
    assert one[1].tolist() == pytest.approx(two[1].tolist(), rel=1e-6, abs=1e-8)


def test_a_value_inside_the_range_keeps_its_gradient_in_spite_of_rounding() -> None:
    """old + (v - old) is another number than v for many float32 pairs: never a reason to stop."""
    random = torch.Generator().manual_seed(0)
    old = 0.15 * torch.rand(10_000, generator=random)
    v = 1e-3 * torch.randn(10_000, generator=random)
    assert (old + (v - old) != v).any()
    v.requires_grad_()
    target, ones = torch.randn(10_000, generator=random), torch.ones(10_000)
    found = value_loss(ValueSection(clip=0.2), v, old, target, ones, ones.bool())
    found.loss.backward()
    assert not found.clipped.any()
    assert v.grad is not None and torch.equal(v.grad, v.detach() - target)


def test_a_value_on_the_edge_of_the_range_is_inside() -> None:
    for v, stops in ((0.25, False), (-0.25, False), (0.25 + 1e-9, True), (-0.25 - 1e-9, True)):
        x = torch.tensor([v], dtype=torch.float64, requires_grad=True)
        one = torch.ones(1, dtype=torch.float64)
        # the return lies on the other side: moving back would lower the clipped error only
        target = torch.tensor([math.copysign(1.0, v)], dtype=torch.float64)
        found = value_loss(ValueSection(clip=0.25), x, 0 * one, target, one, one.bool())
        found.loss.backward()
        assert x.grad is not None and (x.grad == 0) == stops


def test_nothing_trained_costs_nothing() -> None:
    x = torch.full((3,), math.nan, requires_grad=True)
    nan, nothing = torch.full((3,), math.nan), torch.zeros(3).bool()
    found = value_loss(ValueSection(), x, nan, nan, nan, nothing)
    found.loss.backward()
    assert float(found.loss.detach()) == 0
    assert x.grad is not None and x.grad.tolist() == [0.0] * 3
    assert {m.name: m.value for m in found.metrics}["value/loss"] == Sum(0.0)
