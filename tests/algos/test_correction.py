"""Corrections of the trainer-rollout mismatch, against loops over sequences; and OPSM.

Log-ratios are exact in float32, so that float64 arithmetic on both sides agrees to a few roundings.
"""

import itertools
import math
from typing import Any

import pytest
import torch

from megarl.algos.correction import normalised, rollout_correction, weight_sums
from megarl.algos.segments import Segments
from megarl.config.algo import CorrectionSection
from megarl.types import Coefficients
from tests.algos import ragged

CLOSE = 1e-12
# log rho of six sequences: mild, strong, cancelling, one token, empty, beyond every clamp
GAPS = [
    [0.25, -0.125, 0.5, 0.0625],
    [1.0, 1.5, -0.25],
    [2.0, -2.0, 1.0, -1.0],
    [-0.75],
    [3.0, -3.0],
    [30.0, 25.0, -40.0, -30.0],
]
MASK = [[1, 1, 0, 1], [1, 1, 1], [1, 1, 1, 1], [1], [0, 0], [1, 1, 1, 0]]
OLD = -2.0


def found(section: CorrectionSection) -> tuple[Any, Segments, list[list[float]], list[list[bool]]]:
    lengths = [len(g) for g in GAPS]
    gaps = torch.tensor([g for part in GAPS for g in part])
    mask = torch.tensor([m for part in MASK for m in part]).bool()
    rollout = torch.where(mask, OLD - gaps, math.nan)
    segments = Segments(torch.tensor([0, *lengths]).cumsum(0).int())
    c = rollout_correction(section, torch.full_like(gaps, OLD), rollout, mask, segments)
    return (
        c,
        segments,
        [p.tolist() for p in c.weight.split(lengths)],
        [p.tolist() for p in c.keep.split(lengths)],
    )


def bounded_exp(x: float) -> float:
    return math.exp(max(-20.0, min(20.0, x)))


def naive(s: CorrectionSection) -> list[list[float | None]]:
    """Weights; None where a token is dropped, 0 where it is masked."""
    out: list[list[float | None]] = []
    for gaps, mask in zip(GAPS, MASK, strict=True):
        used = [g for g, m in zip(gaps, mask, strict=True) if m]
        n = max(1, len(used))
        geometric = bounded_exp(sum(used) / n)
        spread = sum(bounded_exp(g) - 1 - max(-20.0, min(20.0, g)) for g in used) / n
        dead = (
            (s.geo_filter is not None and not s.geo_filter[0] <= geometric <= s.geo_filter[1])
            or (s.k3_filter is not None and spread > s.k3_filter)
            or (s.veto is not None and any(bounded_exp(g) < s.veto for g in used))
        )
        row: list[float | None] = []
        for g, m in zip(gaps, mask, strict=True):
            rho = {
                None: 1.0,
                "token": bounded_exp(g),
                "sequence": bounded_exp(sum(used)),
                "geometric": geometric,
            }[s.level]
            low, high = s.low or 0.0, s.high or math.inf
            outside = s.level is not None and not low <= rho <= high
            too_far = s.k2_filter is not None and g * g / 2 > s.k2_filter
            if not m:
                row.append(0.0)
            elif dead or too_far or (s.mode == "mask" and outside):
                row.append(None)
            else:
                row.append(max(low, min(high, rho)) if s.level else 1.0)
        out.append(row)
    return out


LEVELS = [None, "token", "sequence", "geometric"]
BOUNDS: list[dict[str, Any]] = [{"high": 1.5}, {"low": 0.9}, {"low": 0.5, "high": 3.0}]
FILTERS: list[dict[str, Any]] = [
    {},
    {"geo_filter": (0.9, 1.3)},
    {"k2_filter": 0.4},
    {"k3_filter": 0.3},
    {"veto": 0.2},
    {"geo_filter": (0.5, 3.0), "k2_filter": 1.0, "k3_filter": 1.0, "veto": 0.1},
]


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", LEVELS)
def test_weights_are_those_of_a_loop_over_sequences(level: Any, mode: Any) -> None:
    dropped = set()
    for bounds, filters in itertools.product(BOUNDS, FILTERS):
        section = CorrectionSection(level=level, mode=mode, **bounds, **filters)
        _, _, weights, keep = found(section)
        for i, row in enumerate(naive(section)):
            for t, expected in enumerate(row):
                assert keep[i][t] == bool(MASK[i][t] and expected is not None), (section, i, t)
                assert weights[i][t] == pytest.approx(expected or 0.0, rel=CLOSE), (section, i, t)
                dropped.add(expected is None)
    assert dropped == {True, False}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_normalised_weights_have_mean_one_over_tokens_or_over_sequences(
    level: Any, mode: Any
) -> None:
    section = CorrectionSection(level=level, mode=mode, low=0.4, high=3.0, batch_normalize=True)
    c, segments, _, _ = found(section)
    weights = naive(section)
    if level in (None, "token"):
        values = [
            w or 0.0
            for row, mask in zip(weights, MASK, strict=True)
            for w, m in zip(row, mask, strict=True)
            if m
        ]
    else:  # a sequence's weight is that of each of its trained tokens
        values = [
            next(w or 0.0 for w, m in zip(row, mask, strict=True) if m)
            for row, mask in zip(weights, MASK, strict=True)
            if any(mask)
        ]
    mean = math.fsum(values) / len(values)
    total, count = weight_sums(section, c, segments)
    assert (total / count, count) == (pytest.approx(mean, rel=CLOSE), len(values))
    result = normalised(c.weight, total, count).tolist()
    flat = [(w or 0.0) / mean for row in weights for w in row]
    assert result == pytest.approx(flat, rel=CLOSE)


def test_weights_that_are_all_zero_stay_zero() -> None:
    assert normalised(torch.zeros(3), 0.0, 3.0).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_intervals_are_closed(level: Any) -> None:
    """A ratio of exactly e^.25 as the bound that is to keep it, and one rounding tighter."""
    ratio = float(torch.tensor(0.25, dtype=torch.float64).exp())
    cut = {1: math.nextafter(ratio, 0), 0: math.nextafter(ratio, 2)}
    for bounds, kept in (
        ({"high": ratio}, True),
        ({"high": cut[1]}, False),
        ({"low": ratio}, True),
        ({"low": cut[0]}, False),
    ):
        section = CorrectionSection(level=level, mode="mask", **bounds)
        c = rollout_correction(
            section,
            torch.tensor([-1.0]),
            torch.tensor([-1.25]),
            torch.tensor([True]),
            Segments(torch.tensor([0, 1], dtype=torch.int32)),
        )
        assert bool(c.keep[0]) == kept
        geo = CorrectionSection(geo_filter=(bounds.get("low", 0.1), bounds.get("high", 9.0)))
        c = rollout_correction(
            geo,
            torch.tensor([-1.0]),
            torch.tensor([-1.25]),
            torch.tensor([True]),
            Segments(torch.tensor([0, 1], dtype=torch.int32)),
        )
        assert bool(c.keep[0]) == kept


def test_filters_keep_what_lies_exactly_on_their_limit() -> None:
    """(log rho)^2 / 2 = 1/8 exactly; rho and k3 of log rho = -1/2 as float64 has them."""
    gap = torch.tensor(-0.5, dtype=torch.float64)
    rho, spread = float(gap.exp()), float(torch.expm1(gap) - gap)
    for name, limit, tighter in (
        ("k2_filter", 0.125, 0.0),
        ("k3_filter", spread, 0.0),
        ("veto", rho, 1.0),
    ):
        for bound, kept in ((limit, True), (math.nextafter(limit, tighter), False)):
            c = rollout_correction(
                CorrectionSection(**{name: bound}),
                torch.tensor([-1.5]),
                torch.tensor([-1.0]),
                torch.tensor([True]),
                Segments(torch.tensor([0, 1], dtype=torch.int32)),
            )
            assert bool(c.keep[0]) == kept, name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_a_log_prob_that_is_not_finite_shows_at_its_own_token_only(
    level: Any, mode: Any, bad: float
) -> None:
    """Also where masking would otherwise have hidden it as a weight of 0."""
    gaps = torch.tensor([0.25, -0.5, 0.125, 0.0, 0.5])
    rollout = -1.0 - gaps
    rollout[1] = bad
    section = CorrectionSection(level=level, mode=mode, low=0.5, high=2.0, batch_normalize=True)
    old, mask = torch.full((5,), -1.0), torch.ones(5, dtype=torch.bool)
    segments = Segments(torch.tensor([0, 3, 5], dtype=torch.int32))
    c = rollout_correction(section, old, rollout, mask, segments)
    without = mask.clone()
    without[1] = False
    clean = rollout_correction(section, old, torch.where(without, rollout, -1), without, segments)
    assert c.weight[1] == 0 and not c.keep[1]
    assert torch.equal(c.weight[without], clean.weight[without])
    assert weight_sums(section, c, segments) == weight_sums(section, clean, segments)


# --- off-policy sequence masking ------------------------------------------------------------------

# mean log-prob lost since the rollout, and the sequence's advantage
LOST = [0.5, 0.5, -0.5, 0.125, 0.0]
ADVANTAGE = [-1.0, 1.0, -1.0, -1.0, -2.0]


@pytest.mark.parametrize("against", ["rollout", "old"])
@pytest.mark.parametrize(
    ("delta", "kept"),
    [
        (0.25, [False, True, True, True, True]),
        (0.125, [False, True, True, True, True]),  # exactly delta is still on-policy
        (0.0625, [False, True, True, False, True]),
        (-0.0625, [False, True, True, False, False]),
        (0.5, [True] * 5),
    ],
)
def test_opsm_switches_off_bad_sequences_that_lost_more_than_delta(
    against: str, delta: float, kept: list[bool]
) -> None:
    """Their policy term only: the divergence stays."""
    lp = [[-1.0, -2.0, -1.5]] * 5
    shift = [[0.25, -0.25, 0.0]] * 5  # of single tokens: only the mean counts
    before = [
        [x + lost + s for x, s in zip(row, extra, strict=True)]
        for row, lost, extra in zip(lp, LOST, shift, strict=True)
    ]
    row = ragged.row(
        logp=lp,
        old=before if against == "old" else lp,
        rollout=before if against == "rollout" else lp,
        advantages=ragged.spread(ADVANTAGE, lp),
        weight=ragged.spread([1] * 5, lp),
        dtype=torch.float64,
    )
    found = ragged.evaluate({"name": "sapo"}, *row, opsm={"delta": delta, "against": against})
    assert [any(g != 0 for g in part) for part in found.grad] == kept
    assert found.value("policy/opsm_dropped") == kept.count(False) / 5
    plain = ragged.evaluate({"name": "sapo"}, *ragged_again(row))
    for i, keep in enumerate(kept):
        if keep:
            assert found.grad[i] == plain.grad[i]


def ragged_again(row: Any) -> Any:
    inputs, segments = row
    inputs.logprobs.grad = None
    inputs.entropy.grad = None
    return inputs, segments


def test_opsm_leaves_divergence_and_entropy_terms_alone() -> None:
    lp = [[-1.0, -2.0]]
    row = ragged.row(
        logp=lp,
        old=lp,
        rollout=[[0.0, 0.0]],
        advantages=[[-1.0, -1.0]],
        weight=[[0.5, 0.5]],
        ref=[[-1.5, -1.0]],
        dtype=torch.float64,
    )
    found = ragged.evaluate(
        {"name": "reinforce"},
        *row,
        kl={"type": "k2"},
        opsm={"delta": 0.5},
        coefficients=Coefficients(kl=0.5, entropy=0.25),
    )
    assert found.value("policy/pg_loss") == 0
    assert found.grad[0] == pytest.approx([0.5 * 0.5 * 0.5, 0.5 * 0.5 * -1.0], rel=CLOSE)
    assert found.grad_entropy[0] == [-0.125, -0.125]
