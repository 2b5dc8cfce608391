"""The loss of a row: its terms, what is masked, dropped and counted.

What each objective computes is in test_surrogates.py and test_sequence_surrogates.py. Unless a test
says otherwise, tolerances are a few float32 roundings (6e-8 relative) of values near 1.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from megarl.algos.objective import Objective
from megarl.algos.presets import SURROGATES
from megarl.algos.segments import Segments
from megarl.config.algo import KlSection, OpsmSection
from megarl.monitor.metrics import merge_metrics, reduce_metrics
from megarl.types import Coefficients, LossInputs, Mean
from tests.algos import ragged

CLOSE = 1e-6

REINFORCE = {"name": "reinforce"}
PPO = {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0}
GSPO = {"name": "gspo", "eps_low": 0.1, "eps_high": 0.2}
SFT = {"name": "sft"}
RATIO_POLICIES = [
    PPO,
    GSPO,
    {**GSPO, "name": "gspo_token"},
    {"name": "gmpo", "eps_low": 0.3, "eps_high": 0.3},
    {"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.05},
    {"name": "cispo", "w_max": 1.2, "ppo_mask": True, "eps_low": 0.2, "eps_high": 0.3},
    {"name": "aspo", "entropy_quantile": 0.8},
    {"name": "minirl", "tis_max": 1.5},
    {"name": "kl_cov"},
]
POLICIES = [REINFORCE, *RATIO_POLICIES, SFT]
SEQUENCE_POLICIES = {"gspo", "gspo_token", "gmpo"}
EVERYTHING = Coefficients(kl=0.3, entropy=0.1)

each_policy = pytest.mark.parametrize("settings", POLICIES, ids=lambda s: s["name"])
each_ratio_policy = pytest.mark.parametrize("settings", RATIO_POLICIES, ids=lambda s: s["name"])


def random_row(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[LossInputs, Segments]:
    """Five sequences with holes in the mask, one of them all masked; log-ratios on both sides of
    every trust region above.
    """
    random = torch.Generator().manual_seed(seed)
    lengths = [6, 1, 9, 4, 12]
    total = sum(lengths)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(total, generator=random, dtype=dtype)

    old = -3 * torch.rand(total, generator=random, dtype=dtype)
    mask = torch.rand(total, generator=random) < 0.75
    mask[0] = mask[6] = True
    mask[16:20] = False
    inputs = LossInputs(
        logprobs=(old + normal(0.4)).requires_grad_(),
        entropy=torch.rand(total, generator=random, dtype=dtype).requires_grad_(),
        old_logprobs=old,
        rollout_logprobs=old + normal(0.1),
        advantages=normal(1.0),
        weight=torch.rand(total, generator=random, dtype=dtype),
        mask=mask,
        ref_logprobs=old + normal(0.5),
        correction=torch.rand(total, generator=random, dtype=dtype),
        selected=torch.rand(total, generator=random) < 0.3,
    )
    return inputs, Segments(torch.tensor([0, *lengths]).cumsum(0).int())


def changed(inputs: LossInputs, **values: torch.Tensor) -> LossInputs:
    """A copy whose log-probs and entropies are leaves of their own."""
    parts = {f.name: getattr(inputs, f.name).detach().clone() for f in fields(inputs)} | values
    for name in ("logprobs", "entropy"):
        parts[name] = parts[name].detach().clone().requires_grad_()
    return LossInputs(**parts)


def with_all_terms(settings: Mapping[str, Any], inputs: LossInputs, segments: Segments) -> Any:
    return ragged.evaluate(
        settings,
        inputs,
        segments,
        kl={"type": "k3"},
        opsm={"delta": 0.05, "against": "rollout"},
        coefficients=EVERYTHING,
    )


# --- terms ----------------------------------------------------------------------------------------


def test_the_loss_is_the_weighted_sum_of_its_terms_and_only_the_policy_term_is_corrected() -> None:
    """Written out for two sequences of REINFORCE, k2 and entropy in float64."""
    lp, ref = [[-1.0, -2.0], [-0.5]], [[-1.25, -1.5], [-1.0]]
    a, w = [[2.0, -1.0], [3.0]], [[0.5, 0.25], [0.125]]
    c, h = [[0.5, 2.0], [0.0]], [[0.1, 0.3], [0.7]]
    row = ragged.row(
        logp=lp,
        old=lp,
        advantages=a,
        weight=w,
        ref=ref,
        correction=c,
        entropy=h,
        dtype=torch.float64,
    )
    found = ragged.evaluate(REINFORCE, *row, kl={"type": "k2"}, coefficients=EVERYTHING)
    loss = 0.0
    for i, part in enumerate(lp):
        for t, x in enumerate(part):
            d = ref[i][t] - x
            token = -c[i][t] * a[i][t] * x + 0.3 * d * d / 2 - 0.1 * h[i][t]
            grad = w[i][t] * (-c[i][t] * a[i][t] - 0.3 * d)
            loss += w[i][t] * token
            assert found.grad[i][t] == pytest.approx(grad, rel=1e-12)
            assert found.grad_entropy[i][t] == pytest.approx(-0.1 * w[i][t], rel=1e-12)
    assert float(found.loss) == pytest.approx(loss, rel=1e-12)
    parts = ("policy/pg_loss", "policy/kl_loss", "policy/entropy_loss")
    assert math.fsum(found.value(p) or 0.0 for p in parts) == pytest.approx(loss, rel=1e-12)


@each_policy
def test_the_loss_scales_with_what_it_is_multiplied_by(settings: Mapping[str, Any]) -> None:
    """A schedule's loss scale reaches both gradients."""
    inputs, segments = random_row()
    once = with_all_terms(settings, inputs, segments)
    again = changed(inputs)
    objective = Objective(
        ragged.policy(**settings), KlSection(coef=0.3), OpsmSection(delta=0.05, against="rollout")
    )
    (objective(again, segments, EVERYTHING).loss * 4).backward()
    assert again.entropy.grad is not None and once.grad_entropy
    flat = torch.tensor([g for part in once.grad_entropy for g in part])
    assert torch.equal(again.entropy.grad, 4 * flat)


# --- numbers that are out of the ordinary ---------------------------------------------------------


@each_policy
def test_poison_where_nothing_is_trained_changes_no_bit(settings: Mapping[str, Any]) -> None:
    clean, segments = random_row()
    expected = with_all_terms(settings, clean, segments)
    for poison in (math.nan, math.inf, -math.inf, 1e30):
        dirty = {
            f.name: torch.where(clean.mask, getattr(clean, f.name).detach(), poison)
            for f in fields(clean)
            if f.name not in ("mask", "selected")
        }
        selected = torch.where(clean.mask, clean.selected, True)
        found = with_all_terms(settings, changed(clean, **dirty, selected=selected), segments)
        assert torch.equal(found.loss, expected.loss)
        assert (found.grad, found.grad_entropy) == (expected.grad, expected.grad_entropy)
        assert found.metrics == expected.metrics
        assert not any(d for part in found.dropped for d in part)
    flat = expected.flat_grad
    assert (flat[~clean.mask] == 0).all() and (flat[clean.mask] != 0).any()


NUMBERS = [f.name for f in fields(LossInputs) if f.name not in ("mask", "selected")]


@each_policy
@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_trained_token_that_is_not_finite_is_dropped_as_if_it_were_masked(
    settings: Mapping[str, Any], field: str, bad: float
) -> None:
    """Of a sequence objective its whole sequence is; weights of the others stay what they were."""
    inputs, segments = random_row()
    at = 8  # in the sequence [7, 16)
    assert inputs.mask[at]
    values = getattr(inputs, field).detach().clone()
    values[at] = bad
    found = with_all_terms(settings, changed(inputs, **{field: values}), segments)
    gone = torch.zeros_like(inputs.mask)
    gone[7:16] = settings["name"] in SEQUENCE_POLICIES
    gone[at] = True
    expected = with_all_terms(settings, changed(inputs, mask=inputs.mask & ~gone), segments)
    assert torch.equal(found.loss, expected.loss)
    assert (found.grad, found.grad_entropy) == (expected.grad, expected.grad_entropy)
    flags = torch.tensor([d for part in found.dropped for d in part])
    assert flags.nonzero().flatten().tolist() == [at]
    assert found.value("policy/nonfinite_tokens") == 1
    assert all(map(math.isfinite, reduce_metrics([found.metrics]).values()))


@each_policy
def test_what_is_not_read_may_be_anything(settings: Mapping[str, Any]) -> None:
    """Reference log-probs without divergence, rollout log-probs without anything that compares with
    them, entropy without a bonus.
    """
    inputs, segments = random_row()
    inputs = without_correction(inputs)
    expected = ragged.evaluate(settings, inputs, segments)
    unread = {"ref_logprobs", "entropy", "rollout_logprobs"}
    if settings["name"] == "minirl":
        unread.remove("rollout_logprobs")
    dirty = {name: torch.full_like(inputs.weight, math.nan) for name in unread}
    found = ragged.evaluate(settings, without_correction(inputs, **dirty), segments)
    assert torch.equal(found.loss, expected.loss) and found.grad == expected.grad
    assert not any(d for part in found.dropped for d in part)


def without_correction(inputs: LossInputs, **values: torch.Tensor) -> LossInputs:
    whole = replace(inputs, correction=torch.ones_like(inputs.weight))
    return replace(changed(whole, **values), correction=None)


@each_policy
def test_a_row_that_trains_nothing_has_zero_loss_and_zero_gradient(
    settings: Mapping[str, Any],
) -> None:
    inputs, segments = random_row()
    nothing = replace(inputs, mask=torch.zeros_like(inputs.mask))
    found = with_all_terms(settings, nothing, segments)
    assert float(found.loss) == 0
    assert {g for part in found.grad + found.grad_entropy for g in part} == {0.0}
    # it has nothing to say about ratios either: no mean, no smallest and no largest
    assert set(reduce_metrics([found.metrics]).values()) == {0.0}
    assert not any("ratio" in name for name in reduce_metrics([found.metrics]))


# --- sums -----------------------------------------------------------------------------------------


@each_policy
def test_a_row_split_in_two_gives_the_same_sums_and_counts(settings: Mapping[str, Any]) -> None:
    inputs, segments = random_row(seed=3)
    whole = with_all_terms(settings, changed(inputs), segments)
    parts = []
    for start, end in ((0, 2), (2, 5)):
        bounds = segments.cu_seqlens[start : end + 1]
        first, last = int(bounds[0]), int(bounds[-1])
        cut = {f.name: getattr(inputs, f.name).detach()[first:last] for f in fields(inputs)}
        part = changed(inputs, **cut)
        parts.append(with_all_terms(settings, part, Segments(bounds - first)))
    assert parts[0].grad + parts[1].grad == whole.grad
    merged = merge_metrics(part.metrics for part in parts)
    expected = merge_metrics([whole.metrics])
    assert [m.name for m in merged] == [m.name for m in expected]
    for one, two in zip(merged, expected, strict=True):
        assert type(one.value) is type(two.value)
        # float64 sums in another order
        assert vars(one.value) == pytest.approx(vars(two.value), rel=1e-12, abs=1e-12), one.name


def test_long_sums_do_not_lose_a_mean_log_ratio_of_1e_3() -> None:
    """131072 tokens of float32 near -3, differences of exactly +-2^-10: their mean is exactly
    2^-11, which sums of log-probs in float32 would miss by more than GSPO's whole band.
    """
    n = 131072
    old = torch.full((n,), -3.0)
    step = torch.full((n,), 2.0**-10)
    step[::4] *= -1
    ones = torch.ones(n)
    inputs = LossInputs(
        *((old + step).requires_grad_(), ones, old, old, ones, ones / n, torch.ones(n).bool())
    )
    found = ragged.evaluate(GSPO, inputs, Segments(torch.tensor([0, n], dtype=torch.int32)))
    s = math.exp(2.0**-11)
    assert float(found.loss) == pytest.approx(-s, rel=1e-12)
    assert found.grad[0][0] == pytest.approx(-s / n, rel=CLOSE)


# --- metrics --------------------------------------------------------------------------------------


@each_ratio_policy
def test_an_unchanged_policy_has_ratio_one_and_clips_nothing(settings: Mapping[str, Any]) -> None:
    inputs, segments = random_row()
    lp = inputs.logprobs.detach()
    same = changed(inputs, old_logprobs=lp.clone(), rollout_logprobs=lp.clone())
    values = reduce_metrics([ragged.evaluate(settings, same, segments).metrics])
    for name in ("ratio", "seq_ratio"):
        for kind in ("mean", "min", "max"):
            assert values[f"policy/{name}_{kind}"] == 1.0
    assert values["policy/approx_kl_k1"] == values["policy/approx_kl_k3"] == 0.0
    flags = ("frac", "capped", "raised", "clamped", "differ", "dropped")
    assert {v for k, v in values.items() if any(flag in k for flag in flags)} == {0.0}


@each_ratio_policy
def test_the_metrics_of_ratios_are_those_of_a_naive_loop(settings: Mapping[str, Any]) -> None:
    inputs, segments = random_row(dtype=torch.float64)
    values = reduce_metrics([ragged.evaluate(settings, changed(inputs), segments).metrics])
    d = (inputs.logprobs.detach() - inputs.old_logprobs).tolist()
    mask, bounds = inputs.mask.tolist(), segments.cu_seqlens.tolist()
    used = [x for x, m in zip(d, mask, strict=True) if m]
    per_sequence = [[d[t] for t in range(a, b) if mask[t]] for a, b in pairwise(bounds)]
    means = [math.fsum(s) / len(s) for s in per_sequence if s]
    ratios = [math.exp(x) for x in used]
    expected = {
        "approx_kl_k1": -math.fsum(used) / len(used),
        "approx_kl_k3": math.fsum(math.exp(x) - 1 - x for x in used) / len(used),
        "ratio_mean": math.fsum(ratios) / len(used),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "seq_ratio_mean": math.fsum(map(math.exp, means)) / len(means),
        "seq_ratio_min": math.exp(min(means)),
        "seq_ratio_max": math.exp(max(means)),
        "seq_ratio_distance": math.fsum(
            math.fsum(abs(math.exp(x) - 1) for x in s) / len(s) for s in per_sequence if s
        )
        / len(means),
    }
    for name, value in expected.items():
        assert values[f"policy/{name}"] == pytest.approx(value, rel=1e-9), name


@each_policy
def test_without_all_metrics_there_are_fewer_and_none_is_another(
    settings: Mapping[str, Any],
) -> None:
    inputs, segments = random_row()
    every, few = (
        reduce_metrics(
            [Objective(ragged.policy(**settings), all_metrics=a)(inputs, segments).metrics]
        )
        for a in (True, False)
    )
    assert few == {name: every[name] for name in few}
    left_out = {name.removeprefix("policy/") for name in every.keys() - few.keys()}
    assert "entropy" in left_out
    assert not any(name.startswith(("clipfrac", "weight_")) for name in left_out)


def test_the_metrics_of_clipping_count_tokens_and_sequences() -> None:
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


def test_demonstrations_have_a_likelihood_and_no_ratio() -> None:
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
    assert not any("ratio" in m.name or "kl" in m.name for m in found.metrics)
    assert set(SURROGATES) == {s["name"] for s in POLICIES}  # this file's list is complete
