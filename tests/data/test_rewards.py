"""Rewards: who is right, who is not, and what a reward function may return."""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megarl.data.rewards import extract_answer, load_reward, score
from megarl.errors import ConfigError, DataError

ENTRY = {"answer": "4", "metadata": {"expression": "1 + 3"}}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("8-2</think>6", "6"),
        ("</think> 10 ", "10"),
        ("1</think>2</think>3", "3"),
        ("no mark: 7", "no mark: 7"),
        ("6</think>", ""),
        ("", ""),
    ],
)
def test_the_answer_is_what_follows_the_last_mark(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("1+3</think>4", 1.0),
        ("4", 1.0),
        ("</think>14", 0.0),
        ("4</think>", 0.0),
        ("4</think>5", 0.0),
    ],
)
def test_exact_match(text: str, reward: float) -> None:
    assert load_reward("exact_match")(text, {"answer": " 4"}, True) == reward


def test_exact_match_needs_an_answer() -> None:
    with pytest.raises(DataError, match='"answer"'):
        load_reward("exact_match")("4", {}, True)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("1+3</think>4", 1.0),
        ("</think>+4.0", 1.0),  # the scorer's own tolerance
        ("</think>14", 0.0),  # half marks upstream: the right answer is inside
        ("</think>the answer is 4", 0.0),
        ("4</think>", 0.0),
        ("</think>__import__('os').system('touch /tmp/pwned')", 0.0),
        ("</think>" + "(" * 1_000_000, 0.0),
        ("</think>9**9**9**9", 0.0),
    ],
)
def test_reasoning_gym_gives_full_marks_or_none(text: str, reward: float) -> None:
    assert load_reward("reasoning_gym:chain_sum")(text, {"entry": ENTRY}, True) == reward


def test_reasoning_gym_needs_the_entry() -> None:
    with pytest.raises(DataError, match='"entry"'):
        load_reward("reasoning_gym:chain_sum")("4", {"answer": "4"}, True)


@pytest.mark.parametrize(
    "dataset", ["countdown", "puzzle24", "spiral_matrix", "simple_integration"]
)
def test_scorers_that_evaluate_the_answer_are_refused(dataset: str) -> None:
    """K3: sympy's parser and eval run what the model wrote."""
    with pytest.raises(ConfigError, match="does not evaluate the answer"):
        load_reward(f"reasoning_gym:{dataset}")


@pytest.mark.parametrize(
    "name",
    [
        "exact",
        "",
        "exact_match:x",
        "reasoning_gym",
        "reasoning_gym:chain_sums",
        "import:",
        "import:no.such.module:f",
        "import:math:no_such_function",
        "import:math",
        "import:math:pi",
    ],
)
def test_names_that_lead_nowhere_are_refused(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_reward(name)
    (problem,) = error.value.problems
    assert problem.key == "data.reward"
    assert name in problem.found


def test_a_function_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_rewards")

    def length(text: str, payload: Mapping[str, Any], finished: bool) -> float:
        return len(text) / payload["limit"]

    module.length = length  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    reward = load_reward("import:my_rewards:length")
    assert score(reward, "abcd", {"limit": 8}, finished=True, sample="p1[0]") == 0.5


@pytest.mark.parametrize("value", [1, 0.25, True, np.float32(0.5), np.int64(3), -1.0])
def test_numbers_are_rewards(value: float) -> None:
    given = score(lambda *_: value, "", {}, finished=True, sample="s")
    assert type(given) is float
    assert given == value


@pytest.mark.parametrize(
    "value", [None, math.nan, math.inf, {}, {"score": 1.0}, "1", [1.0], np.ones(1), 1j]
)
def test_anything_else_is_refused_naming_the_sample(value: Any) -> None:
    with pytest.raises(DataError, match=r"sample p7\[3\].*accepted: a finite number"):
        score(lambda *_: value, "", {}, finished=True, sample="p7[3]")


def test_a_reward_that_fails_names_the_sample() -> None:
    def reward(*_: Any) -> float:
        raise KeyError("gold")

    with pytest.raises(DataError, match=r"sample p7\[3\]: KeyError: 'gold'"):
        score(reward, "", {}, finished=True, sample="p7[3]")


def test_a_response_that_never_ended_is_worth_nothing() -> None:
    calls: list[str] = []

    def reward(text: str, *_: Any) -> float:
        calls.append(text)
        return 1.0

    assert score(reward, "</think>4", {}, finished=False, sample="s") == 0.0
    assert calls == []


def test_no_reward_touches_the_disk(tmp_path: Path) -> None:
    marker = tmp_path / "pwned"
    attack = f"</think>open({str(marker)!r}, 'w')"
    for name in ("exact_match", "reasoning_gym:chain_sum", "reasoning_gym:basic_arithmetic"):
        load_reward(name)(attack, {"answer": "4", "entry": ENTRY}, True)
    assert not marker.exists()
