"""Mean and variance in parts, and whitening with them."""

import itertools
import math

import numpy as np
import pytest
import torch

from megarl.algos.moments import EPS, Moments, merge_moments, whiten

CLOSE = 1e-12


def numbers(seed: int = 0, size: int = 200) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(3.0, 2.0, size))


def two_pass(values: list[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)


@pytest.mark.parametrize(
    "sizes", [[200], [1, 199], [0, 100, 0, 100, 0], [1] * 200, [3, 90, 7, 100]], ids=str
)
def test_merged_parts_have_the_moments_of_the_whole(sizes: list[int]) -> None:
    values = numbers()
    total = merge_moments(Moments.of(part) for part in values.split(sizes))
    mean, variance = two_pass(values.tolist())
    assert total.n == 200
    assert (total.mean, total.variance) == (
        pytest.approx(mean, rel=CLOSE),
        pytest.approx(variance, rel=CLOSE),
    )


@pytest.mark.parametrize("offset", [1e8, -1e8, 1e12])
def test_a_large_offset_does_not_cancel_the_variance(offset: float) -> None:
    """Where E[x^2] - E[x]^2 has no digit left. The inputs hold offset * 2e-16 themselves."""
    values = numbers(1) + offset
    total = merge_moments(Moments.of(part) for part in values.split([60, 1, 139]))
    _, variance = two_pass((values - offset).tolist())
    assert total.variance == pytest.approx(variance, rel=1e-15 * abs(offset))
    naive = float((values**2).mean() - values.mean() ** 2)
    assert abs(naive / variance - 1) > 0.1


def test_parts_far_apart_merge_by_their_distance() -> None:
    """Two ranks with constant values a and b: all variance is between them."""
    parts = [torch.full((3,), 1e6 + 1), torch.full((5,), 1e6 - 1)]
    total = merge_moments(map(Moments.of, parts))
    assert total.mean == 1e6 + (3 - 5) / 8
    assert total.m2 == pytest.approx(4 * 15 / 8, rel=CLOSE)


def test_the_order_of_the_parts_is_rounding_only() -> None:
    parts = [Moments.of(p) for p in numbers(2).split([5, 50, 145])]
    found = [merge_moments(order) for order in itertools.permutations(parts)]
    for one in found[1:]:
        assert one.mean == pytest.approx(found[0].mean, rel=CLOSE)
        assert one.m2 == pytest.approx(found[0].m2, rel=CLOSE)


def test_float32_values_are_added_up_in_float64() -> None:
    """2^24 + 1 ones: a float32 sum stops at 2^24. Here of 2^20 values of 16 + 2^-19."""
    values = torch.full((2**20,), 16 + 2.0**-19)
    assert Moments.of(values).mean == 16 + 2.0**-19
    assert Moments.of(values).m2 == 0


def test_nothing_and_one_number_have_no_variance() -> None:
    assert merge_moments([]) == Moments(0, 0.0, 0.0)
    assert Moments.of(torch.zeros(0)) == Moments(0, 0.0, 0.0)
    assert Moments.of(torch.tensor([7.0])).variance == 0


def test_whitening_gives_mean_0_and_variance_1_over_the_mask() -> None:
    values, mask = numbers(3), torch.from_numpy(np.random.default_rng(4).random(200) < 0.5)
    moments = Moments.of(values[mask])
    found = whiten(torch.where(mask, values, math.nan), mask, moments)
    mean, variance = two_pass(values[mask].tolist())
    expected = [
        (v - mean) / math.sqrt(variance + EPS) if m else 0.0
        for v, m in zip(values.tolist(), mask.tolist(), strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-11)


def test_equal_values_whiten_to_zero_and_a_single_one_stays() -> None:
    same = torch.full((7,), 0.1)
    assert whiten(same, torch.ones(7).bool(), Moments.of(same)).abs().max() < 1e-12
    alone = torch.tensor([3.0, math.nan])
    found = whiten(alone, torch.tensor([True, False]), Moments.of(alone[:1]))
    assert found.tolist() == [3.0, 0.0]
