"""From samples to rows: what a sample weighs does not depend on where it lies.

Weights and advantages are float32 in rows: 6e-8 of rounding each.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algos.objective import Objective
from megarl.algos.segments import Segments
from megarl.config.policies import ReinforcePolicy
from megarl.experience import make_plan, moving_reference, split_by_group, trained_samples
from megarl.mesh import Mesh
from megarl.monitor.metrics import reduce_metrics
from megarl.types import Coefficients, LossInputs, PackedBatch, Sample, VersionSpan
from tests.helpers.plans import Completed, completed, config_of, rows_of
from tests.helpers.samples import random_samples


def sample(group: int, prompt: int, mask: Sequence[int], reward: float = 0.0) -> Sample:
    full = [0] * prompt + list(mask)
    return Sample(
        prompt_id=f"p{group}",
        group=group,
        index=0,
        tokens=np.arange(len(full), dtype=np.int32),
        mask=np.array(full, bool),
        rollout_logprobs=np.zeros(len(full), np.float32),
        rewards=np.array([reward], np.float32),
        correct=False,
        truncated=False,
    )


RAW = {"name": "dr_grpo", "singleton": "raw"}  # the advantage of a prompt's only sample: its reward


def algo(**settings: Any) -> dict[str, Any]:
    return {"policy": {"name": "reinforce"}, "advantage": RAW, **settings}


def reinforce(row: PackedBatch) -> tuple[float, torch.Tensor]:
    """(loss, gradient [T]) of l = -A lp where every log-prob is 1: token losses are -A."""
    ones = torch.ones(len(row.tokens))
    logprobs = ones.clone().requires_grad_()
    inputs = LossInputs(logprobs, ones, ones, ones, row.advantages, row.weight, row.mask)
    loss = Objective(ReinforcePolicy())(inputs, Segments(row.cu_seqlens)).loss
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad


def numbers(ranks: Sequence[Completed]) -> dict[str, float]:
    found = [reduce_metrics([rank.metrics]) for rank in ranks]
    assert all(one == found[0] for one in found)
    return found[0]


# --- weights --------------------------------------------------------------------------------------

# Sequence A: one token of loss 1. Sequence B: three tokens of loss 2, around a tool's answer.
A, B = sample(0, 2, [1], -1.0), sample(1, 2, [1, 1, 0, 0, 0, 1], -2.0)
EXPECTED = {  # loss, weight of a token of A, of a token of B
    "token_mean": (7 / 4, 1 / 4, 1 / 4),
    "seq_mean_token_mean": (3 / 2, 1 / 2, 1 / 6),
    "seq_mean_token_sum": (7 / 2, 1 / 2, 1 / 2),
    "group_token_mean": (3 / 2, 1 / 2, 1 / 6),
}
SPLITS = [(16, 1), (8, 1), (16, 2), (8, 2), (16, 3)]  # tokens of a row, data-parallel ranks


@pytest.mark.parametrize(("row_tokens", "dp"), SPLITS)
@pytest.mark.parametrize("aggregation", EXPECTED)
def test_loss_and_gradient_do_not_depend_on_the_number_of_rows_and_ranks(
    aggregation: str, row_tokens: int, dp: int
) -> None:
    config = config_of(
        algo=algo(aggregation={"name": aggregation}), train={"row_tokens": row_tokens}
    )
    rows = rows_of(completed([A, B], config, Mesh(dp=dp)))
    assert len(rows) == max(dp, 2 if row_tokens == 8 else 1)
    loss, weight_a, weight_b = EXPECTED[aggregation]
    results = [reinforce(row) for row in rows]
    assert sum(value for value, _ in results) == pytest.approx(loss, rel=2e-7)
    grad = torch.cat([g for _, g in results])
    expected = sorted([weight_a] + [2 * weight_b] * 3)
    assert sorted(grad[grad != 0].tolist()) == pytest.approx(expected, rel=2e-7)


def test_a_sample_that_trains_nothing_counts_in_no_denominator() -> None:
    silent = sample(2, 3, [0, 0], 5.0)
    for aggregation, (loss, _, _) in EXPECTED.items():
        config = config_of(algo=algo(aggregation={"name": aggregation}))
        rows = rows_of(completed([A, silent, B], config))
        assert sum(reinforce(row)[0] for row in rows) == pytest.approx(loss, rel=2e-7)


def test_a_batch_that_trains_nothing_has_zero_loss_and_says_so() -> None:
    silent = [sample(g, 3, [0, 0], 1.0) for g in range(3)]
    for aggregation in EXPECTED:
        ranks = completed(
            silent, config_of(algo=algo(aggregation={"name": aggregation})), Mesh(dp=2)
        )
        for row in rows_of(ranks):
            loss, grad = reinforce(row)
            assert loss == 0 and (grad == 0).all()
        found = numbers(ranks)
        assert found["resp/all_masked"] == 3 and "adv/mean" not in found
        assert all(map(math.isfinite, found.values()))


def test_counts_are_those_of_the_optimizer_step() -> None:
    """Two steps: each is normalised by its own tokens."""
    config = config_of(algo=algo(aggregation={"name": "token_mean"}, minibatches=2))
    (rank,) = completed([A, B], config)
    losses = [sum(reinforce(row)[0] for row in rows) for rows in rank.plan.steps]
    assert losses == pytest.approx([1.0, 2.0], rel=2e-7)
    assert rank.plan.trained_tokens == [1, 3]


def test_rejected_tokens_leave_the_denominator_only_if_it_is_asked_for() -> None:
    """Of B's three tokens one has a ratio of e^3, which masking drops."""
    far = replace(B, rollout_logprobs=np.array([0, 0, 0, -3, 0, 0, 0, 0], np.float32))
    for mask, weight in (("original", 1 / 4), ("kept", 1 / 3)):
        settings = algo(
            aggregation={"name": "token_mean", "denominator_mask": mask},
            correction={"level": "token", "mode": "mask", "high": 2.0},
        )
        ranks = completed([A, far], config_of(algo=settings), Mesh(dp=2), agreeing)
        rows = rows_of(ranks)
        used = [(row.weight * row.correction)[row.mask] for row in rows if row.mask.any()]
        found = sorted(torch.cat(used).tolist())
        assert found == pytest.approx([0.0, weight, weight, weight], rel=2e-7)
        # kept: the rejected token is in no other term of the loss either
        every = sorted(torch.cat([row.weight[row.mask] for row in rows]).tolist())
        rejected = weight if mask == "original" else 0.0
        assert every == pytest.approx([rejected, weight, weight, weight], rel=2e-7)


def agreeing(row: PackedBatch) -> None:
    row.old_logprobs = torch.zeros_like(row.rollout_logprobs)


# --- where samples go -----------------------------------------------------------------------------


MESHES = [Mesh(), Mesh(dp=3), Mesh(cp=2, dp=2), Mesh(tp=2, cp=2), Mesh(pp=4, vpp=2, dp=2)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("minibatches", [1, 2, 3])
def test_every_sample_is_trained_once_in_rows_that_all_ranks_can_run_together(
    mesh: Mesh, minibatches: int
) -> None:
    samples = random_samples(7, 3, seed=4)
    samples = [samples[i] for i in np.random.default_rng(1).permutation(len(samples))]
    config = config_of(
        algo={"policy": {"name": "gspo"}, "minibatches": minibatches}, train={"row_tokens": 64}
    )
    ranks = [make_plan(samples, config, mesh, rank) for rank in range(mesh.dp)]
    parts = split_by_group(samples, minibatches)
    seen: Counter[int] = Counter()
    for step, part in enumerate(parts):
        rows = [row for plan in ranks for row in plan.steps[step]]
        assert len({len(plan.steps[step]) for plan in ranks}) == 1
        assert len(ranks[0].steps[step]) % mesh.rows_multiple == 0
        assert len({len(row.tokens) for row in rows}) == 1
        assert len(rows[0].tokens) % mesh.row_multiple == 0
        assert all(b % mesh.segment_multiple == 0 for row in rows for b in row.cu_seqlens.tolist())
        for row in rows:
            starts = row.cu_seqlens.tolist()
            for k, i in enumerate(row.samples):
                assert i in part
                at = slice(starts[k], starts[k] + int(row.lengths[k]))
                assert row.tokens[at].tolist() == samples[i].tokens.tolist()
                seen[i] += 1
        assert all(
            plan.trained_tokens[step] == sum(samples[i].trained_tokens for i in part)
            for plan in ranks
        )
    assert seen == Counter(range(len(samples)))


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_groups_are_kept_whole_and_dealt_evenly(parts: int) -> None:
    labels = [3, 1, 3, 9, 1, 4, 4, 4, 3, 7]  # ragged and interleaved; 5 groups
    samples = [sample(g, 1, [1]) for g in labels]
    split = split_by_group(samples, parts)
    assert len(split) == parts
    assert sorted(i for part in split for i in part) == list(range(len(labels)))
    assert all(part == sorted(part) for part in split)
    groups = [{labels[i] for i in part} for part in split]
    assert sum(len(g) for g in groups) == 5  # no group in two parts
    sizes = [len(g) for g in groups]
    assert max(sizes) - min(sizes) <= 1


def test_fewer_groups_than_parts_leaves_parts_empty_not_broken() -> None:
    assert split_by_group([sample(0, 1, [1])] * 2, 3) == [[0, 1], [], []]
    assert split_by_group([], 2) == [[], []]
    config = config_of(algo={"policy": {"name": "reinforce"}, "minibatches": 2})
    for rows in (rows_of(completed([A], config, Mesh(dp=2)), step) for step in (0, 1)):
        assert len(rows) == 2 and len({len(row.tokens) for row in rows}) == 1
    for rank in completed([], config, Mesh(dp=2)):
        assert [len(rows) for rows in rank.plan.steps] == [1, 1]


def test_the_plan_of_every_rank_is_a_function_of_the_samples_alone() -> None:
    samples = random_samples(4, 4, seed=2)
    config = config_of(algo={"policy": {"name": "gspo"}}, train={"row_tokens": 64})
    one, two = (make_plan(samples, config, Mesh(dp=2), 1) for _ in range(2))
    for a, b in zip(one.steps[0], two.steps[0], strict=True):
        for field in fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


# --- advantages -----------------------------------------------------------------------------------

# Groups 10, 20 and 30 of rewards [1,0,0,1], [5,5,5] and [2,4], interleaved
GROUPS = [20, 10, 30, 10, 20, 10, 30, 20, 10]
REWARDS = [5, 1, 2, 0, 5, 0, 4, 5, 1]
CENTRED = [0, 0.5, -1, -0.5, 0, -0.5, 1, 0, 0.5]


def advantages(
    samples: Sequence[Sample], settings: dict[str, Any], dp: int = 1
) -> tuple[list[float], dict[str, float]]:
    """(one a sample, which is that of all its trained tokens; metrics)"""
    ranks = completed(samples, config_of(algo=algo(**settings)), Mesh(dp=dp))
    found: dict[int, float] = {}
    for row in rows_of(ranks):
        assert (row.advantages[~row.mask] == 0).all()
        for i, start, length in row.segments():
            here = slice(start, start + length)
            values = set(row.advantages[here][row.mask[here]].tolist())
            assert len(values) <= 1
            found[i] = values.pop() if values else 0.0
    return [found[i] for i in range(len(samples))], numbers(ranks)


def scored(rewards: Sequence[float], groups: Sequence[int]) -> list[Sample]:
    return [sample(g, 1, [1, 0, 1], r) for g, r in zip(groups, rewards, strict=True)]


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_advantages_of_ragged_interleaved_groups_go_to_their_own_samples(dp: int) -> None:
    found, metrics = advantages(scored(REWARDS, GROUPS), {"advantage": {"name": "dr_grpo"}}, dp)
    assert found == CENTRED
    assert metrics["adv/zero_group_frac"] == pytest.approx(1 / 3)
    assert metrics["adv/abs_mean"] == pytest.approx(4 / 9)
    assert (metrics["adv/min"], metrics["adv/max"]) == (-1, 1)
    assert metrics["reward/mean"] == pytest.approx(sum(REWARDS) / 9)
    assert metrics["adv/singleton_groups"] == metrics["reward/nonfinite"] == 0


def test_the_reward_of_a_sample_is_the_sum_of_its_parts() -> None:
    one, two = scored([0, 0], [0, 0])
    parts = replace(one, rewards=np.array([1.0, -0.25], np.float32))
    assert advantages([parts, two], {"advantage": {"name": "dr_grpo"}})[0] == [0.375, -0.375]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "name", ["dr_grpo", "gdpo", "reinforce_pp", "reinforce_pp_baseline", "grpo_process"]
)
def test_a_reward_that_is_no_number_trains_nothing_and_spoils_no_other(
    name: str, bad: float
) -> None:
    settings = {"advantage": {"name": name}}
    samples = [
        replace(
            s,
            step_rewards=np.array([s.reward, 1.0], np.float32),
            step_ends=np.array([1, 3], np.int32),
        )
        for s in scored([1.0, 0.0, 0.5, 1.0, 3.0], [0, 0, 0, 1, 1])
    ]
    broken = [*samples[:2], replace(samples[2], rewards=np.array([bad], np.float32)), *samples[3:]]
    ranks = completed(broken, config_of(algo=algo(**settings)), Mesh(dp=2))
    for row in rows_of(ranks):
        assert torch.isfinite(row.advantages).all()
        for i, start, length in row.segments():
            assert (row.advantages[start : start + length] != 0).any() == (i != 2)
    assert numbers(ranks)["reward/nonfinite"] == 1


def test_a_trajectorys_length_penalty_is_that_of_all_its_samples() -> None:
    """Three samples of 2 tokens each: 6, which is 2 beyond where the punishment starts."""
    episode = [replace(s, trajectory=4) for s in scored([1.0] * 3, [0] * 3)]
    other = scored([1.0], [0])
    settings = {"advantage": {"name": "dr_grpo"}, "overlong": {"l_max": 8, "l_cache": 4}}
    assert advantages([*episode, *other], settings)[0] == [-0.25, -0.25, -0.25, 0.25]


@pytest.mark.parametrize(
    ("sampled", "trained", "penalty"), [(40, 5, -1.0), (30, 1, -0.5), (25, 25, -0.25), (20, 2, 0.0)]
)
def test_long_responses_are_punished_whatever_of_them_is_trained(
    sampled: int, trained: int, penalty: float
) -> None:
    """Of ``sampled`` tokens the last ``trained`` are of the weights that are masked to; of the
    other sample's 10 all are. The penalty begins beyond 20 tokens and is whole at 40.
    """
    spans = (VersionSpan(3, 0, sampled - trained), VersionSpan(4, sampled - trained, sampled))
    long = sample(0, 2, [0] * (sampled - trained) + [1] * trained)
    pair = [replace(long, version_spans=spans), replace(sample(0, 2, [1] * 10), index=1)]
    overlong = {"l_max": 40, "l_cache": 20}
    settings = {"advantage": {"name": "dr_grpo"}, "overlong": overlong}
    found, metrics = advantages(pair, settings)  # minus the mean of the two
    assert found == [penalty / 2, -penalty / 2]
    assert metrics["resp/len_max"] == sampled and metrics["resp/len_mean"] == (sampled + 10) / 2


def test_a_batch_without_a_group_of_two_warns(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"advantage": {"name": "grpo"}}
    with caplog.at_level(logging.WARNING):
        found, metrics = advantages(scored([1.0, 0.0, 1.0], [0, 1, 2]), settings)
    assert found == [0.0] * 3 and metrics["adv/singleton_groups"] == 3
    assert "none of 3 prompts has two samples" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        advantages(scored([1.0, 0.0, 1.0], [0, 0, 2]), settings)
    assert caplog.text == ""


def test_truncated_responses_are_not_trained_if_they_are_filtered() -> None:
    samples = scored([1.0, 0.0, 1.0], [0, 0, 0])
    cut = [samples[0], replace(samples[1], truncated=True), samples[2]]
    config = config_of(algo=algo(overlong_filter=True))
    found = trained_samples(cut, config.algo)
    assert [s.trained_tokens for s in found] == [2, 0, 2]
    assert trained_samples(cut, config_of(algo=algo()).algo) == cut
    (rank,) = completed(found, config)
    assert rank.plan.trained_tokens == [4]


# --- what one broken number may touch -------------------------------------------------------------

BROKEN = {
    "whitened returns": {"advantage": {"name": "reinforce_pp"}, "kl": {"coef": 0.1, "type": "k1"}},
    "kl_cov": {"policy": {"name": "kl_cov", "ratio": 0.3}},
    "normalised weights": {"correction": {"level": "token", "high": 2, "batch_normalize": True}},
    "adaptive": {
        "kl": {"coef": 0.1, "adaptive": {"target": 0.1, "horizon": 10}},
        "entropy": {"name": "adaptive", "c0": 0.1},
    },
}
BROKEN["whitened returns"]["kl"]["place"] = "reward"


@pytest.mark.parametrize("settings", BROKEN.values(), ids=list(BROKEN))
def test_one_old_log_prob_that_is_nan_spoils_its_own_sequence_at_most(
    settings: dict[str, Any],
) -> None:
    """Else the whole step is lost, blamed on every sample, and a controller never recovers."""
    samples = random_samples(6, 4, seed=3)
    config = config_of(algo=algo(**settings), train={"row_tokens": 96})

    def passes(row: PackedBatch) -> None:
        row.old_logprobs = row.rollout_logprobs + 0.1
        row.ref_logprobs = row.rollout_logprobs - 0.2
        row.old_entropy = torch.ones_like(row.rollout_logprobs)
        for i, start, length in row.segments():
            if i == 9:
                at = start + int(row.mask[start : start + length].nonzero()[0])
                row.old_logprobs[at] = row.old_entropy[at] = math.nan

    ranks = completed(samples, config, Mesh(dp=2), passes)
    for row in rows_of(ranks):
        for i, start, length in row.segments():
            if i != 9:
                for values in (row.advantages, row.correction, row.weight):
                    assert values is None or torch.isfinite(values[start : start + length]).all()
    for rank in ranks:
        assert all(math.isfinite(x) for x in rank.controllers.state().values() if x is not None)
        assert rank.plan.coefficients == ranks[0].plan.coefficients != Coefficients(math.nan)
    assert all(map(math.isfinite, numbers(ranks).values()))


@pytest.mark.parametrize(
    ("every", "moves"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4])]
)
def test_the_reference_moves_after_every_so_many_steps(every: int, moves: list[int]) -> None:
    algo = {"policy": {"name": "gspo"}, "kl": {"coef": 0.1, "reference_every": every}}
    config = config_of(algo=algo)
    assert [step for step in range(1, 7) if moving_reference(config, step)] == moves
    assert moving_reference(config) == bool(every)
    assert not moving_reference(config_of(algo={"policy": {"name": "gspo"}}), 2)
