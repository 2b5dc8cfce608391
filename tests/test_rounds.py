"""Rounds of prompts: which groups a step trains on, alike on every rank and whoever collects."""

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.data.prompts import PromptStream
from megarl.rounds import only_informative, select_groups
from megarl.types import Max, Mean, Metric, Prompt, Sample
from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

ALL, NONE, SOME = [True, True, True], [False, False, False], [True, False, False]
PROMPTS = [Prompt(f"p{i}", (1, 2), {}) for i in range(12)]
ORDER = [p.id for p in PromptStream(PROMPTS, seed=0).take(12)]  # as a step meets them


def answers(*pattern: list[bool]) -> dict[str, Any]:
    """The n-th prompt that a step meets is answered by the n-th of ``pattern``, then NONE."""
    return {key: pattern[i] if i < len(pattern) else NONE for i, key in enumerate(ORDER)}


def run(pool: WorkerPool, collectors: list[int], **arguments: Any) -> dict[str, Any]:
    """Two ranks; what both of them say, with every rank's own calls and metrics."""
    settings = {"prompts": PROMPTS, "collectors": collectors, "per_step": 4, **arguments}
    one, two = pool.run("tests.work_rounds:steps", world=2, **settings)
    assert [s["samples"] for s in one["steps"]] == [s["samples"] for s in two["steps"]]
    assert [s["rewards"] for s in one["steps"]] == [s["rewards"] for s in two["steps"]]
    assert [s["accuracy"] for s in one["steps"]] == [s["accuracy"] for s in two["steps"]]
    assert (one["state"], one["names"]) == (two["state"], two["names"])
    for step, other in zip(one["steps"], two["steps"], strict=True):
        step["held"] = [step["held"], other["held"]]
    return one | {"calls": [one["calls"], two["calls"]], "errors": [one["error"], two["error"]]}


def groups(step: dict[str, Any]) -> list[str]:
    """Prompts of a step's groups; labels are unique and in order, samples whole."""
    labels = [group for _, group, _, _ in step["samples"]]
    assert labels == sorted(labels)
    assert set(Counter(labels).values()) == {3}
    return [prompt for prompt, _, index, _ in step["samples"] if index == 0]


@pytest.mark.dist
@pytest.mark.parametrize("collectors", [[0], [0, 1], [1]])
def test_without_dynamic_sampling_a_step_is_one_round_whoever_collects(
    pool: WorkerPool, collectors: list[int]
) -> None:
    found = run(pool, collectors, answers=answers(ALL, NONE, SOME), max_rounds=None, count=2)
    assert found["errors"] == [None, None]
    assert [groups(s) for s in found["steps"]] == [ORDER[:4], ORDER[4:8]]
    assert [g for _, g, i, _ in found["steps"][1]["samples"] if i == 0] == [0, 1, 2, 3]
    assert [s["accuracy"] for s in found["steps"]] == [4 / 12, 0.0]
    assert not [name for name, _ in found["steps"][0]["metrics"] if name.startswith("filter/")]
    share = 4 // len(collectors)
    for step in found["steps"]:  # a sample is with the rank that collected it, and no other
        for k, (prompt, _, _, _) in enumerate(step["samples"]):
            holder = collectors[ORDER.index(prompt) % 4 // share]
            assert [held[k] for held in step["held"]] == [
                (holder, prompt if rank == holder else None) for rank in (0, 1)
            ]
    for n, rank in enumerate(collectors):
        first = n * share
        assert found["calls"][rank] == [
            (ORDER[first : first + share], ORDER[:first], 10),
            (ORDER[4 + first : 4 + first + share], ORDER[4 : 4 + first], 20),
        ]


@pytest.mark.dist
@pytest.mark.parametrize("collectors", [[0], [0, 1]])
def test_rounds_go_on_until_enough_groups_are_informative(
    pool: WorkerPool, collectors: list[int]
) -> None:
    """1 of the first round, 4 of the second: the third is not asked for, the surplus is dropped."""
    first, second = [ALL, SOME, NONE, NONE], [SOME, SOME, SOME, SOME]
    found = run(pool, collectors, answers=answers(*first, *second), max_rounds=4)
    (step,) = found["steps"]
    assert groups(step) == [ORDER[1], ORDER[4], ORDER[5], ORDER[6]]
    assert [g for _, g, i, _ in step["samples"] if i == 0] == [1, 4, 5, 6]
    assert found["state"]["offset"] == 8
    assert step["accuracy"] == pytest.approx((3 + 5) / 24)  # of all that was sampled
    metrics = dict(step["metrics"])
    assert metrics["filter/informative_share"] == (5, 8)
    assert metrics["filter/rounds"] == (2,)
    assert metrics["rollout/generate_seconds"] == (3.0,)  # of both rounds
    earlier = [call[1] for call in found["calls"][collectors[-1]]]
    assert earlier == [ORDER[: 2 * (len(collectors) - 1)], ORDER[: 4 + 2 * (len(collectors) - 1)]]


@pytest.mark.dist
def test_missing_groups_are_filled_with_the_earliest_uninformative_ones(pool: WorkerPool) -> None:
    pattern = [ALL, NONE, SOME, NONE, NONE, SOME, ALL, ALL]
    found = run(pool, [0, 1], answers=answers(*pattern), max_rounds=2)
    (step,) = found["steps"]
    assert groups(step) == [ORDER[0], ORDER[1], ORDER[2], ORDER[5]]
    assert dict(step["metrics"])["filter/informative_share"] == (2, 8)
    assert found["state"]["offset"] == 8


@pytest.mark.dist
def test_a_prompt_that_comes_again_in_a_step_is_another_group(pool: WorkerPool) -> None:
    """Three prompts, four a round: every round has one of them twice."""
    three = PROMPTS[:3]
    met = [p.id for p in PromptStream(three, seed=0).take(8)]
    scripted = {p.id: SOME if p.id == met[0] else NONE for p in three}
    found = run(pool, [0, 1], prompts=three, answers=scripted, max_rounds=2)
    (step,) = found["steps"]
    labels = [n for n, key in enumerate(met) if key == met[0]]
    fill = [n for n in range(8) if n not in labels][: 4 - len(labels)]
    assert [g for _, g, i, _ in step["samples"] if i == 0] == sorted(labels + fill)
    # Nobody forgets a prompt that was asked before: what lies earlier is all of the step so far.
    calls = [call for rank in found["calls"] for call in rank]
    for asked, earlier, _ in calls:
        assert met[: len(earlier)] == earlier
        assert met[len(earlier) : len(earlier) + len(asked)] == asked


@pytest.mark.dist
def test_a_failing_collector_fails_the_step_on_every_rank(pool: WorkerPool) -> None:
    broken = [Prompt("broken" if p.id == ORDER[3] else p.id, (1,), {}) for p in PROMPTS]
    scripted = {p.id: SOME for p in broken}
    met = [p.id for p in PromptStream(broken, seed=0).take(4)]
    assert met.index("broken") == 3  # in the share of rank 1
    found = run(pool, [0, 1], prompts=broken, answers=scripted, max_rounds=None)
    assert found["errors"][1] == "ValueError: no answer"
    assert "collecting rollouts failed on rank 1: ValueError: no answer" in found["errors"][0]


@pytest.mark.dist
def test_a_collector_in_which_nothing_ended_learns_the_components_from_another(
    pool: WorkerPool,
) -> None:
    cut: list[bool | None] = [None, None, None]
    pattern: list[Any] = [cut, cut, SOME, ALL, *[cut] * 8]
    parts = {key: ("right", "form") for key in ORDER}
    found = run(pool, [0, 1], answers=answers(*pattern), max_rounds=None, count=2, names=parts)
    assert found["names"] == ("right", "form")
    first, second = found["steps"]
    assert first["rewards"] == [[0, 0]] * 6 + [[1, 0.5], [0, 0.5], [0, 0.5]] + [[1, 0.5]] * 3
    assert second["rewards"] == [[0, 0]] * 12  # remembered
    metrics = dict(first["metrics"])  # of rank 0, for all
    assert metrics["rollout/reward/right"] == (4.0, 12)
    assert metrics["rollout/reward/form"] == (3.0, 12)


@pytest.mark.dist
def test_while_nothing_has_ended_there_is_one_component(pool: WorkerPool) -> None:
    cut: list[bool | None] = [None, None, None]
    found = run(pool, [0, 1], answers=dict.fromkeys(ORDER, cut), max_rounds=2)
    assert found["steps"][0]["rewards"] == [[0.0]] * 12
    assert found["names"] == ()


@pytest.mark.dist
def test_collectors_with_different_components_fail_alike_on_every_rank(pool: WorkerPool) -> None:
    parts = {key: ("a", "b") if i < 2 else ("a", "c") for i, key in enumerate(ORDER)}
    found = run(pool, [0, 1], answers=answers(*[ALL] * 12), max_rounds=None, names=parts)
    assert found["errors"][0] == found["errors"][1]
    assert f"sample {ORDER[2]}/0 (rank 1) has the components a, c;" in found["errors"][0]
    assert "accepted: those of the samples before it, a, b" in found["errors"][0]


# --- selection ------------------------------------------------------------------------------------


def made(*rightness: list[bool]) -> list[Sample]:
    """A group for each; their labels 3, 4, ..."""
    template = random_samples(1, 1)[0]
    zero = np.zeros(1, np.float32)
    return [
        replace(template, group=3 + g, index=i, correct=right, rewards=zero + right)
        for g, group in enumerate(rightness)
        for i, right in enumerate(group)
    ]


def labels(samples: list[Sample]) -> list[int]:
    return list(dict.fromkeys(s.group for s in samples))


@pytest.mark.parametrize(
    "count, expected", [(1, [4]), (2, [4, 6]), (3, [3, 4, 6]), (4, [3, 4, 5, 6]), (9, [3, 4, 5, 6])]
)
def test_informative_groups_come_first_and_order_stays(count: int, expected: list[int]) -> None:
    samples = made(ALL, SOME, NONE, SOME)
    chosen = select_groups(samples, count)
    assert labels(chosen) == expected
    assert chosen == [s for s in samples if s.group in expected]


def test_shaped_rewards_do_not_make_a_group_informative() -> None:
    shaped = [replace(s, rewards=s.rewards - 0.1 * s.index) for s in made(ALL, SOME)]
    assert labels(select_groups(shaped, 1)) == [4]


def test_of_a_recorded_step_only_informative_groups_are_kept() -> None:
    samples, metrics = only_informative(made(ALL, SOME, NONE, SOME), 7)
    assert labels(samples) == [4, 6]
    assert metrics == [
        Metric("filter/informative_share", Mean(2, 4)),
        Metric("filter/rounds", Max(1)),
    ]


def test_a_recorded_step_without_an_informative_group_is_kept_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorded = made(ALL, NONE)
    with caplog.at_level(logging.WARNING):
        samples, metrics = only_informative(recorded, 7)
    assert samples == recorded
    assert metrics[0] == Metric("filter/informative_share", Mean(0, 2))
    assert "step 7: no prompt of 2 is informative" in caplog.text
