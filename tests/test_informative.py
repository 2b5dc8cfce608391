"""Groups that teach."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from megarl.informative import informative, only_informative
from megarl.types import Max, Mean, Metric, Sample
from tests.helpers.samples import random_samples

ALL, NONE, SOME = [True, True, True], [False, False, False], [True, False, False]


def made(*rightness: list[bool]) -> list[Sample]:
    """A group for each; their labels 3, 4, ..."""
    template = random_samples(1, 1)[0]
    zero = np.zeros(1, np.float32)
    return [
        replace(template, group=3 + g, index=i, correct=right, rewards=zero + right)
        for g, group in enumerate(rightness)
        for i, right in enumerate(group)
    ]


def test_shaped_rewards_do_not_make_a_group_informative() -> None:
    shaped = [replace(s, rewards=s.rewards - 0.1 * s.index) for s in made(ALL, SOME, NONE)]
    assert informative(shaped) == {3: False, 4: True, 5: False}


def test_of_a_recorded_step_only_informative_groups_are_kept() -> None:
    samples, metrics = only_informative(made(ALL, SOME, NONE, SOME), 7)
    assert list(dict.fromkeys(s.group for s in samples)) == [4, 6]
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
