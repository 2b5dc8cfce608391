"""From samples to rows: what a sample weighs does not depend on where it lies."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algos.advantages import group_advantages
from megarl.algos.objective import Objective
from megarl.algos.segments import Segments
from megarl.config.schema import Config, ReinforcePolicy
from megarl.experience import advantages_of, make_plan, split_by_group
from megarl.mesh import Mesh
from megarl.monitor.metrics import reduce_metrics
from megarl.types import LossInputs, Mean, PackedBatch, Sample, TrainPlan
from tests.helpers.samples import random_samples


def config_of(**sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": "unused", "steps": 1},
        "model": {"hf": "unused"},
        "optim": {"lr": 1.0},
        "algo": {"policy": {"name": "reinforce"}},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Config.model_validate(base)


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


def plans(samples: Sequence[Sample], advantages: Sequence[float], config: Config, mesh: Mesh):
    return [make_plan(samples, advantages, config, mesh, rank) for rank in range(mesh.dp)]


def rows_of(plans: Sequence[TrainPlan], step: int = 0) -> list[PackedBatch]:
    return [row for plan in plans for row in plan.steps[step]]


def reinforce(row: PackedBatch) -> tuple[float, torch.Tensor]:
    """(loss, gradient [T]) of l = -A lp where every log-prob is 1: token losses are -A."""
    ones = torch.ones(len(row.tokens))
    logprobs = ones.clone().requires_grad_()
    inputs = LossInputs(logprobs, ones, ones, ones, row.advantages, row.weight, row.mask)
    loss, _ = Objective(ReinforcePolicy())(inputs, Segments(row.cu_seqlens))
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad


# --- weights --------------------------------------------------------------------------------------

# Sequence A: one token of loss 1. Sequence B: three tokens of loss 2, around a tool's answer.
A, B = sample(0, 2, [1]), sample(1, 2, [1, 1, 0, 0, 0, 1])
EXPECTED = {  # loss, weight of a token of A, of a token of B
    "token_mean": (7 / 4, 1 / 4, 1 / 4),
    "seq_mean_token_mean": (3 / 2, 1 / 2, 1 / 6),
    "seq_mean_token_sum": (7 / 2, 1 / 2, 1 / 2),
}
SPLITS = [(16, 1), (8, 1), (16, 2), (8, 2), (16, 3)]  # tokens of a row, data-parallel ranks


@pytest.mark.parametrize(("row_tokens", "dp"), SPLITS)
@pytest.mark.parametrize("aggregation", EXPECTED)
def test_loss_and_gradient_do_not_depend_on_the_number_of_rows_and_ranks(
    aggregation: str, row_tokens: int, dp: int
) -> None:
    config = config_of(
        algo={"policy": {"name": "reinforce"}, "aggregation": aggregation},
        train={"row_tokens": row_tokens},
    )
    rows = rows_of(plans([A, B], [-1.0, -2.0], config, Mesh(dp=dp)))
    assert len(rows) == max(dp, 2 if row_tokens == 8 else 1)
    loss, weight_a, weight_b = EXPECTED[aggregation]
    results = [reinforce(row) for row in rows]
    # weights are rounded to float32 (6e-8)
    assert sum(value for value, _ in results) == pytest.approx(loss, rel=2e-7)
    grad = torch.cat([g for _, g in results])
    expected = sorted([weight_a] + [2 * weight_b] * 3)
    assert sorted(grad[grad != 0].tolist()) == pytest.approx(expected, rel=2e-7)


def test_a_sample_that_trains_nothing_counts_in_no_denominator() -> None:
    silent = sample(2, 3, [0, 0])
    for aggregation, (loss, _, _) in EXPECTED.items():
        config = config_of(algo={"policy": {"name": "reinforce"}, "aggregation": aggregation})
        rows = rows_of(plans([A, silent, B], [-1.0, 5.0, -2.0], config, Mesh()))
        assert sum(reinforce(row)[0] for row in rows) == pytest.approx(loss, rel=2e-7)


def test_a_batch_that_trains_nothing_has_zero_loss() -> None:
    silent = [sample(g, 3, [0, 0]) for g in range(3)]
    for aggregation in EXPECTED:
        config = config_of(algo={"policy": {"name": "reinforce"}, "aggregation": aggregation})
        for row in rows_of(plans(silent, [1.0] * 3, config, Mesh(dp=2))):
            loss, grad = reinforce(row)
            assert loss == 0 and (grad == 0).all()


def test_counts_are_those_of_the_optimizer_step() -> None:
    """Two steps: each is normalised by its own tokens."""
    config = config_of(
        algo={"policy": {"name": "reinforce"}, "aggregation": "token_mean", "minibatches": 2}
    )
    (plan,) = plans([A, B], [-1.0, -2.0], config, Mesh())
    losses = [sum(reinforce(row)[0] for row in rows) for rows in plan.steps]
    assert losses == pytest.approx([1.0, 2.0], rel=2e-7)


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
    advantages = [float(i + 1) for i in range(len(samples))]
    ranks = plans(samples, advantages, config, mesh)
    parts = split_by_group(samples, minibatches)
    seen: Counter[int] = Counter()
    for step, part in enumerate(parts):
        rows = rows_of(ranks, step)
        assert len({len(plan.steps[step]) for plan in ranks}) == 1
        assert len(ranks[0].steps[step]) % mesh.rows_multiple == 0
        assert len({len(row.tokens) for row in rows}) == 1
        assert len(rows[0].tokens) % mesh.row_multiple == 0
        assert all(b % mesh.segment_multiple == 0 for row in rows for b in row.cu_seqlens.tolist())
        for row in rows:
            starts = row.cu_seqlens.tolist()
            for k, i in enumerate(row.samples):  # an index into the step's samples
                original = part[i]
                at = slice(starts[k], starts[k] + int(row.lengths[k]))
                assert row.tokens[at].tolist() == samples[original].tokens.tolist()
                used = set(row.advantages[at][row.mask[at]].tolist())
                assert used <= {advantages[original]}
                seen[original] += 1
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
    for rows in (rows_of(plans([A], [1.0], config, Mesh(dp=2)), step) for step in (0, 1)):
        assert len(rows) == 2 and len({len(row.tokens) for row in rows}) == 1
    for plan in plans([], [], config, Mesh(dp=2)):
        assert [len(rows) for rows in plan.steps] == [1, 1]


def test_the_plan_of_every_rank_is_a_function_of_the_samples_alone() -> None:
    samples = random_samples(4, 4, seed=2)
    config = config_of(algo={"policy": {"name": "gspo"}}, train={"row_tokens": 64})
    one, two = (make_plan(samples, [0.5] * 16, config, Mesh(dp=2), 1) for _ in range(2))
    for a, b in zip(one.steps[0], two.steps[0], strict=True):
        for field in fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


# --- advantages -----------------------------------------------------------------------------------

# Groups 10, 20 and 30 of rewards [1,0,0,1], [5,5,5] and [2,4], interleaved
GROUPS = [20, 10, 30, 10, 20, 10, 30, 20, 10]
REWARDS = [5, 1, 2, 0, 5, 0, 4, 5, 1]
CENTRED = [0, 0.5, -1, -0.5, 0, -0.5, 1, 0, 0.5]


def advantages(estimator: str, rewards: Sequence[float], groups: Sequence[int]):
    samples = [sample(g, 1, [1], r) for g, r in zip(groups, rewards, strict=True)]
    config = config_of(algo={"policy": {"name": "reinforce"}, "advantage": estimator})
    return advantages_of(samples, config)


def test_mean_centred_advantages_of_ragged_interleaved_groups_are_in_input_order() -> None:
    found, metrics = advantages("dr_grpo", REWARDS, GROUPS)
    assert found == CENTRED
    assert dict((m.name, m.value) for m in metrics) == {
        "adv/zero_group_frac": Mean(1, 3),
        "adv/abs_mean": Mean(4, 9),
    }


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    """sigma = 1/sqrt(3) for [1,0,0,1] and sqrt(2) for [2,4] (ddof 1), plus 1e-6."""
    found, _ = advantages("grpo", REWARDS, GROUPS)
    sigma = {10: 3**-0.5, 20: 1.0, 30: 2**0.5}
    expected = [c / (sigma[g] + 1e-6) for c, g in zip(CENTRED, GROUPS, strict=True)]
    assert found == pytest.approx(expected, rel=1e-12)
    assert sorted({round(abs(a), 3) for a in found}) == [0, 0.707, 0.866]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    found, _ = advantages("rloo", REWARDS, GROUPS)
    for i, g in enumerate(GROUPS):
        others = [r for k, r in enumerate(REWARDS) if GROUPS[k] == g and k != i]
        assert found[i] == pytest.approx(REWARDS[i] - sum(others) / len(others), abs=1e-12)


def test_equal_rewards_give_zero_even_where_rounding_makes_their_mean_another_number() -> None:
    """The mean of seven times 0.1 is not 0.1."""
    assert np.mean([0.1] * 7) != 0.1
    for estimator in ("grpo", "dr_grpo", "rloo"):
        assert group_advantages(estimator, [0.1] * 7, [0] * 7).tolist() == [0.0] * 7


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_has_advantage_zero(estimator: str) -> None:
    found, metrics = advantages(estimator, [7.0, 1.0, 0.0], [0, 1, 1])
    assert found[0] == 0.0 and found[1] > 0 and found[2] < 0
    assert reduce_metrics([metrics])["adv/zero_group_frac"] == 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_a_reward_that_is_no_number_leaves_its_group_as_if_it_were_not_there(
    estimator: str, bad: float
) -> None:
    found, _ = advantages(estimator, [1.0, bad, 0.0, 0.5, bad, 2.0], [0, 0, 0, 0, 1, 1])
    without, _ = advantages(estimator, [1.0, 0.0, 0.5], [0, 0, 0])
    assert [found[0], found[2], found[3]] == without
    assert found[1] == found[4] == found[5] == 0.0  # group 1 is left with one sample


def test_the_reward_of_a_sample_is_the_sum_of_its_parts() -> None:
    first, second = (sample(0, 1, [1]) for _ in range(2))
    parts = {**vars(first), "rewards": np.array([1.0, -0.25], np.float32)}
    found, _ = advantages_of([Sample(**parts), second], config_of(algo=dr_grpo()))
    assert found == [0.375, -0.375]


def dr_grpo() -> dict[str, Any]:
    return {"policy": {"name": "reinforce"}, "advantage": "dr_grpo"}


def test_no_samples_have_no_advantages() -> None:
    found, metrics = advantages_of([], config_of())
    assert found == [] and reduce_metrics([metrics]) == {}
