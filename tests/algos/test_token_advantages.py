"""GAE and discounted returns against a recursion over each sequence by itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algos.token_advantages import at_last_trained, gae
from megarl.ops import discounted_returns

CLOSE = 1e-12


@dataclass(frozen=True)
class Sequence_:
    """One sequence: what it is worth and where it is trained."""

    rewards: list[float]
    values: list[float]
    mask: list[bool]
    bootstrap: float


def sequences(seed: int = 0) -> list[Sequence_]:
    """Ragged, with holes, an empty one, fully masked ones, and garbage where nothing is trained."""
    rng = np.random.default_rng(seed)
    found = []
    for k, length in enumerate([7, 0, 12, 1, 5, 1, 30]):
        mask = (rng.random(length) < 0.6).tolist()
        if k in (3, 4):
            mask = [False] * length
        if k == 5:
            mask = [True]
        rewards = (rng.integers(-2, 3, length) / 2).tolist()
        values = [
            float(v) if m else math.nan for v, m in zip(rng.normal(size=length), mask, strict=True)
        ]
        found.append(Sequence_(rewards, values, mask, float(rng.normal()) * (k % 2)))
    return found


def naive_rewards(s: Sequence_, credit: bool) -> list[float]:
    """Of trained tokens only; with ``credit`` a masked token's goes to the trained one before."""
    out: list[float] = []
    for r, m in zip(s.rewards, s.mask, strict=True):
        if m:
            out.append(r)
        elif credit and out:
            out[-1] += r
    return out


def naive_gae(s: Sequence_, gamma: float, lam: float, credit: bool) -> tuple[list[float], ...]:
    rewards = naive_rewards(s, credit)
    values = [v for v, m in zip(s.values, s.mask, strict=True) if m]
    advantages = [0.0] * len(rewards)
    later, after = 0.0, s.bootstrap
    for k in range(len(rewards) - 1, -1, -1):
        later = rewards[k] + gamma * after - values[k] + gamma * lam * later
        advantages[k], after = later, values[k]
    returns = [a + v for a, v in zip(advantages, values, strict=True)]
    return spread(s, advantages), spread(s, returns)


def spread(s: Sequence_, of_trained: Sequence[float]) -> list[float]:
    values = iter(of_trained)
    return [next(values) if m else 0.0 for m in s.mask]


def packed(parts: Sequence[Sequence_]) -> dict[str, torch.Tensor]:
    def flat(name: str, kind: Any = torch.float64) -> torch.Tensor:
        return torch.tensor([x for s in parts for x in getattr(s, name)], dtype=kind)

    bounds = torch.tensor([0, *(len(s.mask) for s in parts)]).cumsum(0).int()
    return {
        "rewards": flat("rewards"),
        "values": flat("values"),
        "mask": flat("mask", torch.bool),
        "cu_seqlens": bounds,
        "bootstrap": torch.tensor([s.bootstrap for s in parts], dtype=torch.float64),
    }


def assert_equal(found: torch.Tensor, expected: Sequence[Sequence[float]]) -> None:
    flat = [x for row in expected for x in row]
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(flat, rel=CLOSE, abs=CLOSE)


@pytest.mark.parametrize("masked_reward", ["credit_prev", "drop"])
@pytest.mark.parametrize(("gamma", "lam"), [(1, 1), (0.9, 0.95), (0.5, 0), (1, 0), (0.99, 1)])
def test_gae_is_the_recursion_over_trained_tokens(
    gamma: float, lam: float, masked_reward: Any
) -> None:
    parts = sequences()
    found = gae(**packed(parts), gamma=gamma, lam=lam, masked_reward=masked_reward)
    credit = masked_reward == "credit_prev"
    for values, expected in zip(
        found, zip(*(naive_gae(s, gamma, lam, credit) for s in parts), strict=True), strict=True
    ):
        assert_equal(values, expected)


def test_gae_is_the_discounted_sum_of_its_temporal_differences() -> None:
    """The definition, A_k = sum_l (gamma lam)^l delta_{k+l}, for a sequence without holes."""
    r, v, b = [1.0, -0.5, 2.0, 0.25], [0.5, 1.5, -1.0, 0.75], 3.0
    s = Sequence_(r, v, [True] * 4, b)
    found, returns = gae(**packed([s]), gamma=0.9, lam=0.8)
    delta = [r[k] + 0.9 * [*v, b][k + 1] - v[k] for k in range(4)]
    expected = [sum(0.72**j * delta[k + j] for j in range(4 - k)) for k in range(4)]
    assert found.tolist() == pytest.approx(expected, rel=CLOSE)
    assert returns.tolist() == pytest.approx([a + x for a, x in zip(expected, v, strict=True)])


def test_without_discounts_an_advantage_is_the_reward_to_go_minus_the_value() -> None:
    for s in sequences(seed=4):
        found, returns = gae(**packed([s]), gamma=1.0, lam=1.0)
        rewards = naive_rewards(s, credit=True)
        to_go = [math.fsum(rewards[k:]) + s.bootstrap for k in range(len(rewards))]
        assert_equal(returns, [spread(s, to_go)])
        values = [v for v, m in zip(s.values, s.mask, strict=True) if m]
        assert_equal(found, [spread(s, [g - v for g, v in zip(to_go, values, strict=True)])])


def test_a_tools_answer_costs_no_discount() -> None:
    """The same trained tokens, with and without 50 masked ones between them."""
    dense = Sequence_([0.0, 0.0, 1.0], [0.1, 0.2, 0.3], [True] * 3, 0.0)
    gap = [math.nan] * 50
    wide = Sequence_(
        [0.0, *[0.0] * 50, 0.0, *[0.0] * 50, 1.0],
        [0.1, *gap, 0.2, *gap, 0.3],
        [True, *[False] * 50, True, *[False] * 50, True],
        0.0,
    )
    for one, two in zip(
        gae(**packed([dense]), gamma=0.9, lam=0.9),
        gae(**packed([wide]), gamma=0.9, lam=0.9),
        strict=True,
    ):
        assert one.tolist() == two[[0, 51, 102]].tolist()
        assert (two[1:51] == 0).all()


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.25])
def test_returns_are_the_recursion_over_trained_tokens(gamma: float) -> None:
    parts = sequences(seed=2)
    p = packed(parts)
    found = discounted_returns(
        p["rewards"], p["mask"], p["cu_seqlens"], gamma=gamma, credit_previous=False
    )
    expected = []
    for s in parts:
        rewards = naive_rewards(s, credit=False)
        to_go = [
            math.fsum(gamma**j * r for j, r in enumerate(rewards[k:])) for k in range(len(rewards))
        ]
        expected.append(spread(s, to_go))
    assert_equal(found, expected)


def test_where_a_sequence_lies_in_a_row_changes_no_bit() -> None:
    parts = sequences(seed=3)
    whole = gae(**packed(parts), gamma=0.9, lam=0.95)
    lengths = [len(s.mask) for s in parts]
    for order in ([6, 5, 4, 3, 2, 1, 0], [2, 0, 6, 1, 3, 5, 4]):
        moved = gae(**packed([parts[i] for i in order]), gamma=0.9, lam=0.95)
        for one, two in zip(whole, moved, strict=True):
            here = one.split(lengths)
            there = two.split([lengths[i] for i in order])
            assert all(torch.equal(there[k], here[i]) for k, i in enumerate(order))


def test_masked_rewards_move_to_the_trained_token_before_them_in_their_own_sequence() -> None:
    """Before the first trained token nothing had been decided: dropped. Never over a boundary."""
    rewards = torch.tensor([9.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    mask = torch.tensor([0, 1, 0, 0, 1, 0, 1, 0]).bool()
    bounds = torch.tensor([0, 5, 5, 8], dtype=torch.int32)
    found = discounted_returns(rewards, mask, bounds, gamma=0.0, credit_previous=True)
    assert found.tolist() == [0, 7, 0, 0, 8, 0, 96, 0]
    dropped = discounted_returns(rewards, mask, bounds, gamma=0.0, credit_previous=False)
    assert dropped.tolist() == [0, 1, 0, 0, 8, 0, 32, 0]


def test_an_outcome_lies_on_the_last_trained_token() -> None:
    mask = torch.tensor([0, 1, 1, 0, 0, 0, 1, 0]).bool()
    bounds = torch.tensor([0, 4, 6, 6, 8], dtype=torch.int32)
    found = at_last_trained(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask, bounds)
    assert found.tolist() == [0, 0, 1, 0, 0, 0, 4, 0]
    assert at_last_trained(torch.zeros(2), mask[:0], torch.tensor([0, 0, 0])).tolist() == []


def test_one_number_that_is_not_finite_stays_in_its_sequence() -> None:
    parts = sequences(seed=5)
    at = next(t for t, m in enumerate(parts[2].mask) if m)
    broken = list(parts)
    values = list(parts[2].values)
    values[at] = math.nan
    broken[2] = Sequence_(parts[2].rewards, values, parts[2].mask, parts[2].bootstrap)
    lengths = [len(s.mask) for s in parts]
    for one, two in zip(
        gae(**packed(parts), gamma=0.9, lam=0.95),
        gae(**packed(broken), gamma=0.9, lam=0.95),
        strict=True,
    ):
        for i, (a, b) in enumerate(zip(one.split(lengths), two.split(lengths), strict=True)):
            assert b[at].isnan() if i == 2 else torch.equal(a, b)
