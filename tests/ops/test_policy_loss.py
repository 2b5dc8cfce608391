"""policy_loss and policy_sums: against formulas written out token by token (``plain_policy.py``),
and what must not change a bit.

The torch form of the objectives is compared with the op on every row that tests/algos evaluates.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos.segments import Segments
from megarl.ops import _native
from megarl.ops.policy_loss import (
    KL_TYPES,
    KL_WEIGHTS,
    OBJECTIVES,
    OPSM,
    SUMS,
    TOTALS,
    PolicyLoss,
    PolicyRow,
    PolicyTerms,
    policy_loss,
    policy_sums,
)
from megarl.types import Coefficients, LossInputs
from tests.algos import ragged
from tests.ops.plain_policy import REALS, WHOLE_SEQUENCES, Plain, Sums, plain
from tests.ops.policy_rows import (
    KINDS,
    SPOILT,
    as_numpy,
    combinations,
    row,
    terms,
    variants,
    with_garbage,
    without,
)

pytestmark = pytest.mark.skipif(
    not _native.native_devices("policy_loss"), reason="the compiled operators are not built"
)

# Relative to the sizes of the terms. f32: the log-ratio is rounded to 6e-8 of log-probs up to 4,
# and sapo's gate is an exponential of an exponential.
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}
EXTREMES = ("ratio_min", "ratio_max")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
objectives = pytest.mark.parametrize("objective", OBJECTIVES)


def bits(*tensors: Tensor) -> list[bytes]:
    return [x.detach().contiguous().numpy().tobytes() for x in tensors]


def totals_of(found: PolicyLoss) -> dict[str, float]:
    return dict(zip(TOTALS, found.totals.tolist(), strict=True))


def assert_close(found: float, value: float, size: float, tolerance: float, what: object) -> None:
    if math.isnan(value) or math.isinf(value):
        assert found == value or (math.isnan(found) and math.isnan(value)), (what, found, value)
        return
    assert abs(found - value) <= tolerance * size + 1e-30, (what, found, value, size)


def assert_sums(found: Tensor, expected: Plain, tolerance: float) -> None:
    """Of sequences that are dropped whole, what is only reported may be there or not."""
    for k, name in enumerate(SUMS):
        for s, value in enumerate(found[k].tolist()):
            if s in expected.dead and name in ("square", "distance"):
                continue
            sums: Sums = expected.sums
            assert_close(value, sums.value[name, s], sums.size[name, s], tolerance, (name, s))


def assert_as_written(
    whole: PolicyRow, given_terms: PolicyTerms, found: PolicyLoss, tolerance: float
) -> None:
    expected = plain(as_numpy(whole), given_terms)
    for t, g in enumerate(found.grad_logprobs.tolist()):
        assert_close(g, expected.grad.value[t], expected.grad.size[t], tolerance, ("token", t))
    assert_sums(found.sums, expected, tolerance)
    totals = totals_of(found)
    for name in set(TOTALS) - set(EXTREMES):
        value, size = expected.totals.value[name], expected.totals.size[name]
        assert_close(totals[name], value, size, tolerance, name)
    assert totals["ratio_min"] == pytest.approx(expected.ratio_min, rel=tolerance)
    assert totals["ratio_max"] == pytest.approx(expected.ratio_max, rel=tolerance)
    if given_terms.parameters["entropy_coef"]:
        assert found.grad_entropy.tolist() == pytest.approx(expected.grad_entropy, rel=tolerance)
    else:
        assert found.grad_entropy.numel() == 0


# --- values ---------------------------------------------------------------------------------------


@dtypes
@objectives
def test_every_combination_is_as_written(objective, dtype):
    rows = {kind: row(kind, dtype) for kind in KINDS}
    for kind, given_terms, absent in combinations(objective):
        whole = without(rows[kind], *absent)
        found = policy_loss(whole, given_terms)
        assert_as_written(whole, given_terms, found, TOLERANCE[dtype])
        if kind != "ordinary":
            continue
        sums = policy_sums(whole, given_terms)
        assert_sums(sums, plain(as_numpy(whole), given_terms), TOLERANCE[dtype])


@objectives
def test_sequences_longer_than_a_block_are_as_written(objective):
    """Kernels take blocks of 128 tokens, in lanes of 16."""
    every = itertools.product(((129,), (128, 127), (300, 15, 17)), variants(objective))
    for lengths, given_terms in every:
        whole = row(lengths=lengths, spread=0.1)
        assert_as_written(whole, given_terms, policy_loss(whole, given_terms), 1e-12)


def test_the_rows_meet_every_bound():
    """Guards the tests above: every flag is raised by some tokens and not by all."""
    seen: dict[str, set[str]] = {}
    for objective in OBJECTIVES:
        totals = totals_of(policy_loss(row(), terms(objective)))
        flags = [k for k in TOTALS if k.startswith("flag") and 0 < totals[k] < totals["tokens"]]
        seen[objective] = set(flags)
    counts = {name: len(flags) for name, flags in seen.items()}
    assert counts == {
        **{"reinforce": 0, "sft": 0, "ppo_clip": 3, "cispo": 4, "sapo": 1, "aspo": 4},
        **{"minirl": 3, "kl_cov": 1, "gspo": 2, "gspo_token": 2, "gmpo": 2},
    }
    whole, silent = row(), terms("reinforce", kl_type="", opsm="old", entropy_coef=0.0)
    off = policy_loss(whole, silent).grad_logprobs == 0
    assert off.sum() > policy_loss(whole, replace(silent, opsm="")).grad_logprobs.eq(0).sum()


@dtypes
def test_exponentials_keep_their_digits(dtype):
    """e^x, e^x - 1 and e^x - 1 - x, seen through one token's ratio, distance and divergence."""
    small = [s * 10.0**k for k in range(-12, 1) for s in (1, -1, 3.3, -3.3)]
    ends = [s * x for x in (0.3465, 0.3466, 1.0397, 5.0, 19.99, 20.0, 21.0, 1e30) for s in (1, -1)]
    x = torch.tensor([0.0, *small, *ends], dtype=dtype)
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    whole = PolicyRow(
        logprobs=zero,
        old_logprobs=-x,
        advantages=zero,
        weight=one,
        mask=one > 0,
        cu_seqlens=torch.arange(len(x) + 1),
        ref_logprobs=x,
    )
    wide = dict(kl_coef=1.0, kl_input_clamp=20.0, kl_output_clamp=math.inf)
    found = policy_loss(whole, PolicyTerms("reinforce", wide, "k3", "none"))
    eps = torch.finfo(dtype).eps
    near = np.clip(x.double().numpy(), -20, 20)
    expm1 = np.expm1(near)
    np.testing.assert_allclose(found.sums[SUMS.index("distance")], abs(expm1), rtol=4 * eps)
    inside = abs(x.double().numpy()) <= 20
    slope = np.where(inside, -expm1, 0)
    np.testing.assert_allclose(found.grad_logprobs, slope, rtol=4 * eps)
    for k, value in enumerate(near):
        alone = PolicyRow(
            **{n: None if v is None else v[k : k + 1] for n, v in vars(whole).items()}
        )
        alone = replace(alone, cu_seqlens=torch.tensor([0, 1]))
        totals = totals_of(policy_loss(alone, PolicyTerms("reinforce", wide, "k3", "none")))
        series = sum(value**i / math.factorial(i) for i in range(2, 12))
        k3 = series if abs(value) < 0.1 else math.expm1(value) - value
        assert totals["ratio_max"] == pytest.approx(math.exp(value), rel=4 * eps)
        assert totals["approx_kl_k3"] == pytest.approx(k3, rel=16 * eps, abs=1e-300)
        assert totals["kl"] == pytest.approx(k3, rel=16 * eps, abs=1e-300)


def test_only_losses_flags_and_the_mean_log_ratio_without_all_metrics():
    for objective in OBJECTIVES:
        given_terms = terms(objective)
        every = policy_loss(row(), given_terms)
        few = policy_loss(row(), replace(given_terms, all_metrics=False))
        assert bits(few.grad_logprobs, few.grad_entropy) == bits(*every[:2])
        left_out = ("entropy", "approx_kl_k3", "ratio", "ratio_sq", "ratio_clamped", "mean")
        expected = totals_of(every) | dict.fromkeys(left_out, 0.0)
        expected |= {"ratio_min": math.inf, "ratio_max": -math.inf}
        assert totals_of(few) == expected


# --- a row on several ranks -----------------------------------------------------------------------


def parts_of(whole: PolicyRow) -> list[tuple[Tensor, PolicyRow]]:
    """(tokens, row) of two ranks: of every sequence each has some tokens, perhaps none."""
    owner = torch.rand(len(whole.mask), generator=torch.Generator().manual_seed(3)) < 0.4
    owner[:6] = False  # two whole sequences on one rank
    parts = []
    for mine in (owner, ~owner):
        counts = [int(mine[a:b].sum()) for a, b in pairwise(whole.cu_seqlens.tolist())]
        part = {k: v[mine] for k, v in vars(whole).items() if k != "cu_seqlens"}
        bounds = torch.tensor([0, *counts]).cumsum(0)
        parts.append((mine.nonzero().flatten(), PolicyRow(**part, cu_seqlens=bounds)))
    return parts


@dtypes
@objectives
def test_halves_with_added_sums_are_the_whole(objective, dtype):
    for kind, given_terms in itertools.product(KINDS, variants(objective)):
        whole = row(kind, dtype)
        expected, size = policy_loss(whole, given_terms), plain(as_numpy(whole), given_terms)
        parts = parts_of(whole)
        sums = sum(policy_sums(part, given_terms) for _, part in parts)
        assert_sums(sums, size, TOLERANCE[dtype])
        grad, grad_entropy = torch.zeros(2, len(whole.mask), dtype=dtype)
        totals: dict[str, list[float]] = {name: [] for name in TOTALS}
        for tokens, part in parts:
            found = policy_loss(part, given_terms, sums)
            assert bits(found.sums) == bits(sums)  # handed back as they came
            grad[tokens], grad_entropy[tokens] = found.grad_logprobs, found.grad_entropy
            for name, value in totals_of(found).items():
                totals[name].append(value)
        for t, g in enumerate(grad.tolist()):
            value = float(expected.grad_logprobs[t])
            assert_close(g, value, size.grad.size[t], TOLERANCE[dtype], (kind, "token", t))
        assert torch.equal(grad_entropy, expected.grad_entropy)
        for name, value in totals_of(expected).items():
            if name in EXTREMES:
                assert (min if name == "ratio_min" else max)(totals[name]) == value
            else:
                added, scale = sum(totals[name]), size.totals.size[name]
                assert_close(added, value, scale, TOLERANCE[dtype], (kind, name))


@dtypes
@objectives
def test_sums_handed_in_are_those_found_on_the_way(objective, dtype):
    whole = row(dtype=dtype)
    rounding = dict(rtol=4 * torch.finfo(dtype).eps, atol=0.0)
    for given_terms in variants(objective):
        found = policy_loss(whole, given_terms)
        handed_in = policy_loss(whole, given_terms, policy_sums(whole, given_terms))
        torch.testing.assert_close(handed_in.grad_logprobs, found.grad_logprobs, **rounding)
        assert bits(*handed_in[1:]) == bits(*found[1:])


# --- what changes no bit --------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@dtypes
@pytest.mark.parametrize("objective", ["ppo_clip", "gspo", "gmpo"])
def test_threads_and_repetition_change_no_bit(objective, dtype):
    rng = np.random.default_rng(0)
    lengths = tuple(int(n) for n in rng.integers(0, 9000, 24))  # some 7 threads' worth
    whole = row(dtype=dtype, lengths=lengths)
    for given_terms in variants(objective):
        results = []
        for count in (1, 1, 2, 3, 8):
            torch.set_num_threads(count)
            found = policy_loss(whole, given_terms)
            results.append(bits(*found, policy_sums(whole, given_terms)))
        assert all(result == results[0] for result in results)


@objectives
def test_other_sequences_change_no_bit_of_a_sequence(objective):
    """Other company, another place, another order."""
    lengths = (5, 130, 0, 16, 33)
    whole = row(SPOILT, torch.float32, lengths)
    bounds = whole.cu_seqlens.tolist()
    orders = ([4, 2, 0, 3, 1], [0, 1, 2, 3, 4, 1, 1], [3], [1, 0])
    for order, given_terms in itertools.product(orders, variants(objective)):
        expected = policy_loss(whole, given_terms)
        tokens = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in order])
        part = {k: v[tokens] for k, v in vars(whole).items() if k != "cu_seqlens"}
        counts = torch.tensor([0, *(lengths[s] for s in order)])
        found = policy_loss(PolicyRow(**part, cu_seqlens=counts.cumsum(0)), given_terms)
        assert bits(found.grad_logprobs) == bits(expected.grad_logprobs[tokens])
        assert bits(found.grad_entropy) == bits(expected.grad_entropy[tokens])
        assert bits(found.sums) == bits(expected.sums[:, order])


@dtypes
@objectives
def test_garbage_at_masked_positions_changes_no_bit(objective, dtype):
    for kind, given_terms in itertools.product(KINDS, variants(objective)):
        whole = row(kind, dtype)
        dirty = {n: with_garbage(getattr(whole, n), ~whole.mask, k) for k, n in enumerate(REALS)}
        poisoned = replace(whole, **dirty, selected=whole.selected ^ ~whole.mask)
        assert bits(*policy_loss(poisoned, given_terms)) == bits(*policy_loss(whole, given_terms))
        assert bits(policy_sums(poisoned, given_terms)) == bits(policy_sums(whole, given_terms))


@pytest.mark.parametrize("objective", [o for o in OBJECTIVES if o != "minirl"])
def test_garbage_in_rows_that_are_not_read_changes_no_bit(objective):
    quiet = terms(objective, kl_type="", opsm="old", entropy_coef=0.0)
    whole = without(row(), "correction")
    everywhere = torch.ones_like(whole.mask)
    unread = ("rollout_logprobs", "ref_logprobs", "entropy")
    dirty = {n: with_garbage(getattr(whole, n), everywhere, k) for k, n in enumerate(unread)}
    clean, found = policy_loss(whole, quiet), policy_loss(replace(whole, **dirty), quiet)
    assert bits(*found[:3]) == bits(*clean[:3])
    # entropy is reported as it is, though nothing is decided by it
    assert totals_of(found) == pytest.approx(totals_of(clean) | {"entropy": math.nan}, nan_ok=True)
    absent = policy_loss(without(whole, *unread), quiet)
    assert bits(*absent[:3]) == bits(*clean[:3])
    assert totals_of(absent) == totals_of(clean) | {"entropy": 0.0}


def test_a_token_that_is_not_finite_spoils_what_it_should():
    whole = row()
    at = int(whole.cu_seqlens[5]) + int(whole.mask[whole.cu_seqlens[5] :].nonzero()[3])
    for name in REALS:
        values = getattr(whole, name).clone()
        values[at] = math.nan
        for objective, given_terms in ((o, t) for o in OBJECTIVES for t in variants(o)):
            if name == "ref_logprobs" and not given_terms.kl_type:
                continue
            found = policy_loss(replace(whole, **{name: values}), given_terms)
            assert totals_of(found)["dropped"] == 1
            assert found.grad_logprobs.isfinite().all() and found.totals.isfinite().all()
            assert found.sums.isfinite().all()
            spoilt = slice(int(whole.cu_seqlens[5]), int(whole.cu_seqlens[6]))
            silent = (found.grad_logprobs[spoilt] == 0).all()
            assert bool(silent) == (objective in WHOLE_SEQUENCES), (name, objective)


# --- hypothesis -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=6).map(tuple),
    st.sampled_from(KINDS),
    st.sampled_from(OBJECTIVES),
    st.floats(1e-3, 3.0),
    st.integers(0, 2**31),
    st.booleans(),
    st.integers(0, 2),
)
def test_rows_of_any_shape_are_as_written(
    lengths, kind, objective, spread, seed, all_metrics, variant
):
    whole = row(kind, lengths=lengths, seed=seed, spread=spread)
    given_terms = replace(variants(objective)[variant], all_metrics=all_metrics)
    assert_as_written(whole, given_terms, policy_loss(whole, given_terms), 1e-11)


SETTINGS = [
    *({"name": name} for name in ("reinforce", "sft", "ppo_clip", "sapo", "minirl", "kl_cov")),
    {"name": "ppo_clip", "dual_clip": 1.5},
    {"name": "cispo", "w_max": 1.2, "ppo_mask": True, "eps_low": 0.2, "eps_high": 0.3},
    {"name": "aspo", "entropy_quantile": 0.8},
    *({"name": n, "eps_low": 0.1, "eps_high": 0.2} for n in ("gspo", "gspo_token", "gmpo")),
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=6).map(tuple),
    st.sampled_from(KINDS),
    st.sampled_from(SETTINGS),
    st.sampled_from(KL_TYPES[1:]),
    st.sampled_from(KL_WEIGHTS),
    st.sampled_from(OPSM),
    st.integers(0, 2**31),
)
def test_rows_of_any_shape_are_as_the_objectives_specify(
    lengths, kind, policy, kl_type, kl_weight, opsm, seed
):
    """``ragged.evaluate`` compares loss, gradients and every metric with ``Objective.evaluate``."""
    whole = row(kind, lengths=lengths, seed=seed)
    values = {f.name: getattr(whole, f.name) for f in fields(LossInputs)}
    for name in ("logprobs", "entropy"):
        values[name].requires_grad_()
    ragged.evaluate(
        policy,
        LossInputs(**values),
        Segments(whole.cu_seqlens),
        kl={"type": kl_type, "is_weight": kl_weight},
        opsm={"delta": 0.02, "against": opsm} if opsm else None,
        coefficients=Coefficients(kl=0.2, entropy=0.1 * (seed % 2)),
    )
