"""Policy objectives of single tokens, against torch autograd over naive float64 formulas.

The formulas here are written as the papers have them, with ``detach`` where a gradient stops, and
share nothing with the closed forms under test. Log-ratios are multiples of 2^-16, so that float32
inputs are exact.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from megarl.algos.objective import Objective
from megarl.algos.segments import Segments
from megarl.types import ONLY_POLICY, LossInputs
from tests.algos import ragged

D = [0.0, *(s * x for x in (1e-4, 0.1, 0.3, 1.0, 3.0, 30.0, 100.0) for s in (1, -1))]
A = [-1.5, 0.0, 1.5]
OLD = -2.0  # an objective of lp itself must not be tested at lp = d
# float64: rounding of a handful of operations. float32: exp(3) - 1 is exact to 1e-7, and SAPO's
# exp(-tau (r - 1)) multiplies that error by its argument of 20.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}

Tensor = torch.Tensor
Tokens = Mapping[str, Tensor]
Naive = Callable[[Tokens, Mapping[str, Any]], Tensor]


def ratio(x: Tokens) -> Tensor:
    return (x["lp"] - x["old"]).clamp(-20, 20).exp()


def pick(where: Tensor, one: float, other: float) -> Tensor:
    return torch.tensor([one if w else other for w in where.tolist()], dtype=torch.float64)


def naive_reinforce(x: Tokens, s: Mapping[str, Any]) -> Tensor:
    return -x["a"] * x["lp"]


def naive_sft(x: Tokens, s: Mapping[str, Any]) -> Tensor:
    return -x["lp"]


def naive_ppo(x: Tokens, s: Mapping[str, Any]) -> Tensor:
    a, r = x["a"], ratio(x)
    loss = torch.maximum(-a * r, -a * r.clamp(1 - s["eps_low"], 1 + s["eps_high"]))
    if s.get("dual_clip"):
        loss = torch.where(a < 0, torch.minimum(loss, -a * s["dual_clip"]), loss)
    return loss


def naive_sapo(x: Tokens, s: Mapping[str, Any]) -> Tensor:
    a, r = x["a"], ratio(x)
    tau = pick(a > 0, s["tau_pos"], s["tau_neg"])
    # 1 - sigmoid(-x): autograd over sigmoid(x) itself loses the digits of sigmoid(20)
    return -(4 / tau) * (1 - torch.sigmoid(-tau * (r - 1))) * a


def ppo_mask(a: Tensor, r: Tensor, low: Any, high: Any) -> Tensor:
    return ~(((a > 0) & (r > 1 + high)) | ((a < 0) & (r < 1 - low)))


def naive_cispo(x: Tokens, s: Mapping[str, Any]) -> Tensor:
    r = ratio(x)
    w = r.clamp(s["low"], s["high"])
    if s.get("ppo_mask"):
        w = w * ppo_mask(x["a"], r, s["eps_low"], s["eps_high"])
    return -w.detach() * x["a"] * x["lp"]


def naive_minirl(x: Tokens, s: Mapping[str, Any]) -> Tensor:
    w = (x["lp"] - x["rollout"]).clamp(-20, 20).exp().clamp(max=s["tis_max"])
    w = w * ppo_mask(x["a"], ratio(x), s["eps_low"], s["eps_high"])
    return -w.detach() * x["a"] * x["lp"]


def naive_aspo(x: Tokens, s: Mapping[str, Any]) -> Tensor:
    """pi_old pi / sg[pi^2] for A > 0: value 1/r, gradient 1/r. First PPO's clip of r, then this
    flip, then the soft cap, of which only the value is constant.
    """
    a, r = x["a"], ratio(x).detach()
    low = pick(x["selected"], s["eps_entropic"], s["eps_low"])
    high = pick(x["selected"], s["eps_entropic"], s["eps_high"])
    active = ppo_mask(a, r, low, high)
    clipped = torch.where(active, r, torch.where(a > 0, 1 + high, 1 - low))
    weight = torch.where(a > 0, 1 / clipped, clipped).clamp(max=s["dual_clip"])
    moving = torch.where(active, (x["lp"] - x["lp"].detach()).exp(), 1.0)
    return -a * weight * moving


def naive_kl_cov(x: Tokens, s: Mapping[str, Any]) -> Tensor:
    d = x["lp"] - x["old"]
    return -x["a"] * ratio(x) + torch.where(x["selected"], s["coef"] * d.abs(), 0.0)


PPO = {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28}
SAPO = {"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.05}
ASPO = {"name": "aspo", "eps_low": 0.2, "eps_high": 0.25, "dual_clip": 3.0, "eps_entropic": 0.5}
MINIRL = {"name": "minirl", "eps_low": 0.2, "eps_high": 0.27, "tis_max": 5.0}
KL_COV = {"name": "kl_cov", "coef": 0.7}
MASK = {"ppo_mask": True, "eps_low": 0.2, "eps_high": 0.28}
CISPO = {"name": "cispo", "w_max": 2.0}
CASES: dict[str, tuple[dict[str, Any], Naive, dict[str, Any]]] = {
    "reinforce": ({"name": "reinforce"}, naive_reinforce, {}),
    "sft": ({"name": "sft"}, naive_sft, {}),
    "ppo": (PPO, naive_ppo, {}),
    "ppo, dual clip": (PPO | {"dual_clip": 3.0}, naive_ppo, {}),
    "ppo, wide": (PPO | {"eps_low": 0.99, "eps_high": 4.0, "dual_clip": 2.0}, naive_ppo, {}),
    "sapo": (SAPO, naive_sapo, {}),
    "sapo, sharp": ({"name": "sapo", "tau_pos": 3.0, "tau_neg": 0.5}, naive_sapo, {}),
    "cispo, absolute": (CISPO | {"w_min": 0.9}, naive_cispo, {"low": 0.9, "high": 2.0}),
    "cispo, no lower bound": (CISPO, naive_cispo, {"low": 0.0, "high": 2.0}),
    "cispo, no upper bound": ({"name": "cispo"}, naive_cispo, {"low": 0.0, "high": 1e30}),
    "cispo, distances": (
        {"name": "cispo", "w_eps_low": 0.2, "w_eps_high": 0.3},
        naive_cispo,
        {"low": 0.8, "high": 1.3},
    ),
    "cispo, ppo mask": (CISPO | MASK, naive_cispo, {"low": 0.0, "high": 2.0}),
    "aspo": (ASPO, naive_aspo, {}),
    "minirl": (MINIRL, naive_minirl, {}),
    "kl_cov": (KL_COV, naive_kl_cov, {}),
}


def grid(dtype: torch.dtype) -> dict[str, Tensor]:
    """Every pair of log-ratio and advantage, selected and not."""
    pairs = [(d, a, chosen) for d in D for a in A for chosen in (False, True)]
    d = torch.tensor([round(d * 65536) / 65536 for d, _, _ in pairs], dtype=dtype)
    n = torch.arange(len(pairs))
    return {
        "lp": (OLD + d).requires_grad_(),
        "old": torch.full_like(d, OLD),
        "rollout": OLD + (n % 5 - 2).to(dtype) / 4,
        "a": torch.tensor([a for _, a, _ in pairs], dtype=dtype),
        "selected": torch.tensor([chosen for _, _, chosen in pairs]),
        "weight": (1 + n % 7).to(dtype) / 8,
    }


def evaluated(settings: Mapping[str, Any], x: Tokens) -> Any:
    """Every token a sequence of its own."""
    n = len(x["lp"])
    inputs = LossInputs(
        logprobs=x["lp"],
        entropy=torch.zeros_like(x["a"]),
        old_logprobs=x["old"],
        rollout_logprobs=x["rollout"],
        advantages=x["a"],
        weight=x["weight"],
        mask=torch.ones(n, dtype=torch.bool),
        selected=x["selected"],
    )
    segments = Segments(torch.arange(n + 1, dtype=torch.int32))
    return Objective(ragged.policy(**settings)).evaluate(inputs, segments, ONLY_POLICY)


def assert_close(found: Tensor, expected: Tensor, rel: float) -> None:
    """Relative to every single number; 1e-7 of it absolute, for weights of 1e-9 and less."""
    torch.testing.assert_close(found.double(), expected, rtol=rel, atol=1e-2 * rel)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_are_those_of_the_naive_formula(case: str, dtype: torch.dtype) -> None:
    settings, naive, more = CASES[case]
    x = grid(dtype)
    found = evaluated(settings, x)
    exact = {k: v.detach().double() if v.is_floating_point() else v for k, v in x.items()}
    exact["lp"].requires_grad_()
    expected = naive(exact, {**ragged.policy(**settings).model_dump(), **more})
    total = (exact["weight"] * expected).sum()
    total.backward()
    assert_close(found.token.loss, expected.detach(), TOLERANCE[dtype])
    assert exact["lp"].grad is not None
    assert_close(found.grad_logprobs, exact["lp"].grad, TOLERANCE[dtype])
    assert torch.isfinite(found.grad_logprobs).all() and torch.isfinite(found.token.loss).all()
    assert float(found.loss) == pytest.approx(float(total.detach()), rel=TOLERANCE[dtype])


@pytest.mark.parametrize("case", [c for c in CASES if c != "sft"])
def test_advantage_zero_gives_exactly_nothing(case: str) -> None:
    found, x = evaluated(CASES[case][0], grid(torch.float32)), grid(torch.float32)
    still = x["a"] == 0
    if case == "kl_cov":
        still &= ~x["selected"]  # whose penalty has no advantage in it
    assert (found.token.loss[still] == 0).all() and (found.grad_logprobs[still] == 0).all()


# --- ties, exactly --------------------------------------------------------------------------------


def one_token(
    settings: Mapping[str, Any], log_ratio: float, advantage: float, **more: Any
) -> tuple[float, float]:
    """(loss, gradient) of a single token with weight 1, in float64."""
    row = ragged.row(
        logp=[[log_ratio]],
        old=[[0.0]],
        advantages=[[advantage]],
        weight=[[1.0]],
        rollout=[[0.0]],
        dtype=torch.float64,
        **more,
    )
    found = ragged.evaluate(settings, *row)
    return float(found.loss), found.grad[0][0]


def exp(x: float) -> float:
    """As torch rounds it."""
    return float(torch.tensor(x, dtype=torch.float64).exp())


@pytest.mark.parametrize(
    ("name", "log_ratio", "advantage"),
    [("eps_high", 0.25, 1.0), ("eps_low", -0.25, -1.0), ("dual_clip", 0.25, -1.0)],
)
def test_a_ratio_on_ppos_bound_itself_is_inside_and_keeps_its_whole_gradient(
    name: str, log_ratio: float, advantage: float
) -> None:
    r = exp(log_ratio)
    limit = {"eps_high": r - 1, "eps_low": 1 - r, "dual_clip": r}[name]
    settings = {"name": "ppo_clip", "eps_low": 0.9, "eps_high": 0.9, name: limit}
    assert one_token(settings, log_ratio, advantage) == (-advantage * r, -advantage * r)
    beyond = log_ratio + math.copysign(1e-9, log_ratio)
    assert one_token(settings, beyond, advantage)[1] == 0


@pytest.mark.parametrize(("log_ratio", "advantage"), [(0.25, 1.0), (-0.25, -1.0)])
@pytest.mark.parametrize("kind", ["cispo", "minirl", "aspo"])
def test_a_ratio_on_the_bound_of_a_hard_mask_is_inside(
    kind: str, log_ratio: float, advantage: float
) -> None:
    r = exp(log_ratio)
    bounds = {"eps_low": 1 - r if r < 1 else 0.9, "eps_high": r - 1 if r > 1 else 0.9}
    settings = {
        "cispo": {"name": "cispo", "w_max": 9.0, "ppo_mask": True, **bounds},
        "minirl": {"name": "minirl", **bounds},
        "aspo": {"name": "aspo", **bounds},
    }[kind]
    weight = 1 / r if kind == "aspo" and advantage > 0 else r
    found = one_token(settings, log_ratio, advantage)[1]
    assert found == pytest.approx(-advantage * weight, rel=1e-15)
    beyond = log_ratio + math.copysign(1e-9, log_ratio)
    assert one_token(settings, beyond, advantage)[1] == 0


@pytest.mark.parametrize(("log_ratio", "inside"), [(20.0, True), (20.000001, False)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_gradient_ends_beyond_a_log_ratio_of_20(
    log_ratio: float, inside: bool, sign: int
) -> None:
    """With an advantage that PPO never clips on this side."""
    d = sign * log_ratio
    loss, gradient = one_token(PPO, d, -sign)
    assert loss == pytest.approx(sign * math.exp(20 * sign), rel=1e-15)
    assert gradient == (pytest.approx(loss, rel=1e-15) if inside else 0)


# --- single facts ---------------------------------------------------------------------------------


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    dual = PPO | {"dual_clip": 3.0}
    assert one_token(dual, math.log(10), -1.0) == (3.0, 0.0)
    assert one_token(PPO, math.log(10), -1.0) == pytest.approx((10.0, 10.0), rel=1e-12)
    assert one_token(dual, math.log(10), 1.0) == pytest.approx((-1.28, 0.0), rel=1e-12)


def test_no_token_loses_its_gradient_under_cispo_without_its_mask() -> None:
    """Each A w, where PPO gives nothing beyond its region."""
    for d in (-100.0, -1.0, 0.0, 1.0, 100.0):
        for a in (1.0, -1.0):
            weight = min(math.exp(min(d, 20)), 2.0)
            assert one_token(CISPO, d, a)[1] == pytest.approx(-a * max(weight, math.exp(-20)))


def test_both_conventions_of_cispos_bounds_name_the_same_weights() -> None:
    distances = {"name": "cispo", "w_eps_low": 0.25, "w_eps_high": 0.5}
    absolute = {"name": "cispo", "w_min": 0.75, "w_max": 1.5}
    for d in (-2.0, -0.1, 0.3, 2.0):
        assert one_token(distances, d, 1.0) == one_token(absolute, d, 1.0)
    assert one_token(absolute, 2.0, 1.0)[1] == -1.5 and one_token(absolute, -2.0, 1.0)[1] == -0.75


def test_aspo_raises_what_has_become_unlikely_and_caps_it_softly() -> None:
    """A > 0 and r = 1/2: weight 2, not 1/2; r = 1/10: 3, still moving. A < 0 and r = 10: 3, still
    moving, where PPO's dual clip stops.
    """
    plain = {"name": "aspo"}
    assert one_token(plain, math.log(0.5), 1.0) == pytest.approx((-2.0, -2.0), rel=1e-12)
    assert one_token(plain, math.log(0.1), 1.0) == (-3.0, -3.0)
    assert one_token(plain, math.log(10), -1.0) == (3.0, 3.0)


def test_minirl_weighs_by_the_rollout_and_clips_by_the_old_policy() -> None:
    row = ragged.row(
        logp=[[-1.0, -1.0]],
        old=[[-1.1, -1.5]],  # r = e^.1 inside, e^.5 beyond the region
        rollout=[[-1.0 - math.log(2), -1.0]],
        advantages=[[1.0, 1.0]],
        weight=[[1.0, 1.0]],
        dtype=torch.float64,
    )
    assert ragged.evaluate(MINIRL, *row).grad[0] == pytest.approx([-2.0, 0.0], rel=1e-12)


def test_unselected_and_masked_tokens_pay_no_kl_cov_penalty() -> None:
    row = ragged.row(
        logp=[[-1.0, -2.0, -3.0]],
        old=[[-1.5, -1.5, -1.5]],
        advantages=[[0.0, 0.0, 0.0]],
        weight=[[1.0, 1.0, 1.0]],
        mask=[[1, 1, 0]],
        selected=[[1, 0, 1]],
        dtype=torch.float64,
    )
    found = ragged.evaluate(KL_COV, *row)
    assert float(found.loss) == pytest.approx(0.7 * 0.5, rel=1e-12)
    assert found.grad[0] == [0.7, 0.0, 0.0]
