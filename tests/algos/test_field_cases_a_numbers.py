"""Failures of other backends, group (a): ratios, divergences, temperatures, settings not passed on.
Each case with its scenario and with further inputs of its kind.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from megarl.algos.kl import kl_term
from megarl.algos.mismatch import mismatch_metrics, mismatch_sums
from megarl.algos.segments import Segments
from megarl.config.algo import AlgoSection, KlSection
from megarl.config.rollout import RolloutSection
from megarl.config.schema import Config
from megarl.monitor.metrics import reduce_metrics
from megarl.ops import logprob_entropy
from megarl.types import Coefficients, Sampling
from tests.algos import ragged
from tests.helpers.plans import config_of
from tests.helpers.sensitivity import without_effect
from tests.rollout.test_client import answering

GSPO = {"name": "gspo", "eps_low": 0.1, "eps_high": 0.2}
GSPO_TOKEN = {**GSPO, "name": "gspo_token"}
POLICIES: list[dict[str, Any]] = [
    {"name": "ppo_clip"},
    {"name": "ppo_clip", "dual_clip": 3.0},
    GSPO,
    GSPO_TOKEN,
    {"name": "gmpo"},
    {"name": "sapo"},
    {"name": "cispo", "w_max": 5.0},
    {"name": "aspo"},
    {"name": "minirl"},
    {"name": "kl_cov"},
    {"name": "reinforce"},
]
each_policy = pytest.mark.parametrize("settings", POLICIES, ids=str)


# --- A12: a sequence far out ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "far", [[100.0] * 3, [-100.0] * 3, [1e4] * 2, [300.0, -30.0, 40.0], [21.0]], ids=str
)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("settings", [GSPO, GSPO_TOKEN, {"name": "gmpo"}], ids=lambda s: s["name"])
def test_a12_a_sequence_far_out_is_clamped_and_counted_and_spoils_no_other(
    settings: dict[str, Any], advantage: float, far: list[float]
) -> None:
    d = [[0.01, -0.02], far, [0.03]]
    old = ragged.spread([-1.0, -1.0, -1.0], d)
    lp = [[o + x for o, x in zip(*pair, strict=True)] for pair in zip(old, d, strict=True)]

    def evaluate(chosen: Sequence[int]) -> ragged.Evaluated:
        parts = [[rows[i] for i in chosen] for rows in (lp, old)]
        a = ragged.spread([[0.5, advantage, -0.5][i] for i in chosen], parts[0])
        w = ragged.spread([0.25] * len(chosen), parts[0])
        row = ragged.row(logp=parts[0], old=parts[1], advantages=a, weight=w)
        return ragged.evaluate(settings, *row)

    found, without = evaluate([0, 1, 2]), evaluate([0, 2])
    assert math.isfinite(found.loss) and torch.isfinite(found.flat_grad).all()
    assert [found.grad[0], found.grad[2]] == without.grad
    assert found.value("policy/seq_ratio_clamped") == pytest.approx(1 / 3)
    assert found.value("policy/nonfinite_tokens") == 0
    if settings["name"] == "gmpo" and min(far) < 0 < max(far):
        return  # of tokens clipped one by one only the others' mean is left, which is near
    assert found.grad[1] == [0.0] * len(far)


# --- A14: overflow --------------------------------------------------------------------------------

LOG_RATIOS = [0.0, 1.0, -1.0, 30.0, -30.0, 100.0, -100.0, 88.8, -104.0, 1e4, -1e4, 3e38, -3e38]


@each_policy
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a14_finite_numbers_have_a_finite_loss_and_gradient(
    settings: dict[str, Any], advantage: float
) -> None:
    """In float32, beside an ordinary sequence whose gradient must not change; with k3, whose value
    is e^100 for a reference 100 nats away.
    """
    for log_ratio in LOG_RATIOS:
        assert_finite(settings, log_ratio, advantage)


def assert_finite(settings: dict[str, Any], log_ratio: float, advantage: float) -> None:
    lp, old = [[0.0, 0.0], [-0.5]], [[-log_ratio] * 2, [-0.6]]
    row = {
        "logp": lp,
        "old": old,
        "ref": [[-log_ratio, log_ratio], [-0.4]],
        "rollout": old,
        "advantages": [[advantage] * 2, [1.0]],
        "weight": ragged.spread([0.5, 0.5], lp),
        "selected": [[1, 0], [0]],
    }
    terms: dict[str, Any] = {"kl": {"type": "k3"}, "coefficients": COEFFICIENTS}
    found = ragged.evaluate(settings, *ragged.row(**row), **terms)
    alone = ragged.evaluate(settings, *ragged.row(**{k: v[1:] for k, v in row.items()}), **terms)
    assert math.isfinite(found.loss) and torch.isfinite(found.flat_grad).all()
    assert found.grad[1] == alone.grad[0]
    assert all(map(math.isfinite, reduce_metrics([found.metrics]).values()))
    assert not any(d for part in found.dropped for d in part)


COEFFICIENTS = Coefficients(kl=0.1)


@each_policy
@pytest.mark.parametrize("field", ["logp", "old", "advantages", "ref"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a14_a_number_that_is_not_finite_is_reported_at_its_token(
    settings: dict[str, Any], field: str, bad: float
) -> None:
    """Not mapped to 0: which token, hence which sample, is what the trainer is told."""
    lp = [[-0.5, -0.25], [-0.5, -1.0, -0.75]]
    row: dict[str, Any] = {
        name: [list(part) for part in lp] for name in ("logp", "old", "ref", "rollout")
    }
    row |= {"advantages": ragged.spread([1.0, -1.0], lp), "weight": ragged.spread([1, 1], lp)}
    row["selected"] = ragged.spread([0, 0], lp)
    row[field][1][1] = bad
    found = ragged.evaluate(
        settings, *ragged.row(**row), kl={"type": "k3"}, coefficients=COEFFICIENTS
    )
    assert found.dropped == [[False, False], [False, True, False]]
    assert found.value("policy/nonfinite_tokens") == 1
    assert math.isfinite(found.loss) and torch.isfinite(found.flat_grad).all()


# --- A15: SAPO ------------------------------------------------------------------------------------


def sapo(log_ratio: float, advantage: float, **settings: float) -> tuple[ragged.Evaluated, float]:
    row = ragged.row(
        logp=[[log_ratio]],
        old=[[0.0]],
        advantages=[[advantage]],
        weight=[[1.0]],
        dtype=torch.float64,
    )
    found = ragged.evaluate({"name": "sapo", **settings}, *row)
    return found, found.grad[0][0]


@pytest.mark.parametrize(
    ("ratio", "gradient"),
    [
        *((1.0, 1.0), (1.5, 1.4100), (math.e, 1.4022), (1 / math.e, 0.3334), (0.5, 0.4700)),
        *((2.0, 1.5729), (3.0, 1.2599), (8.0, 0.0291)),
    ],
)
def test_a15_sapos_gradient_has_the_reference_values(ratio: float, gradient: float) -> None:
    """tau = 1, A = 1; to the four digits given, and by the sigmoid's own derivative."""
    _, found = sapo(math.log(ratio), 1.0)
    assert found == pytest.approx(-gradient, abs=6e-5)
    s = 1 / (1 + math.exp(-(ratio - 1)))
    assert found == pytest.approx(-4 * s * (1 - s) * ratio, rel=1e-10)


@pytest.mark.parametrize("tau", [0.3, 1.0, 1.05, 4.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 2.5, -0.25])
def test_a15_at_ratio_one_the_gradient_is_the_policy_gradient(tau: float, advantage: float) -> None:
    found, gradient = sapo(0.0, advantage, tau_pos=tau, tau_neg=tau)
    assert gradient == pytest.approx(-advantage, rel=1e-12)
    assert float(found.loss) == pytest.approx(-2 / tau * advantage, rel=1e-12)


def test_a15_each_sign_has_its_own_temperature_and_no_metric_speaks_of_clipping() -> None:
    for log_ratio in (-0.7, 0.4, 1.2):
        assert sapo(log_ratio, 1.0, tau_neg=9.0)[1] == sapo(log_ratio, 1.0)[1]
        assert sapo(log_ratio, -1.0, tau_pos=9.0)[1] == sapo(log_ratio, -1.0)[1]
        assert sapo(log_ratio, 0.0)[1] == 0
    names = {m.name for m in sapo(0.3, 1.0)[0].metrics}
    assert not any("clip" in name for name in names) and "policy/gate" in names


@pytest.mark.parametrize("tau", [0.0, -1.0, -1e-9, math.nan, math.inf])
@pytest.mark.parametrize("key", ["tau_pos", "tau_neg"])
def test_a15_a_temperature_that_is_not_positive_is_refused(key: str, tau: float) -> None:
    with pytest.raises(ValidationError, match=key):
        AlgoSection.model_validate({"policy": {"name": "sapo", key: tau}})


# --- A18: which divergence gradients are unbiased -------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a18_the_expected_gradients_over_three_tokens(seed: int) -> None:
    """By enumeration: k2, k3+ and weighted k3 give that of KL(pi | ref), k3 that of KL(ref | pi),
    k1 nothing; off-policy only k3 with the ratio to the sampler does. test_kl.py has all pairs.
    """
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, generator=random, dtype=torch.float64).requires_grad_()
    ref, mu = torch.randn(2, 3, generator=random, dtype=torch.float64).log_softmax(-1)
    lp = logits.log_softmax(0)
    (reverse,) = torch.autograd.grad((lp.exp() * (lp - ref)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((ref.exp() * (ref - lp)).sum(), logits)
    lp = lp.detach()

    def expected(sampler: torch.Tensor, **settings: Any) -> torch.Tensor:
        _, grad = kl_term(lp, ref, sampler, KlSection(coef=1.0, **settings))
        return (sampler.exp() * grad) @ (torch.eye(3, dtype=torch.float64) - lp.exp())

    def equal(one: torch.Tensor, two: torch.Tensor) -> bool:
        return torch.allclose(one, two, rtol=1e-11, atol=1e-13)

    for settings in ({"type": "k2"}, {"type": "k3+"}, {"type": "k3"}):
        assert equal(expected(lp, **settings), reverse)
    assert equal(expected(lp, type="k3", is_weight="none"), forward)
    assert equal(expected(lp, type="k1"), torch.zeros(3, dtype=torch.float64))
    assert equal(expected(mu, type="k3"), reverse)
    for settings in ({"type": "k2"}, {"type": "k3+"}, {"type": "k3", "is_weight": "none"}):
        assert not equal(expected(mu, **settings), reverse)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3+"])
@pytest.mark.parametrize("weight", ["old", "self"])
def test_a18_a_weight_that_would_not_make_an_estimate_unbiased_is_refused(
    kind: str, weight: str
) -> None:
    algorithm = pytest.importorskip("megarl.config.algorithm")
    for place in ("loss", "reward"):
        kl = {"type": kind, "coef": 0.1, "is_weight": weight, "place": place}
        config = config_of(algo={"policy": {"name": "gspo"}, "kl": kl})
        assert "algo.kl.is_weight" in {p.key for p in algorithm.algorithm_problems(config)}


# --- A20: settings that are not passed on ---------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss"),
    [
        *((10, -1, 3, 3), (10, -2, 3, 6), (100, -1, 4, 4)),
        *((10, -1, None, 10), (2, -1, 3, 2), (10, 1, 3, -1.2)),
    ],
)
def test_a20_dual_clip_reaches_the_loss(
    ratio: float, advantage: float, dual: float | None, loss: float
) -> None:
    row = ragged.row(
        logp=[[math.log(ratio)]],
        old=[[0.0]],
        advantages=[[advantage]],
        weight=[[1.0]],
        dtype=torch.float64,
    )
    found = ragged.evaluate({"name": "ppo_clip", "dual_clip": dual}, *row)
    assert float(found.loss) == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": {"name": "gspo"}, "kl": {"coef": 0.1}, "opsm": {"delta": 0.1}},
        {"policy": {"name": "ppo_clip", "dual_clip": 3.0}, "entropy": {"name": "adaptive"}},
        {"policy": {"name": "sapo"}, "correction": {"level": "token", "low": 0.5, "high": 2.0}},
    ],
    ids=str,
)
def test_a20_every_setting_of_a_whole_algorithm_changes_the_result(
    settings: dict[str, Any],
) -> None:
    """Every section's own settings are walked in test_sensitivity.py."""
    assert without_effect(AlgoSection.model_validate(settings)) == []


# --- A21: temperature -----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0, 0.1, 2.5, 100.0])
@pytest.mark.parametrize(
    "logits", [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [-5.0, 7.0, 1.5], [100.0, -100.0, 0.0]], ids=str
)
def test_a21_training_log_probs_are_of_the_tempered_distribution(
    logits: list[float], temperature: float
) -> None:
    z = torch.tensor([logits] * 3, dtype=torch.float64)
    lp, entropy = logprob_entropy(z.clone(), torch.arange(3), vocab_size=3, temperature=temperature)
    top = max(logits) / temperature
    lse = top + math.log(sum(math.exp(x / temperature - top) for x in logits))
    expected = [x / temperature - lse for x in logits]
    assert lp.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    h = -sum(math.exp(x) * x for x in expected)
    assert entropy.tolist() == pytest.approx([h] * 3, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("temperature", [0.0, -0.7, -1e-12, math.nan, math.inf])
def test_a21_a_temperature_that_divides_by_zero_is_refused_at_parse_time(
    temperature: float,
) -> None:
    with pytest.raises(ValidationError, match="temperature"):
        RolloutSection(temperature=temperature)


# --- A22: truncated sampling ----------------------------------------------------------------------

NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("n", [1, 4])
def test_a22_every_request_says_outright_that_nothing_is_cut_off(
    temperature: float, n: int
) -> None:
    """Whatever the model's generation_config or the server's own defaults are."""
    odd = answering(lambda reply: None)
    sampling = Sampling(temperature=temperature, max_new_tokens=3)
    asyncio.run(odd.ask(n=n, sampling=sampling))
    (body,) = odd.bodies
    assert len(body["sampling_params"]) == n
    for params in body["sampling_params"]:
        assert {key: params[key] for key in NEUTRAL} == NEUTRAL
        assert params["temperature"] == temperature


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p", "repetition_penalty"])
def test_a22_there_is_no_setting_that_would_cut_the_distribution(key: str) -> None:
    assert key not in RolloutSection.model_fields
    plain = config_of(algo={"policy": {"name": "gspo"}}).model_dump()
    plain["rollout"][key] = 0.9
    with pytest.raises(ValidationError, match=key):
        Config.model_validate(plain)


@pytest.mark.parametrize("mass", [0.9, 0.5, 0.17, 0.999])
def test_a22_log_probs_over_a_part_of_the_vocabulary_show_as_a_mismatch(mass: float) -> None:
    """A server that renormalises by the surviving mass S is off by log S at every token."""
    lo = torch.tensor([-0.5, -1.0, -0.25, -2.0], dtype=torch.float64)
    mask, segments = torch.ones(4).bool(), Segments(torch.tensor([0, 3, 4], dtype=torch.int32))
    found = mismatch_metrics([mismatch_sums(lo, lo - math.log(mass), mask, segments)])
    assert found["rho_mean"] == pytest.approx(mass, rel=1e-9)
    assert found["kl_rollout_train_k1"] == pytest.approx(-math.log(mass), rel=1e-9)
    assert found["max_abs_logprob_diff"] == pytest.approx(-math.log(mass), rel=1e-9)
