"""Objectives of whole sequences: finite differences over the whole loss, and closed forms.

The naive loss below is written in plain Python, a loop over sequences. Central differences of step
1e-6 in float64 are good to about 1e-9 relative; decisions of clipping lie far from it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tests.algos import ragged

GSPO = {"name": "gspo", "eps_low": 0.1, "eps_high": 0.2}
GSPO_TOKEN = {**GSPO, "name": "gspo_token"}
GMPO = {"name": "gmpo", "eps_low": 0.3, "eps_high": 0.4}
STEP = 1e-6
CLOSE = 1e-8

# Seven sequences: inside, above, below, a single token, empty, mixed advantages on both sides, and
# single tokens far out that cancel in the mean
D = [
    [0.02, -0.01, 0.05, 0.03],
    [0.5, 0.3, 0.6],
    [-0.5, -0.2],
    [0.11],
    [7.0, 8.0],
    [0.45, -0.15, 0.7, 0.1, 0.5],
    [1.0, -1.2, 2.0, -1.9, 0.3],
]
MASK = [[1, 1, 0, 1], [1, 1, 1], [1, 1], [1], [0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
ADVANTAGES = [
    [2.0, 2.0, 2.0, 2.0],
    [1.0, -2.0, 0.5],
    [-1.0, 3.0],
    [-0.7],
    [1.0, 1.0],
    [1.0, -2.0, 0.5, 0.0, -0.25],
    [-1.0, 1.5, -2.0, 0.5, 9.0],
]
WEIGHT = [[(i + 2) / (8 + 3 * t) for t in range(len(d))] for i, d in enumerate(D)]
OLD = [[-1.0 - 0.125 * t for t in range(len(d))] for d in D]


def naive_loss(
    settings: Mapping[str, Any],
    lp: Sequence[Sequence[float]],
    advantages: Sequence[Sequence[float]] = ADVANTAGES,
) -> float:
    """Of gspo (whose values gspo_token has) and gmpo."""
    low, high = settings["eps_low"], settings["eps_high"]
    total = 0.0
    for i, part in enumerate(lp):
        used = [t for t in range(len(part)) if MASK[i][t]]
        d = {t: part[t] - OLD[i][t] for t in used}
        if settings["name"] == "gmpo":
            kept = {t: gmpo_clipped(d[t], advantages[i][t], low, high) for t in used}
            s = math.exp(max(-20.0, min(20.0, sum(kept.values()) / len(used)))) if used else 1.0
        else:
            s = math.exp(max(-20.0, min(20.0, sum(d.values()) / len(used)))) if used else 1.0
        for t in used:
            a = advantages[i][t]
            if settings["name"] != "gmpo":
                value = min(s * a, max(1 - low, min(1 + high, s)) * a)  # eq. 5
            else:
                value = s * a
            total -= WEIGHT[i][t] * value
    return total


def gmpo_clipped(d: float, a: float, low: float, high: float) -> float:
    if a == 0:
        return 0.0
    sign = math.copysign(1, a)
    return sign * min(sign * d, sign * max(-low, min(high, d)))


def logprobs(scale: float = 1.0) -> list[list[float]]:
    return [
        [o + scale * d for o, d in zip(*pair, strict=True)] for pair in zip(OLD, D, strict=True)
    ]


def evaluate(
    settings: Mapping[str, Any],
    lp: Any,
    advantages: Any = ADVANTAGES,
    dtype: torch.dtype = torch.float64,
) -> ragged.Evaluated:
    row = ragged.row(logp=lp, old=OLD, advantages=advantages, weight=WEIGHT, mask=MASK, dtype=dtype)
    return ragged.evaluate(settings, *row)


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0])
@pytest.mark.parametrize("settings", [GSPO, GMPO], ids=lambda s: s["name"])
def test_value_and_gradient_are_those_of_the_whole_loss(
    settings: Mapping[str, Any], scale: float
) -> None:
    lp = logprobs(scale)
    found = evaluate(settings, lp)
    assert float(found.loss) == pytest.approx(naive_loss(settings, lp), rel=1e-12)
    for i, part in enumerate(lp):
        for t in range(len(part)):
            moved = [[list(p) for p in lp] for _ in range(2)]
            moved[0][i][t] += STEP
            moved[1][i][t] -= STEP
            up, down = (naive_loss(settings, m) for m in moved)
            assert found.grad[i][t] == pytest.approx((up - down) / (2 * STEP), rel=CLOSE, abs=CLOSE)


def test_the_sequences_are_what_they_are_for() -> None:
    """At scale 1 both sides clip, and in sequences of mixed signs one of them still pulls."""
    found = evaluate(GSPO, logprobs())
    for name in ("clipfrac_high", "clipfrac_low"):
        assert 0 < (found.value(f"policy/{name}") or 0) < 0.5
    assert all(g != 0 for g, m in zip(found.grad[1], MASK[1], strict=True) if m)
    assert found.grad[4] == [0.0, 0.0]  # the empty sequence


def test_gspo_token_has_gspos_values_and_every_tokens_own_gradient() -> None:
    """s_t = sg[s] pi/sg[pi]: autograd over the formula as the paper has it (eq. 13, 14)."""
    lp = logprobs()
    found = evaluate(GSPO_TOKEN, lp)
    assert float(found.loss) == pytest.approx(naive_loss(GSPO, lp), rel=1e-12)
    for i, part in enumerate(lp):
        x = torch.tensor(part, dtype=torch.float64, requires_grad=True)
        m = torch.tensor(MASK[i]).bool()
        if not m.any():
            continue
        a, w = (torch.tensor(v[i], dtype=torch.float64) for v in (ADVANTAGES, WEIGHT))
        d = (x - torch.tensor(OLD[i], dtype=torch.float64))[m]
        s = d.mean().exp().detach() * (x - x.detach()).exp()
        value = torch.minimum(s * a, s.clamp(1 - 0.1, 1 + 0.2) * a)
        (-(w * value)[m].sum()).backward()
        assert x.grad is not None
        assert found.grad[i] == pytest.approx(x.grad.tolist(), rel=1e-12)


def test_for_one_advantage_and_weight_a_sequence_gspo_and_gspo_token_are_the_same() -> None:
    lp = logprobs()
    ones = [[(-1.0) ** i * (i + 1)] * len(part) for i, part in enumerate(lp)]
    rows = [
        ragged.row(
            logp=lp,
            old=OLD,
            advantages=ones,
            weight=ragged.spread([1, 0.5, 2, 1, 1, 3, 1], lp),
            mask=MASK,
            dtype=torch.float64,
        )
        for _ in range(2)
    ]
    one, two = (ragged.evaluate(s, *r) for s, r in zip((GSPO, GSPO_TOKEN), rows, strict=True))
    assert float(one.loss) == pytest.approx(float(two.loss), rel=1e-14)
    assert one.flat_grad.tolist() == pytest.approx(two.flat_grad.tolist(), rel=1e-14)
    varying = [evaluate(s, lp).flat_grad for s in (GSPO, GSPO_TOKEN)]
    assert not torch.allclose(*varying, rtol=1e-2)  # and for varying ones they are not


@pytest.mark.parametrize("settings", [GSPO, GSPO_TOKEN], ids=lambda s: s["name"])
def test_a_sequence_of_one_token_has_ppos_loss_and_gradient(settings: Mapping[str, Any]) -> None:
    ppo = {"name": "ppo_clip", "eps_low": 0.1, "eps_high": 0.2}
    d = [[x] for x in (-3.0, -0.3, -0.05, 0.0, 0.05, 0.3, 3.0)]
    for a in (1.5, -1.5):
        results = []
        for policy in (settings, ppo):
            row = ragged.row(
                logp=d,
                old=ragged.spread([0] * 7, d),
                advantages=ragged.spread([a] * 7, d),
                weight=ragged.spread([0.5] * 7, d),
                dtype=torch.float64,
            )
            results.append(ragged.evaluate(policy, *row))
        assert float(results[0].loss) == pytest.approx(float(results[1].loss), rel=1e-14)
        pairs = [r.flat_grad.tolist() for r in results]
        assert pairs[0] == pytest.approx(pairs[1], rel=1e-14)


@pytest.mark.parametrize("settings", [GSPO, GSPO_TOKEN, GMPO], ids=lambda s: s["name"])
def test_a_gradient_reaches_tokens_that_have_no_weight_of_their_own(
    settings: Mapping[str, Any],
) -> None:
    """Weight only on the first token: for gspo and gmpo its loss is one of all tokens."""
    d = [[0.02, -0.01, 0.05, 0.03]]
    row = ragged.row(
        logp=d,
        old=[[0.0] * 4],
        advantages=[[2.0] * 4],
        weight=[[1.0, 0, 0, 0]],
        mask=[[1, 1, 0, 1]],
        dtype=torch.float64,
    )
    found = ragged.evaluate(settings, *row)
    s = math.exp((0.02 - 0.01 + 0.03) / 3)
    share = -2 * s / 3
    expected = [-2 * s, 0, 0, 0] if settings is GSPO_TOKEN else [share, share, 0, share]
    assert float(found.loss) == pytest.approx(-2 * s, rel=1e-12)
    assert found.grad[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("settings", [GSPO, GSPO_TOKEN, GMPO], ids=lambda s: s["name"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_mean_log_ratio_beyond_20_is_clamped_and_pulls_no_more(
    settings: Mapping[str, Any], sign: int
) -> None:
    """On the side that is never clipped; single tokens beyond 20 are not clamped before the sum."""
    for z, moves in ((19.0, True), (20.0, True), (20.5, False), (100.0, False)):
        d = [[sign * (z + 30), sign * (z - 30)]]
        row = ragged.row(
            logp=d,
            old=[[0.0, 0.0]],
            advantages=[[-sign, -sign]],
            weight=[[0.5, 0.5]],
            dtype=torch.float64,
        )
        if settings is GMPO:  # whose tokens are clipped one by one, on the side of -sign
            row[0].logprobs.data[:] = sign * z
        found = ragged.evaluate(settings, *row)
        s = math.exp(sign * min(z, 20.0))
        assert float(found.loss) == pytest.approx(sign * s, rel=1e-12)
        expected = [sign * s / 2] * 2 if moves else [0.0, 0.0]
        assert found.grad[0] == pytest.approx(expected, rel=1e-12)
        assert found.value("policy/seq_ratio_clamped") == (0.0 if moves else 1.0)


def test_bounds_of_1e_4_are_decided_exactly_in_float32() -> None:
    """A mean log-ratio one part in a thousand inside or outside the band of 3e-4 / 4e-4."""
    band = {"name": "gspo", "eps_low": 3e-4, "eps_high": 4e-4}
    for bound, advantage in ((math.log1p(4e-4), 1.0), (math.log1p(-3e-4), -1.0)):
        for factor, active in ((0.999, True), (1.001, False)):
            row = ragged.row(
                logp=[[factor * bound]], old=[[0.0]], advantages=[[advantage]], weight=[[1.0]]
            )
            assert (ragged.evaluate(band, *row).grad[0][0] != 0) == active


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_a_sequence_on_the_bound_itself_is_inside(name: str) -> None:
    for advantage, z in ((1.0, math.log1p(0.2)), (-1.0, math.log1p(-0.1))):
        for factor, gradient in ((1.0, -advantage * math.exp(z)), (1 + 1e-12, 0.0)):
            row = ragged.row(
                logp=[[z * factor]],
                old=[[0.0]],
                advantages=[[advantage]],
                weight=[[1.0]],
                dtype=torch.float64,
            )
            found = ragged.evaluate({**GSPO, "name": name}, *row)
            assert found.grad[0][0] == pytest.approx(gradient, rel=1e-12)


def test_a_gmpo_token_on_the_bound_itself_is_inside() -> None:
    for advantage, d in ((1.0, 0.5), (-1.0, -0.25)):
        bounds = {"name": "gmpo", "eps_low": 0.25, "eps_high": 0.5}
        for factor, moves in ((1.0, True), (1 + 1e-12, False)):
            row = ragged.row(
                logp=[[d * factor, 0.0]],
                old=[[0.0, 0.0]],
                advantages=[[advantage] * 2],
                weight=[[0.5, 0.5]],
                dtype=torch.float64,
            )
            found = ragged.evaluate(bounds, *row)
            s = math.exp(d / 2)
            expected = [-advantage * s / 2 * moves, -advantage * s / 2]
            assert found.grad[0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("settings", [GSPO, GSPO_TOKEN, GMPO], ids=lambda s: s["name"])
def test_float32_is_float64_up_to_rounding(settings: Mapping[str, Any]) -> None:
    """Of inputs near 1 that are rounded to float32 (6e-8), of which the log-ratio of 0.01 keeps
    about 1e-5; means and sums are float64 in both.
    """
    lp = logprobs()
    one, two = evaluate(settings, lp, dtype=torch.float32), evaluate(settings, lp)
    assert float(one.loss) == pytest.approx(float(two.loss), rel=1e-6)
    assert one.flat_grad.tolist() == pytest.approx(two.flat_grad.tolist(), rel=1e-6, abs=1e-9)
