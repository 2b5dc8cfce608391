"""Aggregation weights from counts, against the definitions in exact fractions."""

from fractions import Fraction
from typing import Any

import pytest
from pydantic import TypeAdapter

from megarl.algos.normalize import AGGREGATIONS, token_weights
from megarl.config.algo import Aggregation

COUNTS = [3, 0, 1, 8, 0, 2, 5]
GROUPS = [4, 4, 9, 4, 7, 9, 2]  # group 7 trains nothing


def section(**settings: Any) -> Any:
    return TypeAdapter(Aggregation).validate_python(settings)


def naive(s: Any, counts: list[int], groups: list[int]) -> list[Fraction]:
    n, everything = len(counts), max(1, sum(counts))
    chosen = getattr(s, "seq_denominator", None)
    sequences = max(1, n if chosen == "all" else sum(c > 0 for c in counts))
    of_group = {
        g: sum(c for c, other in zip(counts, groups, strict=True) if other == g) for g in groups
    }
    prompts = max(1, sum(t > 0 for t in of_group.values()))
    return [
        {
            "token_mean": lambda c, g: Fraction(1, everything),
            "seq_mean_token_mean": lambda c, g: Fraction(1, sequences * max(1, c)),
            "seq_mean_token_sum": lambda c, g: Fraction(1, sequences),
            "constant": lambda c, g: 1 / (max(1, n) * Fraction(s.constant)),
            "group_token_mean": lambda c, g: Fraction(1, prompts * max(1, of_group[g])),
        }[s.name](c, g)
        for c, g in zip(counts, groups, strict=True)
    ]


SECTIONS = [
    {"name": "token_mean"},
    {"name": "seq_mean_token_mean"},
    {"name": "seq_mean_token_mean", "seq_denominator": "all"},
    {"name": "seq_mean_token_sum"},
    {"name": "seq_mean_token_sum", "seq_denominator": "all"},
    {"name": "constant", "constant": 12.0},
    {"name": "group_token_mean"},
]
each_section = pytest.mark.parametrize("settings", SECTIONS, ids=str)


@each_section
@pytest.mark.parametrize(
    ("counts", "groups"),
    [(COUNTS, GROUPS), ([0, 0, 0], [1, 1, 2]), ([], []), ([7], [0]), ([1, 3], [0, 1])],
    ids=str,
)
def test_weights_are_those_of_the_definition(
    settings: dict[str, Any], counts: list[int], groups: list[int]
) -> None:
    s = section(**settings)
    found = token_weights(s, counts, groups).tolist()
    assert found == pytest.approx([float(w) for w in naive(s, counts, groups)], rel=1e-15)


@each_section
def test_token_losses_of_one_give_one(settings: dict[str, Any]) -> None:
    """Every mean of ones is 1; sums are the mean number of tokens over what divides them."""
    found = token_weights(section(**settings), COUNTS, GROUPS)
    total = float((found * COUNTS).sum())
    sizes = {"seq_mean_token_sum": 19 / 5, "constant": 19 / 7 / 12}
    expected = sizes.get(settings["name"], 1.0)
    if settings.get("seq_denominator") == "all":
        expected *= 5 / 7
    assert total == pytest.approx(expected, rel=1e-15)


@each_section
def test_the_order_of_the_samples_decides_nothing(settings: dict[str, Any]) -> None:
    order = [6, 2, 0, 5, 3, 1, 4]
    plain = token_weights(section(**settings), COUNTS, GROUPS)
    moved = token_weights(
        section(**settings), [COUNTS[i] for i in order], [GROUPS[i] for i in order]
    )
    assert moved.tolist() == plain[order].tolist()


def test_every_aggregation_is_tested_here() -> None:
    assert {s["name"] for s in SECTIONS} == set(AGGREGATIONS)


def test_counts_beyond_float32_are_exact() -> None:
    n = 2**24 + 1
    assert token_weights(section(name="token_mean"), [n], [0])[0] == 1 / n
