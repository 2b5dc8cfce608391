"""Facts of the objectives that no batch of numbers states: where gradients go, stop and vanish.

Unless a test says otherwise, tolerances are a few float32 roundings (6e-8 relative) of values near
1.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from megarl.algos.segments import Segments
from megarl.monitor.metrics import merge_metrics, reduce_metrics
from megarl.types import LossInputs, Mean
from tests.algos import ragged

CLOSE = 1e-6

REINFORCE = {"name": "reinforce"}
PPO = {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0}
GSPO = {"name": "gspo", "eps_low": 0.1, "eps_high": 0.2}
SAPO = {"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.05}
SFT = {"name": "sft"}
POLICIES = [REINFORCE, PPO, GSPO, SAPO, SFT]
RATIO_POLICIES = [PPO, GSPO, SAPO]

each_policy = pytest.mark.parametrize("settings", POLICIES, ids=lambda s: s["name"])
each_ratio_policy = pytest.mark.parametrize("settings", RATIO_POLICIES, ids=lambda s: s["name"])


def one_token(
    settings: Mapping[str, Any], log_ratio: float, advantage: float, dtype: Any = torch.float64
) -> tuple[float, float]:
    """(loss, gradient) of a single token with weight 1."""
    row = ragged.row(
        logp=[[log_ratio]], old=[[0.0]], advantages=[[advantage]], weight=[[1.0]], dtype=dtype
    )
    found = ragged.evaluate(settings, *row)
    return float(found.loss), found.grad[0][0]


def random_row(seed: int = 0) -> tuple[LossInputs, Segments]:
    """Five sequences with holes in the mask, one of them all masked; log-ratios on both sides of
    every trust region above."""
    random = torch.Generator().manual_seed(seed)
    lengths = [6, 1, 9, 4, 12]
    total = sum(lengths)
    old = -3 * torch.rand(total, generator=random)
    mask = torch.rand(total, generator=random) < 0.75
    mask[0] = mask[6] = True
    mask[16:20] = False
    inputs = LossInputs(
        logprobs=(old + 0.4 * torch.randn(total, generator=random)).requires_grad_(),
        entropy=torch.rand(total, generator=random),
        old_logprobs=old,
        rollout_logprobs=old.clone(),
        advantages=torch.randn(total, generator=random),
        weight=torch.rand(total, generator=random),
        mask=mask,
    )
    return inputs, Segments(torch.tensor([0, *lengths]).cumsum(0).int())


# --- GSPO -----------------------------------------------------------------------------------------


def test_gspo_gradient_reaches_every_trained_token_of_a_sequence_by_one_over_n():
    """Weight only on the first token: its loss is a function of all of the sequence's tokens."""
    d = [0.02, -0.01, 0.05, 0.03]
    mask = [1, 1, 0, 1]
    inputs, segments = ragged.row(
        logp=[d], old=[[0.0] * 4], advantages=[[2.0] * 4], weight=[[1.0, 0, 0, 0]], mask=[mask]
    )
    found = ragged.evaluate(GSPO, inputs, segments)
    s = math.exp((0.02 - 0.01 + 0.03) / 3)
    assert float(found.loss) == pytest.approx(-2 * s, rel=CLOSE)
    assert found.grad[0] == pytest.approx([-2 * s / 3, -2 * s / 3, 0, -2 * s / 3], rel=CLOSE)


@pytest.mark.parametrize("mean_d", [-0.3, 0.0, 0.3], ids=["below", "inside", "above"])
def test_gspo_clips_a_sequence_as_a_whole_by_the_sign_of_each_tokens_advantage(mean_d: float):
    """With P and Q the weighted sums of the positive and negative advantages of a sequence::

    L = -(P min(s, 1 + eps_high) + Q max(s, 1 - eps_low))
    dL/dlp_t = -(s / n) (P [s <= 1 + eps_high] + Q [s >= 1 - eps_low])
    """
    advantages, weight = [1.0, -2.0, 0.5, 0.0], [0.5, 0.25, 1.0, 2.0]
    # single tokens lie far outside the trust region, on both sides: only their mean counts
    d = [mean_d + x for x in (1.0, -1.0, 2.0, -2.0)]
    row = ragged.row(logp=[d], old=[[0.0] * 4], advantages=[advantages], weight=[weight])
    found = ragged.evaluate(GSPO, *row)
    s, p, q = math.exp(mean_d), 0.5 + 0.5, -0.5
    high, low = 1 + GSPO["eps_high"], 1 - GSPO["eps_low"]
    assert float(found.loss) == pytest.approx(-(p * min(s, high) + q * max(s, low)), rel=CLOSE)
    expected = -(s / 4) * (p * (s <= high) + q * (s >= low))
    assert found.grad[0] == pytest.approx([expected] * 4, rel=CLOSE, abs=0)
    assert expected != 0  # in each of the three cases one of the signs still pulls


def test_gspo_weighs_a_sequence_of_2_tokens_like_one_of_8():
    lengths = [2, 8]
    d = [[0.01] * n for n in lengths]
    found = ragged.evaluate(
        GSPO,
        *ragged.row(
            logp=d,
            old=ragged.spread([0, 0], d),
            advantages=ragged.spread([1, 1], d),
            weight=[[1 / (2 * n)] * n for n in lengths],  # seq_mean_token_mean
        ),
    )
    s = math.exp(0.01)
    assert float(found.loss) == pytest.approx(-s, rel=CLOSE)
    assert sum(found.grad[0]) == pytest.approx(-s / 2, rel=CLOSE)
    assert sum(found.grad[1]) == pytest.approx(-s / 2, rel=CLOSE)


def test_gspo_bounds_of_1e_4_are_decided_exactly():
    """A mean log-ratio one part in a thousand inside or outside the band of 3e-4 / 4e-4."""
    band = {"name": "gspo", "eps_low": 3e-4, "eps_high": 4e-4}
    for bound, advantage in ((math.log1p(4e-4), 1.0), (math.log1p(-3e-4), -1.0)):
        for factor, active in ((0.999, True), (1.001, False)):
            _, gradient = one_token(band, factor * bound, advantage, torch.float32)
            assert (gradient != 0) == active


# --- trust regions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bound", "advantage"),
    [("eps_high", "above", 1.0), ("eps_low", "below", -1.0), ("dual_clip", "above", -1.0)],
)
def test_a_ratio_on_the_bound_itself_is_inside_and_keeps_its_whole_gradient(
    name: str, bound: str, advantage: float
):
    log_ratio = 0.25 if bound == "above" else -0.25
    ratio = float(torch.tensor(log_ratio, dtype=torch.float64).exp())
    limit = {"eps_high": ratio - 1, "eps_low": 1 - ratio, "dual_clip": ratio}[name]
    settings = {"name": "ppo_clip", "eps_low": 0.9, "eps_high": 0.9, name: limit}
    loss, gradient = one_token(settings, log_ratio, advantage)
    assert (loss, gradient) == (-advantage * ratio, -advantage * ratio)
    step = 1e-9 if bound == "above" else -1e-9
    assert one_token(settings, log_ratio + step, advantage)[1] == 0


def test_a_gspo_sequence_on_the_bound_itself_is_inside():
    for advantage, log_s in ((1.0, math.log1p(GSPO["eps_high"])), (-1.0, math.log1p(-0.1))):
        assert one_token(GSPO, log_s, advantage)[1] == pytest.approx(-advantage * math.exp(log_s))
        assert one_token(GSPO, log_s * (1 + 1e-12), advantage)[1] == 0


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely():
    assert one_token(PPO, math.log(10), -1.0) == (3.0, 0.0)


@pytest.mark.parametrize(
    ("settings", "key", "value", "log_ratio", "advantage"),
    [
        (PPO, "eps_low", 0.3, -1.0, -1.0),
        (PPO, "eps_high", 0.3, 1.0, 1.0),
        (PPO, "dual_clip", 4.0, 2.0, -1.0),
        (PPO, "dual_clip", None, 2.0, -1.0),
        (GSPO, "eps_low", 0.3, -1.0, -1.0),
        (GSPO, "eps_high", 0.3, 1.0, 1.0),
        (SAPO, "tau_pos", 2.0, 1.0, 1.0),
        (SAPO, "tau_neg", 2.0, 1.0, -1.0),
    ],
)
def test_every_setting_of_an_objective_changes_its_loss(
    settings: Mapping[str, Any], key: str, value: Any, log_ratio: float, advantage: float
):
    assert set(settings) == set(ragged.policy(**settings).model_dump())  # none is left out here
    before = one_token(settings, log_ratio, advantage)[0]
    after = one_token({**settings, key: value}, log_ratio, advantage)[0]
    assert abs(after - before) > 0.01


@pytest.mark.parametrize(
    ("ratio", "weight"), [(1.5, 1.4100), (math.e, 1.4022), (1 / math.e, 0.3334), (1.0, 1.0)]
)
def test_sapo_gradient_is_the_ratio_times_a_soft_gate(ratio: float, weight: float):
    """r sech^2(tau (r - 1) / 2) for tau = 1, to four digits; at r = 1 exactly -A for any tau."""
    assert one_token(SAPO, math.log(ratio), 1.0)[1] == pytest.approx(-weight, abs=6e-5)
    if ratio == 1:
        assert one_token(SAPO, 0.0, -2.0)[1] == pytest.approx(2.0, rel=CLOSE)


# --- numbers that are out of the ordinary ---------------------------------------------------------


@each_policy
def test_poison_where_nothing_is_trained_changes_no_bit(settings: Mapping[str, Any]):
    clean, segments = random_row()
    expected = ragged.evaluate(settings, clean, segments)
    for poison in (float("nan"), float("inf"), float("-inf"), 1e30):
        dirty = {
            f.name: torch.where(clean.mask, getattr(clean, f.name).detach(), poison)
            for f in fields(clean)
            if f.name != "mask"
        }
        dirty["logprobs"].requires_grad_()
        found = ragged.evaluate(settings, LossInputs(**dirty, mask=clean.mask), segments)
        assert torch.equal(found.loss, expected.loss)
        assert found.grad == expected.grad
        assert found.metrics == expected.metrics
    flat = torch.tensor([g for part in expected.grad for g in part])
    assert (flat[~clean.mask] == 0).all() and (flat[clean.mask] != 0).any()


@each_ratio_policy
@pytest.mark.parametrize("log_ratio", [-100.0, -30.0, -1.0, 0.0, 1.0, 30.0, 100.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_any_finite_log_ratio_gives_a_finite_loss_and_gradient(
    settings: Mapping[str, Any], log_ratio: float, advantage: float
):
    """Beside a sequence of ordinary size, whose gradient must be what it is alone."""
    logp = [[log_ratio] * 3, [-0.5, -0.6]]
    old = [[0.0] * 3, [-0.51, -0.61]]
    weight = ragged.spread([0.1, 0.2], logp)
    advantages = ragged.spread([advantage, 0.5], logp)
    both = ragged.row(logp=logp, old=old, advantages=advantages, weight=weight)
    alone = ragged.row(logp=logp[1:], old=old[1:], advantages=advantages[1:], weight=weight[1:])
    found, ordinary = ragged.evaluate(settings, *both), ragged.evaluate(settings, *alone)
    assert math.isfinite(found.loss)
    assert all(map(math.isfinite, found.grad[0]))
    assert found.grad[1] == ordinary.grad[0]
    if abs(log_ratio) > 20 or advantage == 0:
        assert found.grad[0] == [0.0] * 3
    assert all(math.isfinite(v) for v in reduce_metrics([found.metrics]).values())


@each_policy
def test_a_nan_at_a_trained_token_shows_in_the_loss(settings: Mapping[str, Any]):
    inputs, segments = random_row()
    with torch.no_grad():
        inputs.logprobs[0] = float("nan")
    assert math.isnan(ragged.evaluate(settings, inputs, segments).loss)


@each_policy
def test_a_row_that_trains_nothing_has_zero_loss_and_zero_gradient(settings: Mapping[str, Any]):
    inputs, segments = random_row()
    nothing = replace(inputs, mask=torch.zeros_like(inputs.mask))
    found = ragged.evaluate(settings, nothing, segments)
    assert float(found.loss) == 0
    assert {g for part in found.grad for g in part} == {0.0}
    # it has nothing to say about ratios either: no count, no smallest and no largest
    assert {name for name in reduce_metrics([found.metrics])} == {"policy/loss"}


# --- sums -----------------------------------------------------------------------------------------


@each_policy
def test_a_row_split_in_two_gives_the_same_sums_and_counts(settings: Mapping[str, Any]):
    inputs, segments = random_row(seed=3)
    whole = ragged.evaluate(settings, inputs, segments)
    parts = []
    for start, end in ((0, 2), (2, 5)):
        bounds = segments.cu_seqlens[start : end + 1]
        first, last = int(bounds[0]), int(bounds[-1])
        cut = {f.name: getattr(inputs, f.name).detach()[first:last] for f in fields(inputs)}
        cut["logprobs"] = cut["logprobs"].clone().requires_grad_()
        part = Segments(bounds - first)
        parts.append(ragged.evaluate(settings, LossInputs(**cut), part))
    assert parts[0].grad + parts[1].grad == whole.grad
    merged = merge_metrics(part.metrics for part in parts)
    expected = merge_metrics([whole.metrics])
    assert [m.name for m in merged] == [m.name for m in expected]
    for one, two in zip(merged, expected, strict=True):
        assert type(one.value) is type(two.value)
        # float64 sums in another order
        assert vars(one.value) == pytest.approx(vars(two.value), rel=1e-12, abs=1e-12), one.name


@each_ratio_policy
def test_an_unchanged_policy_has_ratio_one_and_clips_nothing(settings: Mapping[str, Any]):
    inputs, segments = random_row()
    same = replace(inputs, old_logprobs=inputs.logprobs.detach().clone())
    found = ragged.evaluate(settings, same, segments)
    values = reduce_metrics([found.metrics])
    for name in ("ratio", "seq_ratio"):
        for kind in ("mean", "min", "max"):
            assert values[f"policy/{name}_{kind}"] == 1.0
    assert values["policy/approx_kl"] == 0.0
    assert [v for k, v in values.items() if "clipfrac" in k or "gatefrac" in k] != []
    assert {v for k, v in values.items() if "clipfrac" in k or "gatefrac" in k} == {0.0}


@each_ratio_policy
def test_the_first_gradient_of_any_ratio_objective_is_the_policy_gradient(
    settings: Mapping[str, Any],
):
    """At ratio 1: -A w; for GSPO averaged over the sequence, hence for one A and w a sequence."""
    logp = [[-1.0, -2.0, -0.5], [-0.25]]
    weight, advantages = ragged.spread([0.1, 0.3], logp), ragged.spread([2.0, -1.5], logp)
    row = ragged.row(logp=logp, old=logp, advantages=advantages, weight=weight)
    found = ragged.evaluate(settings, *row)
    assert found.grad[0] == pytest.approx([-0.2] * 3, rel=CLOSE)
    assert found.grad[1] == pytest.approx([0.45], rel=CLOSE)


def test_the_metrics_of_clipping_count_tokens_and_sequences():
    """Sequence 0 lies above the band with A > 0, sequence 1 inside, sequence 2 below with A < 0."""
    logp = [[0.5] * 4, [0.0] * 3, [-0.5] * 2]
    row = ragged.row(
        logp=logp,
        old=ragged.spread([0, 0, 0], logp),
        advantages=ragged.spread([1, 1, -1], logp),
        weight=ragged.spread([1, 1, 1], logp),
        mask=[[1, 1, 0, 1], [1, 1, 1], [1, 0]],
    )
    metrics = {m.name: m.value for m in ragged.evaluate(GSPO, *row).metrics}
    assert metrics["policy/clipfrac_high"] == Mean(3, 7)
    assert metrics["policy/clipfrac_low"] == Mean(1, 7)
    assert metrics["policy/seq_clipfrac"] == Mean(2, 3)


def test_demonstrations_have_a_likelihood_and_no_ratio():
    logp = [[-1.0, -2.0], [-4.0]]
    row = ragged.row(
        logp=logp,
        old=ragged.spread([9, 9], logp),
        advantages=ragged.spread([7, 7], logp),
        weight=ragged.spread([0.5, 0.25], logp),
    )
    found = ragged.evaluate(SFT, *row)
    assert float(found.loss) == 0.5 * 3 + 0.25 * 4
    assert found.grad == [[-0.5, -0.5], [-0.25]]
    assert {m.name for m in found.metrics} == {"policy/loss", "policy/entropy"}
