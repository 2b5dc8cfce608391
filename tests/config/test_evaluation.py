"""Evaluation sets: what is refused of them, and what is not."""

from pathlib import Path

import pytest

from tests.config.cases import Case, assert_exactly, found_problems


def own_set(values: str) -> str:
    return f"eval.sets=[{{name: own, prompts: HERE/heldout.jsonl, {values}}}]"


VALID = [
    Case(["eval={every: 2, sets: [{name: own, prompts: HERE/heldout.jsonl}]}"], {}),
    Case([own_set("every: 3, samples_per_prompt: 4, temperature: 0.7, pass_at: [1, 4]")], {}),
]  # fmt: skip
WRONG = [
    Case(["eval.every=2", own_set("every: 1")], {"data.heldout": ["eval.every=2 reads it"]}),
    Case([own_set("temperature: 1")], {"eval.sets[0].every": ["nothing", "or eval.every"]}),
    Case([own_set("every: 1, samples_per_prompt: 3")],
         {"eval.sets[0].samples_per_prompt": ["3", "greedy samples are all the same"]}),
    Case([own_set("every: 1, pass_at: [1, 2]")],
         {"eval.sets[0].pass_at": ["2", "1 to eval.sets[0].samples_per_prompt = 1"]}),
    Case([own_set("every: 1, max_new_tokens: 70")],
         {"eval.sets[0].max_new_tokens": ["70", "context_length = 64"]}),
    Case(["eval={every: 1, sets: [{name: a, prompts: HERE/heldout.jsonl}, "
          "{name: a, prompts: HERE/prompts.jsonl}]}"],
         {"eval.sets[1].name": ["a again"], "eval.sets[1].prompts": ["the file of data.prompts"]}),
    Case(["eval={every: 1, sets: [{name: a, prompts: HERE/no}]}"],
         {"eval.sets[0].prompts": ["does not exist"]}),
]  # fmt: skip


@pytest.mark.parametrize("case", VALID, ids=str)
def test_a_set_that_can_be_asked_has_no_problem(case: Case, place: Path) -> None:
    assert found_problems(case, place) == []


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_a_set_that_cannot_gives_exactly_its_problem(case: Case, place: Path) -> None:
    assert_exactly(case, place)
