"""Length punishment and informative groups, against the published vectors and by hand."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.algos.shaping import informative_groups, overlong_penalty

FILE = Path(__file__).parent.parent / "vectors" / "objectives.json"
CASES: dict[str, Any] = {case["id"]: case for case in json.loads(FILE.read_text())["cases"]}


def test_overlong_penalty_is_that_of_the_vectors() -> None:
    case = CASES["overlong_dapo"]
    found = overlong_penalty(case["inputs"]["lengths"], **case["config"])
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, case["expected"]["penalty"], **case["tolerance"]["float64"])


@pytest.mark.parametrize("l_cache", [1, 3, 10])
def test_the_penalty_falls_in_a_line_from_0_to_minus_1(l_cache: int) -> None:
    found = overlong_penalty(range(15), 10, l_cache)
    slow = [
        0.0 if n <= 10 - l_cache else ((10 - l_cache) - n) / l_cache if n <= 10 else -1.0
        for n in range(15)
    ]
    assert found.tolist() == slow
    assert not np.signbit(found[0])  # no -0.0 in a report


def test_informative_groups_are_those_of_the_vectors() -> None:
    case = CASES["dynamic_sampling"]
    found = informative_groups(case["inputs"]["accuracy"], case["inputs"]["groups"])
    assert found == {int(g): keep for g, keep in case["expected"]["keep_group"].items()}


def test_groups_may_be_ragged_and_interleaved_and_come_in_order_of_appearance() -> None:
    correct, groups = [1, 0, 1, 0, 1, 1], [7, 2, 7, 5, 2, 5]
    assert list(informative_groups(correct, groups).items()) == [(7, False), (2, True), (5, True)]
    assert informative_groups([1], [3]) == informative_groups([0], [3]) == {3: False}
    assert informative_groups([], []) == {}


def test_nan_is_not_correct() -> None:
    assert informative_groups([math.nan, math.nan], [0, 0]) == {0: False}
    assert informative_groups([math.nan, 1.0], [0, 0]) == {0: True}
