"""What a conversion does to every parameter, in as many lines as a family's table of rules has."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from megarl.models.mapping import ModelMapping
from megarl.models.sharded import Place, parameter_names, place_of

_NUMBERS = (
    (re.compile(r"(?<=decoder\.layers\.)\d+"), "{L}"),
    (re.compile(r"(?<=mtp\.layers\.)\d+"), "{K}"),
    (re.compile(r"(?<=local_experts\.)\d+"), "{E}"),
)


@dataclass(frozen=True)
class Row:
    """Parameters that one rule maps alike. ``numbers``: {"L": "0-47", "E": "0-127"}, of those in
    ``megatron``. ``hf``: what the first of them is made of, (name, shape). ``num_bytes``: of one.
    """

    megatron: str
    numbers: dict[str, str]
    count: int
    shape: tuple[int, ...]
    dtype: str
    operator: str
    hf: tuple[tuple[str, tuple[int, ...]], ...]
    key: str
    num_bytes: int


def mapping_table(mapping: ModelMapping) -> list[Row]:
    """Every parameter that a checkpoint holds, in the order of the first of each line."""
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name in parameter_names(mapping):
        template, _ = _template(name)
        groups.setdefault((template, mapping.shape(name)), []).append(name)
    return [_row(mapping, template, names) for (template, _), names in groups.items()]


def _row(mapping: ModelMapping, template: str, names: list[str]) -> Row:
    first = names[0]
    place: Place = place_of(mapping, first)
    numbers: dict[str, set[int]] = {}
    for name in names:
        for letter, number in _template(name)[1].items():
            numbers.setdefault(letter, set()).add(number)
    return Row(
        megatron=template,
        numbers={letter: ranges(found) for letter, found in numbers.items()},
        count=len(names),
        shape=place.parameter,
        dtype=place.dtype,
        operator=mapping.rule_of(first).operator,
        hf=tuple((part.name, part.shape) for part in mapping.parts(first)),
        key=place.key,
        num_bytes=place.num_bytes,
    )


def _template(name: str) -> tuple[str, dict[str, int]]:
    numbers = {}
    for pattern, letter in _NUMBERS:
        found = pattern.search(name)
        if found:
            numbers[letter.strip("{}")] = int(found[0])
            name = pattern.sub(letter, name)
    return name, numbers


def ranges(numbers: Iterable[int]) -> str:
    """``0-2, 5``"""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def total_bytes(rows: Iterable[Row]) -> int:
    return sum(row.count * row.num_bytes for row in rows)


def parameters(rows: Iterable[Row]) -> int:
    return sum(row.count * math.prod(row.shape) for row in rows)
