"""Failures of other backends, group (a): advantages and reductions. Each case with its scenario and
with further inputs of its kind.

The numbers themselves (ratios, divergences, temperatures) are in test_field_cases_a_numbers.py.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algos.group_advantages import Outcomes, group_advantages
from megarl.algos.objective import Objective
from megarl.algos.segments import Segments
from megarl.config.algo import DrGrpoAdvantage, GrpoAdvantage, RlooAdvantage
from megarl.errors import DataError
from megarl.experience import trained_samples
from megarl.mesh import Mesh
from megarl.monitor.metrics import reduce_metrics
from megarl.types import LossInputs, PackedBatch, Sample
from tests.algos import ragged
from tests.helpers.dist import WorkerPool
from tests.helpers.plans import Completed, completed, config_of, rows_of

CLOSE = 1e-12
SQRT3, SQRT2 = math.sqrt(3), math.sqrt(2)


def sample(
    group: int, mask: Sequence[int], reward: float = 0.0, prompt: int = 2, truncated: bool = False
) -> Sample:
    full = [0] * prompt + list(mask)
    return Sample(
        prompt_id=f"p{group}",
        group=group,
        index=0,
        tokens=np.arange(len(full), dtype=np.int32),
        mask=np.array(full, bool),
        rollout_logprobs=np.where(full, -1.0, 0).astype(np.float32),
        rewards=np.array([reward], np.float32),
        correct=False,
        truncated=truncated,
    )


def metrics_of(ranks: Sequence[Completed]) -> dict[str, float]:
    return reduce_metrics([ranks[0].metrics])


# --- A1: ragged groups ----------------------------------------------------------------------------

A1 = [  # groups of rewards, mean-centred, over the sample and over the population deviation
    ([[1, 0, 0, 1], [5, 5, 5], [2, 4]], [[0.5, -0.5, -0.5, 0.5], [0] * 3, [-1, 1]]),
    ([[0], [1, 0, 0], [3, 3]], [[0], [2 / 3, -1 / 3, -1 / 3], [0, 0]]),
    ([[1, 1, 1, 1, 1, 1, 0], [0, 1]], [[1 / 7] * 6 + [-6 / 7], [-0.5, 0.5]]),
    ([[-2, 2], [100, 104, 102], [0.5] * 5], [[-2, 2], [-2, 2, 0], [0] * 5]),
]


@pytest.mark.parametrize(("rewards", "centred"), A1, ids=str)
def test_a1_ragged_groups_have_baselines_of_their_own_in_input_order(
    rewards: list[list[float]], centred: list[list[float]]
) -> None:
    pairs = [list(zip(*both, strict=True)) for both in zip(rewards, centred, strict=True)]
    flat = [(r, c, g) for g, part in enumerate(pairs) for r, c in part]
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(len(flat)) if seed else range(len(flat))
        r, c, g = zip(*(flat[i] for i in order), strict=True)
        found = group_advantages(DrGrpoAdvantage(), Outcomes.of(r, g))
        assert found.tolist() == pytest.approx(list(c), abs=CLOSE)
        for ddof in (0, 1):
            sigma = [
                math.sqrt(sum(x * x for x in row) / max(1, len(row) - ddof)) or 1.0
                for row in centred
            ]
            section = GrpoAdvantage(eps=0.0, ddof=ddof)
            found = group_advantages(section, Outcomes.of(r, g))
            expected = [x / sigma[k] for x, k in zip(c, g, strict=True)]
            assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=CLOSE)


def test_a1_the_numbers_of_the_case() -> None:
    rewards, groups = [1, 0, 0, 1, 5, 5, 5, 2, 4], [0] * 4 + [1] * 3 + [2] * 2
    for ddof, a, b in ((1, SQRT3 / 2, SQRT2 / 2), (0, 1.0, 1.0)):
        section = GrpoAdvantage(eps=0.0, ddof=ddof)
        found = group_advantages(section, Outcomes.of(rewards, groups))
        assert found.tolist() == pytest.approx([a, -a, -a, a, 0, 0, 0, -b, b], rel=CLOSE)


# --- A3: groups of one ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "singles"),
    [
        ([0] * 8 + [1] + [2] * 8, 1),
        ([0, 1, 1, 2], 2),
        ([5, 5, 5, 9], 1),
        ([3, 1, 2, 1], 2),
        ([0, 1, 2, 3], 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "grpo_loo", "opo", "gpg"])
def test_a3_a_group_of_one_has_advantage_zero_and_is_counted(
    estimator: str, groups: list[int], singles: int, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [sample(g, [1, 1], reward=7.0 + k % 3) for k, g in enumerate(groups)]
    algo = {"policy": {"name": "reinforce"}, "advantage": {"name": estimator}}
    with caplog.at_level(logging.WARNING):
        ranks = completed(samples, config_of(algo=algo))
    alone = {i for i, g in enumerate(groups) if groups.count(g) == 1}
    for row in rows_of(ranks):
        assert torch.isfinite(row.advantages).all()
        for i, start, length in row.segments():
            assert i not in alone or (row.advantages[start : start + length] == 0).all()
    assert metrics_of(ranks)["adv/singleton_groups"] == singles
    nothing = len(set(groups)) == len(groups)
    assert ("there is nothing to compare" in caplog.text) == nothing


# --- A4: trajectories of several samples ----------------------------------------------------------


@pytest.mark.parametrize(
    ("trajectories", "rewards", "expected"),
    [
        ([0, 0, 0, 1], [1, 1, 1, 0], [0.5, 0.5, 0.5, -0.5]),
        ([0, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0.5, -0.5, -0.5, -0.5, -0.5]),
        ([2, 0, 2, 1, 0], [3, 0, 3, 0, 0], [2, -1, 2, -1, -1]),
        ([4, 4, 4, 4], [1, 1, 1, 1], [0, 0, 0, 0]),
        ([0, 0, 1, 2, 2, 2], [2, 2, 1, 0, 0, 0], [1, 1, 0, -1, -1, -1]),
    ],
    ids=str,
)
def test_a4_an_episode_counts_once_however_many_samples_it_was_cut_into(
    trajectories: list[int], rewards: list[float], expected: list[float]
) -> None:
    parts = zip(trajectories, rewards, strict=True)
    samples = [replace(sample(0, [1, 1], float(r)), trajectory=t) for t, r in parts]
    algo = {"policy": {"name": "reinforce"}, "advantage": {"name": "dr_grpo"}}
    (row,) = rows_of(completed(samples, config_of(algo=algo)))
    found = [float(row.advantages[s + 1]) for _, s, _ in row.segments()]
    assert found == pytest.approx(expected, abs=CLOSE)
    flat = group_advantages(RlooAdvantage(), Outcomes.of(rewards, [0] * len(rewards)))
    assert trajectories == [4] * 4 or found != pytest.approx(flat.tolist())


@pytest.mark.parametrize("rewards", [[1, 0, 0], [1, 1, 2], [0.5, 0.25, 0.5], [0, math.nan, 0]])
def test_a4_an_episode_with_two_rewards_is_refused(rewards: list[float]) -> None:
    samples = [replace(sample(0, [1], r), trajectory=3) for r in rewards]
    samples.append(replace(sample(0, [1], 1.0), trajectory=4))
    with pytest.raises(DataError, match="accepted: one reward a trajectory"):
        completed(samples, config_of(algo={"policy": {"name": "gspo"}}))


# --- A6: token mean, whatever the split -----------------------------------------------------------

A6 = [  # token losses of every sequence
    [[1], [2, 2, 2]],
    [[1], [0] * 7, [3, 5]],
    [[-4, 4], [1], [1], [1], [10] * 6],
    [[0.5], [0.25] * 12, [8]],
]


@pytest.mark.parametrize(("dp", "row_tokens"), [(1, 64), (1, 16), (2, 64), (2, 16), (3, 32)])
@pytest.mark.parametrize("losses", A6, ids=str)
def test_a6_the_token_mean_and_its_gradient_do_not_depend_on_the_split(
    losses: list[list[float]], dp: int, row_tokens: int
) -> None:
    """7/4 in the case; 3/2 would be the mean of means. Weights are float32: 6e-8."""
    samples = [sample(g, [1] * len(part)) for g, part in enumerate(losses)]
    algo = {"policy": {"name": "reinforce"}, "aggregation": {"name": "token_mean"}}
    config = config_of(algo=algo, train={"row_tokens": row_tokens})
    total, grads = 0.0, []
    for row in rows_of(completed(samples, config, Mesh(dp=dp))):
        of_token = [np.array([0, 0, *part]) for part in losses]
        row.advantages = -row.spread(lambda i, of=of_token: of[i]).float()
        loss, grad = ones_loss(row)
        total += loss
        grads += [g for g, m in zip(grad.tolist(), row.mask.tolist(), strict=True) if m]
    flat = [x for part in losses for x in part]
    assert total == pytest.approx(sum(flat) / len(flat), rel=2e-7)
    assert sorted(grads) == pytest.approx(sorted(x / len(flat) for x in flat), rel=2e-7)


def ones_loss(row: PackedBatch) -> tuple[float, torch.Tensor]:
    """REINFORCE where every log-prob is 1: the loss of a token is minus its advantage."""
    ones = torch.ones(len(row.tokens))
    lp = ones.clone().requires_grad_()
    inputs = LossInputs(lp, ones, ones, ones, row.advantages, row.weight, row.mask)
    loss = Objective(ragged.policy(name="reinforce"))(inputs, Segments(row.cu_seqlens)).loss
    loss.backward()
    assert lp.grad is not None
    return float(loss.detach()), lp.grad


# --- A7: context parallelism ----------------------------------------------------------------------

BOUNDS = [0, 8, 12, 24]
A7_MASKS: dict[str, list[int]] = {
    "all ones": list(range(24)),
    "a single token": [9],
    "all on rank 0": [0, 1, 6, 7, 8, 11, 12, 13, 14],
    "all on rank 1": [2, 3, 4, 5, 9, 10, 15, 16],
    "empty": [],
    "the last token": [23],
    "one of each sequence": [3, 8, 20],
    "all but one": list(range(1, 24)),
}


@pytest.mark.dist
def test_a7_two_context_parallel_ranks_have_the_gradient_of_one(pool: WorkerPool) -> None:
    """Token means of the global count; what crosses ranks is float64, so that 1e-6 is rounding."""
    wide = {"eps_low": 0.9, "eps_high": 9.0}
    policies = [{"name": name, **wide} for name in ("ppo_clip", "gspo", "gspo_token")]
    policies.append({"name": "reinforce"})
    cases = [(p, a7_row(mask)) for p in policies for mask in A7_MASKS.values()]
    parts = pool.run("tests.algos.work_rows:shares", world=2, cases=cases)
    for k, (settings, row) in enumerate(cases):
        inputs = {n: v.clone() for n, v in row.items() if n != "cu_seqlens"}
        for name in ("logprobs", "entropy"):
            inputs[name].requires_grad_()
        alone = ragged.evaluate(settings, LossInputs(**inputs), Segments(row["cu_seqlens"]))
        grad = sum(rank[k]["grad"] for rank in parts).double()
        torch.testing.assert_close(grad, alone.flat_grad, rtol=1e-6, atol=0)
        assert float(grad.norm()) == pytest.approx(float(alone.flat_grad.norm()), rel=1e-6)
        loss = sum(float(rank[k]["loss"]) for rank in parts)
        assert loss == pytest.approx(float(alone.loss), rel=1e-6, abs=1e-9)
        assert torch.isfinite(grad).all() and (grad[~row["mask"]] == 0).all()
        assert bool((grad != 0).any()) == bool(row["mask"].any())


def a7_row(trained: list[int]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(len(trained))
    mask = torch.zeros(24, dtype=torch.bool)
    mask[trained] = True
    old = -torch.rand(24, generator=random)
    values = {
        "logprobs": old + 0.1 * torch.randn(24, generator=random),
        "entropy": torch.rand(24, generator=random),
        "old_logprobs": old,
        "rollout_logprobs": old,
        "advantages": 1 + torch.rand(24, generator=random),
        "weight": torch.full((24,), 1 / max(1, len(trained))),
    }
    poisoned = {name: torch.where(mask, v, math.nan) for name, v in values.items()}
    return {**poisoned, "mask": mask, "cu_seqlens": torch.tensor(BOUNDS, dtype=torch.int32)}


# --- A9: who divides by what ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "masks",
    [[[1, 1, 0, 0, 0, 1]], [[1, 0, 1], [1]], [[0, 0, 1], [1, 1, 1, 1], [0, 0]], [[1] * 9, [0, 1]]],
    ids=str,
)
def test_a9_every_term_is_divided_by_the_trained_tokens(masks: list[list[int]]) -> None:
    """Policy, divergence, entropy and values: by 3 in the case, not by 6 or by a padded length."""
    samples = [sample(g, mask) for g, mask in enumerate(masks)]
    algo = {"policy": {"name": "reinforce"}, "aggregation": {"name": "token_mean"}}
    n = sum(map(sum, masks))
    for row in rows_of(completed(samples, config_of(algo=algo, train={"row_tokens": 64}))):
        assert row.weight[row.mask].tolist() == pytest.approx([1 / n] * n, rel=1e-7)
        assert (row.weight[~row.mask] == 0).all()
    exact = Fraction(1, n)
    config = config_of(algo={**algo, "kl": {"coef": 1.0}, "entropy": COSTS})
    (ranked,) = completed(samples, config, passes=with_reference)
    (row,) = ranked.plan.steps[0]
    lp = torch.full_like(row.weight, -1.0).requires_grad_()
    entropy = torch.full_like(row.weight, 2.0).requires_grad_()
    inputs = LossInputs(
        *(lp, entropy, row.old_logprobs, row.rollout_logprobs, torch.ones_like(row.weight)),
        *(row.weight, row.mask, row.ref_logprobs),
    )
    loss = Objective.of(config.algo)(inputs, Segments(row.cu_seqlens), ranked.plan.coefficients)
    loss.loss.backward()
    assert entropy.grad is not None and lp.grad is not None
    trained = row.mask
    assert entropy.grad[trained].tolist() == pytest.approx([-0.5 * exact] * n, rel=1e-6)
    # -A for REINFORCE, and x = 0.5 for the weighted k3: lp - lr
    assert lp.grad[trained].tolist() == pytest.approx([(-1 - 0.5) * float(exact)] * n, rel=1e-6)


COSTS = {"name": "constant", "coef": 0.5}


def with_reference(row: PackedBatch) -> None:
    row.old_logprobs = torch.full_like(row.weight, -1.0)
    row.ref_logprobs = torch.full_like(row.weight, -0.5)


# --- A11: a sequence ratio is one number ----------------------------------------------------------


@pytest.mark.parametrize(
    "masks",
    [
        [[1] * 2, [1] * 8],
        [[1], [1] * 20],
        [[1, 0, 0, 1], [1] * 5, [0, 1, 0]],
        [[1] * 3, [0, 0, 0, 0, 1]],
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_a11_sequences_weigh_the_same_whatever_their_length(
    name: str, masks: list[list[int]]
) -> None:
    samples = [sample(g, mask, reward=1.0) for g, mask in enumerate(masks)]
    algo = {"policy": {"name": name}, "advantage": {"name": "dr_grpo", "singleton": "raw"}}
    (row,) = rows_of(completed(samples, config_of(algo=algo)))
    lp = torch.full_like(row.weight, -1.0).requires_grad_()
    assert row.old_logprobs is not None
    old = torch.full_like(row.weight, -1.0)
    inputs = LossInputs(lp, old, old, old, row.advantages, row.weight, row.mask)
    found = Objective(ragged.policy(name=name))(inputs, Segments(row.cu_seqlens))
    found.loss.backward()
    assert float(found.loss.detach()) == pytest.approx(-1.0, rel=1e-6)
    assert lp.grad is not None and lp.grad.shape == row.weight.shape
    for i, start, length in row.segments():
        here = lp.grad[start : start + length]
        assert float(here.sum()) == pytest.approx(-1 / len(masks), rel=1e-6)
        n = sum(masks[i])
        assert here[row.mask[start : start + length]].tolist() == pytest.approx(
            [-1 / len(masks) / n] * n, rel=1e-6
        )


# --- A24: everything is truncated -----------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[3, 4], [1], [2, 2, 2, 2, 2], [7, 1, 5]], ids=str)
@pytest.mark.parametrize("policy", ["gspo", "ppo_clip", "sapo", "gmpo"])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "group_token_mean"])
def test_a24_a_batch_in_which_everything_is_truncated_is_exactly_zero_and_counted(
    aggregation: str, policy: str, lengths: list[int]
) -> None:
    samples = [sample(k % 2, [1] * n, reward=k, truncated=True) for k, n in enumerate(lengths)]
    algo: dict[str, Any] = {"policy": {"name": policy}, "aggregation": {"name": aggregation}}
    config = config_of(algo={**algo, "overlong_filter": True})
    ranks = completed(trained_samples(samples, config.algo), config, Mesh(dp=2))
    for row in rows_of(ranks):
        assert (row.weight == 0).all() and torch.isfinite(row.advantages).all()
        lp = torch.full_like(row.weight, math.nan).requires_grad_()
        inputs = LossInputs(
            lp, *[torch.full_like(lp, math.nan)] * 3, row.advantages, row.weight, row.mask
        )
        found = Objective(ragged.policy(name=policy))(inputs, Segments(row.cu_seqlens))
        found.loss.backward()
        assert float(found.loss.detach()) == 0
        assert lp.grad is not None and (lp.grad == 0).all()
    assert metrics_of(ranks)["resp/all_masked"] == len(lengths)
    assert ranks[0].plan.trained_tokens == [0]
    assert all(map(math.isfinite, metrics_of(ranks).values()))
