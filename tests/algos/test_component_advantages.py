"""Advantages of steps and of reward components, against loops."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from megarl.algos.component_advantages import gdpo_advantages, process_advantages
from megarl.algos.group_advantages import Outcomes
from megarl.config.algo import GdpoAdvantage, ProcessAdvantage
from megarl.errors import DataError

CLOSE = 1e-12
NAN = math.nan


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float], ddof: int) -> float:
    return math.sqrt(math.fsum((v - mean(values)) ** 2 for v in values) / (len(values) - ddof))


# --- process supervision --------------------------------------------------------------------------

# Samples of groups 7, 3, 7, 3, 7, 9, 9: ragged steps, one sample without any; group 9 all equal
STEPS = [[1.0, 0.4], [0.2], [0.0], [0.9, 0.1, -1.0], [], [0.1, 0.1], [0.1]]
ENDS = [[3, 6], [4], [0], [1, 2, 5], [], [0, 1], [2]]
LENGTHS = [8, 5, 3, 6, 4, 2, 3]
GROUPS = [7, 3, 7, 3, 7, 9, 9]


def naive_process(section: ProcessAdvantage) -> list[list[float]]:
    out = []
    for rewards, ends, length, group in zip(STEPS, ENDS, LENGTHS, GROUPS, strict=True):
        pool = [r for s, g in zip(STEPS, GROUPS, strict=True) if g == group for r in s]
        flat = len(set(pool)) <= 1
        row = []
        for t in range(length):
            later = [r for r, e in zip(rewards, ends, strict=True) if e >= t]
            scale = 1.0 if flat else std(pool, section.ddof) + section.eps
            row.append(0.0 if flat else math.fsum((r - mean(pool)) / scale for r in later))
        out.append(row)
    return out


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_a_token_gets_the_rewards_of_its_own_and_all_later_steps(ddof: int, eps: float) -> None:
    section = ProcessAdvantage(ddof=ddof, eps=eps)
    found = process_advantages(section, STEPS, ENDS, LENGTHS, GROUPS)
    for row, expected in zip(found, naive_process(section), strict=True):
        assert row.tolist() == pytest.approx(expected, rel=CLOSE, abs=1e-14)


def test_tokens_after_the_last_step_and_responses_without_steps_get_zero() -> None:
    found = process_advantages(ProcessAdvantage(), STEPS, ENDS, LENGTHS, GROUPS)
    assert found[0][7] == 0 and found[0][6] != 0
    assert found[4].tolist() == [0.0] * 4
    assert found[5].tolist() + found[6].tolist() == [0.0] * 5  # equal rewards, exactly


def test_a_step_reward_that_is_no_number_counts_for_nothing() -> None:
    found = process_advantages(
        ProcessAdvantage(eps=0.0), [[1.0, NAN], [0.0]], [[0, 1], [1]], [2, 2], [0, 0]
    )
    r = math.sqrt(0.5)  # (1 - 1/2) / std of 0 and 1
    assert found[0].tolist() == pytest.approx([r, 0.0], rel=CLOSE)
    assert found[1].tolist() == pytest.approx([-r, -r], rel=CLOSE)


def test_no_samples_and_no_steps_have_no_advantages() -> None:
    assert process_advantages(ProcessAdvantage(), [], [], [], []) == []
    found = process_advantages(ProcessAdvantage(), [[], []], [[], []], [2, 1], [0, 0])
    assert [row.tolist() for row in found] == [[0.0, 0.0], [0.0]]


# --- GDPO -----------------------------------------------------------------------------------------

GDPO_GROUPS = [1, 0, 1, 0, 1, 2]
COMPONENTS = [[1.0, 0.0, 0.0, 1.0, 1.0, 5.0], [0.3, 0.3, 0.1, 0.3, -2.0, 1.0], [2.0] * 6]


def naive_gdpo(
    section: GdpoAdvantage, components: Sequence[Sequence[float]], groups: Sequence[int]
) -> list[float]:
    valid = [all(map(math.isfinite, r)) for r in zip(*components, strict=True)]
    weights = section.weights or [1.0] * len(components)
    total = [0.0] * len(groups)
    for w, values in zip(weights, components, strict=True):
        for i, g in enumerate(groups):
            pool = [values[j] for j, other in enumerate(groups) if other == g and valid[j]]
            if valid[i] and len(set(pool)) > 1:
                total[i] += w * (values[i] - mean(pool)) / (std(pool, 1) + section.eps)
    counted = [x for x, v in zip(total, valid, strict=True) if v]
    if len(set(counted)) < 2:
        return [0.0] * len(groups)
    m, s = mean(counted), std(counted, 1) + section.eps
    return [(x - m) / s if v else 0.0 for x, v in zip(total, valid, strict=True)]


@pytest.mark.parametrize("weights", [None, (1.0, 0.5, 2.0), (0.0, -1.0, 1.0)])
@pytest.mark.parametrize("eps", [1e-4, 0.0, 0.5])
def test_components_are_normalised_in_their_groups_and_their_sum_over_the_batch(
    weights: tuple[float, ...] | None, eps: float
) -> None:
    section = GdpoAdvantage(weights=weights, eps=eps)
    expected = naive_gdpo(section, COMPONENTS, GDPO_GROUPS)
    found = gdpo_advantages(section, COMPONENTS, Outcomes.of([0] * 6, GDPO_GROUPS))
    assert found.tolist() == pytest.approx(expected, rel=1e-11)
    order = [4, 2, 0, 5, 1, 3]
    shuffled = gdpo_advantages(
        section,
        [[c[i] for i in order] for c in COMPONENTS],
        Outcomes.of([0] * 6, [GDPO_GROUPS[i] for i in order]),
    )
    assert shuffled.tolist() == pytest.approx([expected[i] for i in order], rel=1e-11)


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_a_sample_with_one_component_that_is_no_number_counts_in_none(bad: float) -> None:
    components = [list(c) for c in COMPONENTS]
    components[1][2] = bad
    section = GdpoAdvantage()
    found = gdpo_advantages(section, components, Outcomes.of([0] * 6, GDPO_GROUPS))
    assert found.tolist() == pytest.approx(naive_gdpo(section, components, GDPO_GROUPS), rel=1e-11)
    keep = [0, 1, 3, 4, 5]
    without = gdpo_advantages(
        section,
        [[c[i] for i in keep] for c in COMPONENTS],
        Outcomes.of([0] * 5, [GDPO_GROUPS[i] for i in keep]),
    )
    assert found[keep].tolist() == pytest.approx(without.tolist(), rel=1e-11)
    assert found[2] == 0


def test_components_that_are_all_equal_give_exactly_zero() -> None:
    for components in ([[0.1] * 7], [[0.1] * 7, [0.3] * 7]):
        found = gdpo_advantages(GdpoAdvantage(eps=0.0), components, Outcomes.of([0] * 7, [0] * 7))
        assert found.tolist() == [0.0] * 7


def test_a_trajectory_of_several_samples_counts_once_in_groups_and_batch() -> None:
    section = GdpoAdvantage()
    once = gdpo_advantages(
        section, [[1.0, 0.0, 0.5], [2.0, 2.0, 1.0]], Outcomes.of([0] * 3, [0] * 3)
    )
    split = gdpo_advantages(
        section,
        [[1.0, 1.0, 1.0, 0.0, 0.5], [2.0, 2.0, 2.0, 2.0, 1.0]],
        Outcomes.of([0] * 5, [0] * 5, trajectories=[4, 4, 4, 5, 6]),
    )
    assert split.tolist() == pytest.approx(np.repeat(once, [3, 1, 1]).tolist(), rel=CLOSE)
    with pytest.raises(DataError, match="one trajectory"):
        gdpo_advantages(section, [[1.0, 0.0]], Outcomes.of([0, 0], [0, 0], trajectories=[1, 1]))


def test_nothing_and_a_single_sample_have_no_advantage() -> None:
    assert gdpo_advantages(GdpoAdvantage(), [], Outcomes.of([], [])).tolist() == []
    assert gdpo_advantages(GdpoAdvantage(), [[3.0]], Outcomes.of([3.0], [0])).tolist() == [0.0]
