"""What is written into rows from samples and passes: rewards of tokens, bootstrap values,
coefficients. Naive loops over the tokens of each sample by itself.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algos.control import Controllers
from megarl.errors import DataError
from megarl.experience import complete_plan, make_plan
from megarl.mesh import Mesh
from megarl.monitor.metrics import reduce_metrics
from megarl.types import PackedBatch, Sample
from tests.helpers.plans import completed, config_of, rows_of
from tests.helpers.rich import Numbers, rich_numbers, rich_samples, set_passes

SAMPLES = rich_samples(seed=2)
NUMBERS = rich_numbers(SAMPLES, seed=2)
CLOSE = {"rel": 1e-5, "abs": 1e-5}  # of values up to some 10, from and in float32


def passes(row: PackedBatch) -> None:
    set_passes(row, NUMBERS, recompute=True)


def naive_rewards(i: int, penalty: float) -> list[float]:
    """Of the trained tokens of sample i: steps where they end (or at the trained token before), the
    outcome at the last, minus the divergence k1 clamped at 10.
    """
    s, numbers = SAMPLES[i], NUMBERS[i]
    assert s.step_rewards is not None and s.step_ends is not None and s.ref_logprobs is not None
    out: list[float] = []
    for t, trained in enumerate(s.mask.tolist()):
        if trained:
            gap = float(s.ref_logprobs[t]) - float(numbers.old_logprobs[t])
            k1 = max(-10.0, min(10.0, -max(-20.0, min(20.0, gap))))
            out.append(-penalty * k1)
        earned = [float(r) for r, e in zip(s.step_rewards, s.step_ends, strict=True) if e == t]
        if out:
            out[-1] += math.fsum(earned)
    if out:
        out[-1] += s.reward
    return out


def naive_gae(i: int, gamma: float, lam: float, bootstrap: bool, penalty: float) -> list[float]:
    s = SAMPLES[i]
    assert s.values is not None
    rewards = naive_rewards(i, penalty)
    # the value of the state before token t is that after token t - 1
    values = [float(s.values[t - 1]) for t in np.flatnonzero(s.mask)]
    after = float(s.values[-1]) if bootstrap and s.truncated else 0.0
    later, out = 0.0, [0.0] * len(rewards)
    for k in range(len(rewards) - 1, -1, -1):
        later = rewards[k] + gamma * after - values[k] + gamma * lam * later
        out[k], after = later, values[k]
    return out


def assigned(algo: dict[str, Any], field: str = "advantages") -> dict[int, list[float]]:
    found = {}
    for row in rows_of(completed(SAMPLES, config_of(algo=algo), Mesh(dp=2), passes)):
        for i, start, length in row.segments():
            here = slice(start, start + length)
            found[i] = getattr(row, field)[here][row.mask[here]].tolist()
    return found


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 0.25])
def test_gae_is_that_of_rewards_values_and_bootstraps_of_the_samples(
    bootstrap: bool, penalty: float
) -> None:
    gae = {"name": "gae", "gamma": 0.9, "lam": 0.8, "whiten": False}
    algo: dict[str, Any] = {
        "policy": {"name": "ppo_clip"},
        "advantage": gae | {"bootstrap_truncated": bootstrap},
        "kl": {"type": "k1", "coef": penalty, "place": "reward"},
    }
    advantages, returns = assigned(algo), assigned(algo, "returns")
    for i, s in enumerate(SAMPLES):
        if not math.isfinite(s.reward):
            assert set(advantages[i]) <= {0.0}
            continue
        expected = naive_gae(i, 0.9, 0.8, bootstrap, penalty)
        assert advantages[i] == pytest.approx(expected, **CLOSE)
        assert s.values is not None
        values = [float(s.values[t - 1]) for t in np.flatnonzero(s.mask)]
        to_go = [a + v for a, v in zip(expected, values, strict=True)]
        assert returns[i] == pytest.approx(to_go, **CLOSE)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_reinforce_pp_whitens_the_discounted_rewards_of_all_trained_tokens(gamma: float) -> None:
    algo = {
        "policy": {"name": "reinforce"},
        "advantage": {"name": "reinforce_pp", "gamma": gamma},
        "kl": {"type": "k1", "coef": 0.1, "place": "reward"},
    }
    returns: dict[int, list[float]] = {}
    for i, s in enumerate(SAMPLES):
        if math.isfinite(s.reward):
            r = naive_rewards(i, 0.1)
            returns[i] = [
                math.fsum(gamma**j * x for j, x in enumerate(r[k:])) for k in range(len(r))
            ]
    flat = [x for row in returns.values() for x in row]
    mean = math.fsum(flat) / len(flat)
    scale = math.sqrt(math.fsum((x - mean) ** 2 for x in flat) / (len(flat) - 1) + 1e-8)
    for i, found in assigned(algo).items():
        expected = [(x - mean) / scale for x in returns.get(i, [])] or [0.0] * len(found)
        assert found == pytest.approx(expected, **CLOSE)


def test_coefficients_are_of_this_steps_measurements_and_move_afterwards() -> None:
    """Three training steps; the first one's coefficients are the configuration's. A step in which
    the policy is not trained has coefficients and moves nothing.
    """
    algo = {
        "policy": {"name": "ppo_clip"},
        "kl": {"type": "k2", "coef": 0.5, "adaptive": {"target": 1.0, "horizon": 1000}},
        "entropy": {"name": "adaptive", "c0": 0.1, "delta": 0.05, "target": 0.5},
    }
    config = config_of(algo=algo, train={"row_tokens": 256})
    controllers = Controllers.of(config.algo)
    beta, c = 0.5, 0.1
    for step, entropy in enumerate((1.0, 0.1, 0.2)):
        numbers = rich_numbers(SAMPLES, seed=step, entropy=entropy)
        plan = make_plan(SAMPLES, config, Mesh(), 0)
        for row in plan.steps[0]:
            set_passes(row, numbers, recompute=True)
        before = controllers.state()
        complete_plan(plan, SAMPLES, config, controllers, steer=False)
        assert controllers.state() == before
        complete_plan(plan, SAMPLES, config, controllers)
        kl, e = measured(numbers)
        assert plan.coefficients.kl == pytest.approx(beta, rel=1e-9)
        assert plan.coefficients.entropy == pytest.approx(c if e <= 0.5 else 0.0, rel=1e-9)
        beta *= 1 + max(-0.2, min(0.2, kl - 1.0)) * len(SAMPLES) / 1000
        c = min(1.0, max(0.0, c + (0.05 if e <= 0.5 else -0.05)))
    assert controllers.state()["kl"] == pytest.approx(beta, rel=1e-9)
    assert controllers.state()["entropy"] == pytest.approx(c, rel=1e-9)


def measured(numbers: list[Numbers]) -> tuple[float, float]:
    """Token means of the old policy's k2, with both clamps, and entropy."""
    kls, entropies = [], []
    for s, n in zip(SAMPLES, numbers, strict=True):
        assert s.ref_logprobs is not None
        for t in np.flatnonzero(s.mask):
            x = float(s.ref_logprobs[t]) - float(n.old_logprobs[t])
            kls.append(min(10.0, max(-20.0, min(20.0, x)) ** 2 / 2))
            entropies.append(float(n.old_entropy[t]))
    return math.fsum(kls) / len(kls), math.fsum(entropies) / len(entropies)


def test_a_penalty_in_the_reward_has_the_controllers_coefficient() -> None:
    """The configuration's, doubled by hand as a controller would move it."""
    algo = {
        "policy": {"name": "reinforce"},
        "advantage": {"name": "gae", "whiten": False, "masked_reward": "credit_prev"},
        "kl": {"type": "k1", "coef": 0.2, "place": "reward"}
        | {"adaptive": {"target": 1.0, "horizon": 10}},
    }
    config = config_of(algo=algo, train={"row_tokens": 4096})
    controllers = Controllers.of(config.algo)
    controllers.load_state({"kl": 0.4, "entropy": 0.0})
    plan = make_plan(SAMPLES, config, Mesh(), 0)
    (row,) = plan.steps[0]
    passes(row)
    complete_plan(plan, SAMPLES, config, controllers)
    assert plan.coefficients.kl == 0.4
    for i, start, length in row.segments():
        if math.isfinite(SAMPLES[i].reward):
            here = slice(start, start + length)
            found = row.advantages[here][row.mask[here]].tolist()
            assert found == pytest.approx(naive_gae(i, 1.0, 1.0, False, 0.4), **CLOSE)


def with_steps(samples: list[Sample], k: int, **changes: Any) -> list[Sample]:
    return [replace(s, **changes) if i == k else s for i, s in enumerate(samples)]


PROCESS = {"policy": {"name": "reinforce"}, "advantage": {"name": "grpo_process"}}


def test_a_response_without_steps_has_no_process_advantage() -> None:
    """One that never ended was not scored; the others of its prompt still are."""
    cut = with_steps(SAMPLES, 1, truncated=True, step_rewards=None, step_ends=None)
    (alone,) = completed(cut, config_of(algo=PROCESS), Mesh(), passes)
    for row in rows_of([alone]):
        for i, start, length in row.segments():
            assert i != 1 or (row.advantages[start : start + length] == 0).all()
    assert any((row.advantages != 0).any() for row in rows_of([alone]))
    none = [replace(s, truncated=False, step_rewards=None, step_ends=None) for s in SAMPLES]
    with pytest.raises(DataError, match="has step rewards"):
        completed(none, config_of(algo=PROCESS), Mesh(), passes)


@pytest.mark.parametrize("end", [-1, 0, 999])
def test_a_step_that_ends_outside_its_sample_is_an_error_that_names_it(end: int) -> None:
    moved = with_steps(SAMPLES, 1, step_ends=np.full_like(SAMPLES[1].step_ends, end))
    with pytest.raises(DataError, match=SAMPLES[1].name):
        completed(moved, config_of(algo=PROCESS), Mesh(), passes)


def test_components_of_a_batch_in_which_nothing_ended_teach_nothing() -> None:
    cut = [replace(s, truncated=True, rewards=np.zeros(1, np.float32)) for s in SAMPLES]
    algo = {**PROCESS, "advantage": {"name": "gdpo", "weights": [1.0, 0.5]}}
    for row in rows_of(completed(cut, config_of(algo=algo), Mesh(), passes)):
        assert (row.advantages == 0).all()


def test_a_correction_reports_what_it_keeps_and_how_its_weights_spread() -> None:
    """From the weights that the rows got, over two ranks."""
    correction = {"level": "token", "mode": "mask", "low": 0.8, "high": 1.25}
    algo = {"policy": {"name": "reinforce"}, "correction": correction}
    ranks = completed(SAMPLES, config_of(algo=algo), Mesh(dp=2), passes)
    rows = rows_of(ranks)
    weights = torch.cat([row.correction[row.mask] for row in rows if row.correction is not None])
    found = reduce_metrics([ranks[0].metrics])
    kept = float((weights > 0).float().mean())
    assert 0 < kept < 1
    assert found["correction/kept_tokens"] == pytest.approx(kept, rel=1e-6)
    assert found["correction/weight_mean"] == pytest.approx(float(weights.mean()), rel=1e-5)
    spread = float(weights.std(correction=0))
    assert found["correction/weight_std"] == pytest.approx(spread, rel=1e-4)
