"""Advantages of groups, against one naive loop a sample. Groups are ragged and interleaved."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from megarl.algos.group_advantages import GROUP_ESTIMATORS, Outcomes, group_advantages
from megarl.config.algo import Advantage
from megarl.errors import DataError

CLOSE = 1e-12
NAN = math.nan

#           group 20: 4 samples; 10: all equal; 30: one; 40: two, one of them NaN; 50: three
GROUPS = [20, 10, 30, 20, 10, 50, 40, 20, 10, 50, 40, 20, 50]
REWARDS = [1.0, 0.1, 7.0, 0.0, 0.1, 2.0, NAN, 0.25, 0.1, 2.0, 3.0, 1.5, -1.0]
LENGTHS = [3, 5, 2, 8, 1, 0, 4, 2, 6, 7, 1, 5, 2]
TRUNCATED = [0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0]


def section(**settings: Any) -> Any:
    return TypeAdapter(Advantage).validate_python(settings)


def outcomes(**changes: Any) -> Outcomes:
    return replace(Outcomes.of(REWARDS, GROUPS, LENGTHS, TRUNCATED), **changes)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float], ddof: int) -> float:
    m = mean(values)
    return math.sqrt(math.fsum((v - m) ** 2 for v in values) / (len(values) - ddof))


def naive(s: Any, out: Outcomes) -> list[float]:
    """Every sample by itself, from the definitions."""
    n = range(len(out.rewards))
    counted = [math.isfinite(out.rewards[i]) for i in n]
    if s.truncated_variant == "exclude":
        counted = [c and not t for c, t in zip(counted, out.truncated.tolist(), strict=True)]
    everything = [out.rewards[i] for i in n if counted[i]]
    of = {g: [i for i in n if counted[i] and out.groups[i] == g] for g in set(out.groups.tolist())}
    informative = sum(len(m) for m in of.values() if len({out.rewards[i] for i in m}) > 1)
    found = []
    for i in n:
        members = of[int(out.groups[i])]
        rewards = [float(out.rewards[j]) for j in members]
        silent = not math.isfinite(out.rewards[i]) or (s.truncated_variant and out.truncated[i])
        if silent or not counted[i]:
            found.append(0.0)
        elif len(members) == 1:
            found.append(naive_singleton(s, float(out.rewards[i]), everything))
        elif len(set(rewards)) == 1:
            found.append(0.0)
        else:
            others = [float(out.rewards[j]) for j in members if j != i]
            lengths = [int(out.lengths[j]) for j in members]
            batch = (everything, informative)
            found.append(naive_one(s, float(out.rewards[i]), rewards, others, lengths, batch))
    return found


def naive_singleton(s: Any, reward: float, everything: list[float]) -> float:
    if s.singleton == "zero":
        return 0.0
    if s.name != "grpo" or s.scale == "none":
        return reward
    return reward / ((1.0 if s.scale == "group" else std(everything, s.ddof)) + s.eps)


def naive_one(
    s: Any,
    r: float,
    rewards: list[float],
    others: list[float],
    lengths: list[int],
    batch: tuple[list[float], int],
) -> float:
    match s.name:
        case "grpo":
            scale = {
                "group": lambda: std(rewards, s.ddof) + s.eps,
                "batch": lambda: std(batch[0], s.ddof) + s.eps,
                "none": lambda: 1.0,
            }[s.scale]()
            return (r - mean(rewards)) / scale
        case "dr_grpo":
            return r - mean(rewards)
        case "rloo":
            return r - mean(others)
        case "grpo_loo":
            spread = len(others) > s.ddof and len(set(others)) > 1
            return (r - mean(others)) / (std(others, s.ddof) + s.eps if spread else 1.0)
        case "opo":
            total = sum(lengths)
            base = sum(n * x for n, x in zip(lengths, rewards, strict=True)) / total
            return r - base
        case "gpg":
            return (r - mean(rewards)) * len(batch[0]) / batch[1] / s.f_norm
    raise AssertionError(s.name)


SECTIONS: list[dict[str, Any]] = [
    *({"name": "grpo", "ddof": k, "eps": e} for k in (0, 1) for e in (0.0, 1e-6, 0.1)),
    *({"name": "grpo", "scale": x, "ddof": k} for x in ("batch", "none") for k in (0, 1)),
    *({"name": n} for n in ("dr_grpo", "rloo", "opo")),
    *({"name": "grpo_loo", "ddof": k, "eps": e} for k in (0, 1) for e in (1e-6, 0.1)),
    *({"name": "gpg", "f_norm": f} for f in (1.0, 2.5)),
]
SINGLETON = [{"singleton": x} for x in ("zero", "raw")]
VARIANT = [{"truncated_variant": x} for x in (None, "exclude", "include")]


@pytest.mark.parametrize("variant", VARIANT, ids=str)
@pytest.mark.parametrize("singleton", SINGLETON, ids=str)
@pytest.mark.parametrize("settings", SECTIONS, ids=str)
def test_advantages_are_those_of_the_definitions(
    settings: dict[str, Any], singleton: dict[str, Any], variant: dict[str, Any]
) -> None:
    s = section(**settings, **singleton, **variant)
    for bad in (NAN, math.inf, -math.inf):
        rewards = np.where(np.isnan(REWARDS), bad, REWARDS)
        out = outcomes(rewards=rewards)
        assert group_advantages(s, out).tolist() == pytest.approx(naive(s, out), rel=CLOSE)


@pytest.mark.parametrize("settings", SECTIONS, ids=str)
def test_the_order_of_the_samples_decides_nothing(settings: dict[str, Any]) -> None:
    """Rounding apart: sums run in another order."""
    s = section(**settings, singleton="raw", truncated_variant="exclude")
    out = outcomes(trajectories=np.array([0, 0, 0, 1, 0, 0, 0, 2, 1, 1, 1, 3, 2]))
    expected = group_advantages(s, out)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(GROUPS))
        values = {f.name: getattr(out, f.name)[order] for f in fields(out)}
        found = group_advantages(s, Outcomes(**values))
        assert found.tolist() == pytest.approx(expected[order].tolist(), rel=CLOSE)


def test_every_estimator_is_tested_here() -> None:
    assert {s["name"] for s in SECTIONS} == set(GROUP_ESTIMATORS)


@pytest.mark.parametrize("settings", SECTIONS, ids=str)
def test_equal_rewards_give_zero_even_where_rounding_makes_their_mean_another_number(
    settings: dict[str, Any],
) -> None:
    """The mean of seven times 0.1 is not 0.1, and 1e-17 over eps = 0 would be anything."""
    assert np.mean([0.1] * 7) != 0.1
    for rewards in ([0.1] * 7, [1 / 3] * 3, [-1e9] * 5, [1e-300] * 2):
        s = section(**settings)
        assert group_advantages(s, Outcomes.of(rewards, [0] * len(rewards))).tolist() == [
            0.0
        ] * len(rewards)


def test_a_group_whose_tokens_are_all_masked_has_a_plain_mean_for_a_baseline() -> None:
    """OPO's weights are the lengths, here all 0."""
    out = Outcomes.of([1.0, 0.0, 0.5], [0, 0, 0], lengths=[0, 0, 0])
    assert group_advantages(section(name="opo"), out).tolist() == [0.5, -0.5, 0.0]


def test_no_samples_have_no_advantages() -> None:
    for settings in SECTIONS:
        assert group_advantages(section(**settings), Outcomes.of([], [])).tolist() == []


def test_a_batch_of_nothing_but_bad_rewards_is_all_zero() -> None:
    for settings in SECTIONS:
        out = Outcomes.of([NAN, math.inf, -math.inf], [0, 0, 1])
        assert group_advantages(section(**settings, singleton="raw"), out).tolist() == [0.0] * 3


def test_huge_rewards_keep_their_differences() -> None:
    """1e8 + {0, 1}: in float32 they would be equal."""
    out = Outcomes.of([1e8, 1e8 + 1, 1e8, 1e8 + 1], [0] * 4)
    assert group_advantages(section(name="dr_grpo"), out).tolist() == [-0.5, 0.5, -0.5, 0.5]


# --- trajectories ---------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SECTIONS, ids=str)
def test_a_trajectory_of_three_samples_weighs_like_one_of_one(settings: dict[str, Any]) -> None:
    """With the length of all three, in whatever order they come."""
    s = section(**settings)
    one = Outcomes.of([1.0, 0.0, 0.5, 2.0], [0, 0, 0, 1], lengths=[6, 4, 3, 2])
    first, *others = group_advantages(s, one).tolist()
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        split = Outcomes.of(
            [1.0, 1.0, 1.0, 0.0, 0.5, 2.0],
            [0, 0, 0, 0, 0, 1],
            lengths=[[1, 2, 3][k] for k in order] + [4, 3, 2],
            trajectories=[5, 5, 5, 7, 8, 5],
        )
        assert group_advantages(s, split).tolist() == pytest.approx([first] * 3 + others, rel=CLOSE)


def test_trajectories_of_two_groups_may_have_the_same_number() -> None:
    out = Outcomes.of([1.0, 0.0, 3.0, 5.0], [0, 0, 1, 1], trajectories=[0, 1, 0, 1])
    assert group_advantages(section(name="dr_grpo"), out).tolist() == [0.5, -0.5, -1.0, 1.0]


@pytest.mark.parametrize("where", range(3))
def test_a_trajectory_is_truncated_where_any_of_its_samples_is(where: int) -> None:
    truncated = [k == where for k in range(3)] + [False, False]
    out = Outcomes.of([9.0, 9.0, 9.0, 1.0, 0.0], [0] * 5, None, truncated, [0, 0, 0, 1, 2])
    found = group_advantages(section(name="dr_grpo", truncated_variant="exclude"), out)
    assert found.tolist() == [0.0, 0.0, 0.0, 0.5, -0.5]
    found = group_advantages(section(name="dr_grpo", truncated_variant="include"), out)
    assert found.tolist() == pytest.approx([0, 0, 0, 1 - 10 / 3, -10 / 3], rel=CLOSE)


@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (NAN, 1.0), (1.0, math.inf), (0.0, 1e-9)])
def test_two_rewards_for_one_trajectory_are_refused_with_the_samples(a: float, b: float) -> None:
    out = Outcomes.of([0.0, a, 0.5, b], [3] * 4, trajectories=[0, 8, 1, 8])
    with pytest.raises(DataError, match=r"samples 1 and 3 are of one trajectory \(8 of group 3\)"):
        group_advantages(section(name="grpo"), out)


def test_a_trajectory_whose_reward_is_no_number_counts_for_nothing() -> None:
    out = Outcomes.of([NAN, NAN, 1.0, 0.0], [0] * 4, trajectories=[0, 0, 1, 2])
    assert group_advantages(section(name="dr_grpo"), out).tolist() == [0.0, 0.0, 0.5, -0.5]
