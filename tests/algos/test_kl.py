"""Divergence estimators: values, gradients by finite differences, and which gradients are unbiased.

"Unbiased" is decided by enumeration: over a vocabulary of three tokens the expected gradient of an
estimator is a finite sum, compared with the exact gradient of a divergence.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megarl.algos.kl import k3, kl_term
from megarl.config.algo import KlSection

TYPES = ["k1", "k2", "k3", "k3+"]
WEIGHTS = ["none", "old", "self"]
STEP = 1e-5
GAPS = [-150.0, -25.0, -12.0, -9.0, -3.0, -0.5, -1e-4, 0.0, 1e-4, 0.5, 2.0, 2.6, 5.0, 25.0, 150.0]
OLD_GAPS = [0.0, 0.3, -0.4, 2.0, 24.0, -24.0]  # lp - lo


def section(kind: str, weight: str, input_clamp: Any = 20.0, output_clamp: Any = 10.0) -> KlSection:
    return KlSection(
        type=kind, coef=1.0, is_weight=weight, input_clamp=input_clamp, output_clamp=output_clamp
    )


def term(kl: KlSection, lp: float, ref: float, old: float) -> tuple[float, float]:
    values = (torch.tensor([v], dtype=torch.float64) for v in (lp, ref, old))
    value, grad = kl_term(*values, kl)
    return float(value), float(grad)


def clamp(x: float, limit: float | None) -> float:
    return x if limit is None else max(-limit, min(limit, x))


def estimate(kind: str, x: float) -> float:
    return {"k1": -x, "k2": x * x / 2}.get(kind, naive_k3(x))


def naive_k3(x: float) -> float:
    """e^x - x - 1; near 0 the series of it, where the three would cancel."""
    if abs(x) > 1:
        return math.exp(x) - x - 1
    return math.fsum(x**n / math.factorial(n) for n in range(2, 25))


def differentiated(kl: KlSection, lp: float, ref: float, old: float) -> Callable[[float], float]:
    """The function of lp whose derivative at ``lp`` is the gradient, stopped parts frozen: the
    estimate through its clamps (k3+: k2 about k3's value), times pi / pi_old or pi / sg[pi].
    """
    frozen_input = kl.input_clamp is not None and abs(ref - lp) > kl.input_clamp
    at = clamp(ref - lp, kl.input_clamp)
    over = kl.output_clamp is not None and abs(estimate(kl.type, at)) > kl.output_clamp

    def value(moving: float) -> float:
        x = clamp(ref - moving, kl.input_clamp)
        k = estimate(kl.type, x)
        if kl.type == "k3+":
            k = estimate("k3", at) + x * x / 2 - at * at / 2
        if over:
            k = clamp(estimate(kl.type, at), kl.output_clamp)
        where = lp if frozen_input else moving
        w = {
            "none": 1.0,
            "old": math.exp(clamp(where - old, 20.0)),
            "self": math.exp(where - lp),
        }[kl.is_weight or "none"]
        return w * k

    return value


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("clamps", [(20.0, 10.0), (4.0, None), (None, 3.0), (None, None)])
def test_value_and_gradient_agree_with_finite_differences(
    kind: str, weight: str, clamps: tuple[float | None, float | None]
) -> None:
    """Relative to the largest of gradient, value and weight: differences of step 1e-5 have an error
    of 1e-5^2 / 6 times a third derivative. No gap lies within a step of a clamp.
    """
    kl = section(kind, weight, *clamps)
    unbounded = clamps[0] is None and kind in ("k3", "k3+")
    for x, d in itertools.product(GAPS, OLD_GAPS):
        if unbounded and x > 100:
            continue  # e^150: the configuration refuses it
        lp = -1.25
        ref, old = lp + x, lp - d
        value, grad = term(kl, lp, ref, old)
        f = differentiated(kl, lp, ref, old)
        assert value == pytest.approx(f(lp), rel=1e-9, abs=1e-13), (x, d)
        numeric = (f(lp + STEP) - f(lp - STEP)) / (2 * STEP)
        scale = max(1.0, abs(value), math.exp(clamp(d, 20.0)) if weight == "old" else 1.0)
        assert grad == pytest.approx(numeric, rel=1e-8, abs=1e-8 * scale), (x, d)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("kind", TYPES)
def test_float32_stays_finite_and_near_float64_for_any_gap(kind: str, weight: str) -> None:
    """k3 of float32 is e^x - 1 - x with the rounding of x (6e-8 x), or a series below 1e-3."""
    kl = section(kind, weight)
    pairs = list(itertools.product(GAPS, OLD_GAPS))
    x = torch.tensor([p[0] for p in pairs])
    lp = torch.zeros_like(x)
    old = -torch.tensor([p[1] for p in pairs])
    found = kl_term(lp, x, old, kl)
    exact = kl_term(lp.double(), x.double(), old.double(), kl)
    for one, two in zip(found, exact, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one.double(), two, rtol=3e-6, atol=1e-9)


@pytest.mark.parametrize("x", [0.0, 1e-12, 1e-8, -1e-8, 1e-5, -9.99e-4, 1.01e-3, -0.1, 0.5])
def test_k3_keeps_its_digits_near_zero(x: float) -> None:
    """expm1(x) - x beyond 1e-3 cancels three digits of the 16."""
    found = float(k3(torch.tensor(x, dtype=torch.float64)))
    assert found == pytest.approx(naive_k3(x), rel=1e-12, abs=0)


def test_the_default_weight_of_k3_in_the_loss_is_the_old_policy_and_of_others_none() -> None:
    assert KlSection(coef=1.0).weight == "old"
    assert KlSection(coef=1.0, place="reward").weight == "none"
    assert KlSection(coef=1.0, is_weight="none").weight == "none"
    assert [KlSection(coef=1.0, type=t).weight for t in ("k1", "k2", "k3+")] == ["none"] * 3


# --- which gradients are unbiased -----------------------------------------------------------------

LOGITS = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
REF = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64).log()
BEHAVIOUR = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64).log()


def exact_gradient(divergence: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    logits = LOGITS.clone().requires_grad_()
    divergence(logits.log_softmax(0)).backward()
    assert logits.grad is not None
    return logits.grad


REVERSE = exact_gradient(lambda lp: (lp.exp() * (lp - REF)).sum())  # KL(pi | ref)
FORWARD = exact_gradient(lambda lp: (REF.exp() * (REF - lp)).sum())  # KL(ref | pi)


def expected_gradient(kind: str, weight: str, sampler: torch.Tensor) -> torch.Tensor:
    """sum over tokens y of sampler(y) dk/dlp(y) dlp(y)/dlogits, with lo = log sampler."""
    lp = LOGITS.log_softmax(0)
    _, grad = kl_term(lp, REF, sampler, section(kind, weight))
    score = torch.eye(3, dtype=torch.float64) - lp.exp()  # [token, logit]
    return (sampler.exp() * grad) @ score


def is_gradient_of(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool(torch.allclose(found, exact, rtol=1e-12, atol=1e-14))


ON_POLICY = {  # (estimator, weight): the exact gradient its expectation is, None: neither
    ("k1", "none"): torch.zeros(3, dtype=torch.float64),
    ("k2", "none"): REVERSE,
    ("k3", "none"): FORWARD,
    ("k3+", "none"): REVERSE,
    ("k1", "old"): REVERSE,
    ("k1", "self"): REVERSE,
    ("k3", "old"): REVERSE,
    ("k3", "self"): REVERSE,
    ("k2", "old"): None,
    ("k2", "self"): None,
    ("k3+", "old"): None,
    ("k3+", "self"): None,
}
OFF_POLICY = {pair: REVERSE for pair in (("k1", "old"), ("k3", "old"))}


@pytest.mark.parametrize(("kind", "weight"), list(itertools.product(TYPES, WEIGHTS)))
def test_the_expected_gradient_on_policy_is_the_documented_one(kind: str, weight: str) -> None:
    found = expected_gradient(kind, weight, LOGITS.log_softmax(0))
    expected = ON_POLICY[kind, weight]
    if expected is None:
        assert not is_gradient_of(found, REVERSE) and not is_gradient_of(found, FORWARD)
    else:
        assert is_gradient_of(found, expected)


@pytest.mark.parametrize(("kind", "weight"), list(itertools.product(TYPES, WEIGHTS)))
def test_off_policy_only_the_ratio_to_the_sampler_makes_k1_and_k3_unbiased(
    kind: str, weight: str
) -> None:
    found = expected_gradient(kind, weight, BEHAVIOUR)
    assert is_gradient_of(found, REVERSE) == ((kind, weight) in OFF_POLICY)
