"""Rewards: who is right, who is not, and what a reward function may return."""

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megarl.data.rewards import extract_answer, load_reward, pad_rewards, score, step_tokens
from megarl.errors import ConfigError, DataError
from megarl.types import Scored
from tests.helpers.samples import random_samples

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
    assert score(reward, "abcd", {"limit": 8}, finished=True, sample="p1/0") == Scored(
        {"reward": 0.5}, correct=False
    )


def scored(value: object, text: str = "") -> Scored:
    return score(lambda *_: value, text, {}, finished=True, sample="p7/3")  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("value", [1, 0.25, True, np.float32(0.5), np.int64(3), -1.0])
def test_numbers_are_rewards_of_one_component(value: float) -> None:
    given = scored(value)
    assert list(given.components) == ["reward"]
    assert type(given.components["reward"]) is float
    assert given.components["reward"] == value
    assert given.correct is bool(value >= 1)
    assert given.steps == ()


@pytest.mark.parametrize(
    "value", [None, math.nan, math.inf, {}, {"score": 1.0}, "1", [1.0], np.ones(1), 1j, 1e39]
)
def test_anything_else_is_refused_naming_the_sample(value: Any) -> None:
    with pytest.raises(DataError, match=r"sample p7/3 is .*accepted: a finite number"):
        scored(value)


def test_parts_keep_their_order_and_full_marks_decide_what_is_correct() -> None:
    given = scored(Scored({"b": np.float32(0.5), "a": True}))
    assert list(given.components.items()) == [("b", 0.5), ("a", 1.0)]
    assert given.correct is True
    assert scored(Scored({"a": 0.6, "b": 0.3, "c": 0.1})).correct is True  # 1 - 1e-16 as a sum
    assert scored(Scored({"a": 0.6, "b": 0.3})).correct is False
    assert scored(Scored({"right": 1.0, "long": -0.5})).correct is False
    assert scored(Scored({"right": 1.0, "long": -0.5}, correct=True)).correct is True
    assert scored(Scored({"format": 1.0}, correct=np.bool_(False))).correct is False


@pytest.mark.parametrize(
    "value, words",
    [
        (Scored({}), "components = {}; accepted: a mapping of at least one name"),
        (Scored([1.0]), r"components = \[1.0\]; accepted: a mapping"),  # type: ignore[arg-type]
        (Scored({"": 1.0}), "a component named ''; accepted: some text"),
        (Scored({3: 1.0}), "a component named 3"),  # type: ignore[dict-item]
        (Scored({"a": 1.0, "b": math.nan}), "component 'b' of the reward of sample p7/3 is float"),
        (Scored({"a": "1"}), "component 'a' .*accepted: a finite number$"),  # type: ignore[dict-item]
        (Scored({"a": 1.0}, correct=1), "correct = 1; accepted: True, False or None"),  # type: ignore[arg-type]
        (Scored({"a": 1.0}, steps=3), "steps = 3; accepted: pairs"),  # type: ignore[arg-type]
        (Scored({"a": 1.0}, steps=["x"]), r"steps\[0\] = 'x'; accepted: pairs"),  # type: ignore[list-item]
        (Scored({"a": 1.0}, steps=[(1.5, 1)]), r"steps\[0\] end at 1.5; .*from 1 to"),  # type: ignore[list-item]
        (Scored({"a": 1.0}, steps=[(0, 1)]), r"steps\[0\] end at 0; .*from 1 to .* 6"),
        (Scored({"a": 1.0}, steps=[(7, 1)]), r"steps\[0\] end at 7; .*the text's length, 6"),
        (Scored({"a": 1.0}, steps=[(4, 1), (4, 1)]), r"steps\[1\] end at 4; .*from 5 to"),
        (Scored({"a": 1.0}, steps=[(4, math.inf)]), r"steps\[0\] of sample p7/3 is float inf"),
    ],
)
def test_parts_that_cannot_be_used_are_refused_naming_the_sample(value: Scored, words: str) -> None:
    with pytest.raises(DataError, match=words) as error:
        scored(value, "abcdef")
    assert "sample p7/3" in str(error.value)


def test_steps_come_back_as_numbers() -> None:
    steps = [(np.int64(2), np.float32(0.5)), [6, -1]]
    given = scored(Scored({"a": 0.0}, steps=steps), "abcdef")  # type: ignore[arg-type]
    assert given.steps == ((2, 0.5), (6, -1.0))
    assert [type(x) for x in given.steps[0]] == [int, float]


def utf8(ids: Any) -> str:
    """A tokenizer of single bytes: characters may take several tokens."""
    return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["abc", "aéb", "ж", "a😀😀b", "日本語."])
def test_a_step_ends_in_the_token_that_completes_its_last_character(text: str) -> None:
    response = list(text.encode())
    ends = range(1, len(text) + 1)
    found = step_tokens(response, ends, utf8)
    assert found == [len(text[:end].encode()) - 1 for end in ends]


def test_several_steps_may_end_in_one_token() -> None:
    words = ["<a>", "one two", ""]
    asked: list[int] = []

    def decode(ids: Any) -> str:
        asked.append(len(ids))
        return "".join(words[i] for i in ids)

    assert step_tokens([0, 1, 1, 2], [2, 3, 6, 10, 17], decode) == [0, 0, 1, 1, 2]
    assert step_tokens([0, 1], [], decode) == []
    asked.clear()
    step_tokens([0] * 1024, [1500], decode)
    assert len(asked) <= 11  # the whole text, then a bisection


def test_an_end_in_bytes_that_are_no_text_is_found() -> None:
    assert step_tokens([97, 255, 98], [2], utf8) == [1]  # text is 'a', replacement, 'b'


def test_unscored_samples_get_as_many_zeros_as_the_others_have_components() -> None:
    two, one = random_samples(1, 2)
    two = replace(two, rewards=np.array([1, 2], np.float32))
    cut = replace(one, rewards=np.zeros(0, np.float32), truncated=True)
    padded = pad_rewards([two, cut], 2)
    assert padded[0] is two
    assert padded[1].rewards.tolist() == [0, 0] and padded[1].rewards.dtype == np.float32


def test_a_reward_that_fails_names_the_sample() -> None:
    def reward(*_: Any) -> float:
        raise KeyError("gold")

    with pytest.raises(DataError, match=r"sample p7/3: KeyError: 'gold'"):
        score(reward, "", {}, finished=True, sample="p7/3")


def test_a_response_that_never_ended_is_worth_nothing() -> None:
    calls: list[str] = []

    def reward(text: str, *_: Any) -> float:
        calls.append(text)
        return 1.0

    unscored = score(reward, "</think>4", {}, finished=False, sample="s")
    assert (unscored.components, unscored.correct, unscored.steps) == ({}, False, ())
    assert calls == []


def test_no_reward_touches_the_disk(tmp_path: Path) -> None:
    marker = tmp_path / "pwned"
    attack = f"</think>open({str(marker)!r}, 'w')"
    for name in ("exact_match", "reasoning_gym:chain_sum", "reasoning_gym:basic_arithmetic"):
        load_reward(name)(attack, {"answer": "4", "entry": ENTRY}, True)
    assert not marker.exists()
