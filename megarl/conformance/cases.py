"""The file format: reading cases, comparing results with them, writing results.

What is computed never depends on what is expected: ``Given`` is all that the kinds get to see.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megarl.errors import MegarlError

Status = Literal["pass", "fail", "unsupported"]
Dtype = Literal["float64", "float32"]
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

NOT_COMPARED = "info_"

DEFAULT_TOLERANCE = {
    "float64": {"rtol": 1e-12, "atol": 1e-14},
    "float32": {"rtol": 2e-5, "atol": 2e-6},
}
# kind -> (relative tolerance in float32, why 2e-5 is too tight for it)
LOOSER_FLOAT32: dict[str, tuple[float, str]] = {}


class Unsupported(MegarlError):
    """A case that asks for what is not known here, or does not say enough."""


class CommandError(MegarlError):
    """What the command needs is not there: a readable file of cases, a backend."""


class Inputs(Mapping[str, Any]):
    """A case's inputs; one that is missing makes the case unsupported."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise Unsupported(f"inputs.{name} is missing")
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def require(self, *names: str) -> None:
        for name in names:
            _ = self[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)


@dataclass(frozen=True)
class Given:
    id: str
    kind: str
    config: Mapping[str, Any]
    inputs: Inputs


@dataclass(frozen=True)
class Case:
    given: Given
    expected: Mapping[str, Any] | None
    tolerance: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Result:
    id: str
    kind: str
    computed: Mapping[str, Any]
    status: Status
    reason: str | None = None


def read_cases(path: Path) -> list[Case]:
    """Raises CommandError, which says what is wrong with the file."""
    document = _read_json(path)
    entries = document.get("cases") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise CommandError(f"{path} has no list `cases`; see docs/conformance.md for the format")
    cases = [_case(entry, f"{path}: case {k}") for k, entry in enumerate(entries)]
    _once([case.given.id for case in cases], f"{path}: case")
    return cases


def read_computed(path: Path) -> dict[str, Mapping[str, Any]]:
    """id -> what an implementation, this or another one, has computed. Raises CommandError."""
    entries = _read_json(path)
    if not isinstance(entries, list):
        raise CommandError(f"{path} is not a list of results; see docs/conformance.md")
    for k, entry in enumerate(entries):
        there = entry if isinstance(entry, dict) else {}
        if not isinstance(there.get("id"), str) or not isinstance(there.get("computed"), dict):
            raise CommandError(f"{path}: result {k} has not both id and computed")
    _once([entry["id"] for entry in entries], f"{path}: result")
    return {entry["id"]: decode(entry["computed"]) for entry in entries}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as e:  # also what is not UTF-8
        raise CommandError(f"{path} is not JSON: {e}") from None
    except OSError as e:
        raise CommandError(f"{path} cannot be read: {e}") from None


def _once(ids: Sequence[str], what: str) -> None:
    seen: set[str] = set()
    for k, name in enumerate(ids):
        if name in seen:
            raise CommandError(f"{what} {k}: the id {name!r} is there twice")
        seen.add(name)


def _case(entry: Any, where: str) -> Case:
    if not isinstance(entry, dict):
        raise CommandError(f"{where} is not an object")
    for key in ("id", "kind"):
        if not isinstance(entry.get(key), str):
            raise CommandError(f"{where} has no {key} (a string)")
    for key in ("config", "inputs", "expected", "tolerance"):
        if not isinstance(entry.get(key, {}), dict | None):
            raise CommandError(f"{where} ({entry['id']}): {key} is not an object")
    return Case(
        Given(
            entry["id"],
            entry["kind"],
            decode(entry.get("config") or {}),
            Inputs(decode(entry.get("inputs") or {})),
        ),
        decode(entry.get("expected")),
        entry.get("tolerance") or {},
    )


def decode(value: Any) -> Any:
    """JSON -> numbers: 'nan', 'inf' and '-inf' stand for what JSON has no number for."""
    if isinstance(value, dict):
        return {k: decode(v) for k, v in value.items()}
    if isinstance(value, list):
        return [decode(v) for v in value]
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def encode(value: Any) -> Any:
    """The inverse of ``decode``."""
    if isinstance(value, Mapping):
        return {k: encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def write_results(path: Path, results: Sequence[Result]) -> None:
    entries = []
    for r in results:
        entry = {"id": r.id, "computed": encode(r.computed), "status": r.status}
        entries.append(entry if r.reason is None else {**entry, "reason": r.reason})
    path.write_text(json.dumps(entries, indent=1, allow_nan=False) + "\n")


def verdict(case: Case, computed: Mapping[str, Any], dtype: Dtype) -> Result:
    """``computed`` against what the case expects."""
    given = case.given
    if all(key.startswith(NOT_COMPARED) for key in case.expected or ()):
        reason = "nothing to compare with: the case has no `expected`"
        return Result(given.id, given.kind, computed, "unsupported", reason)
    wrong = list(differences(case.expected, computed, *tolerance(case, dtype)))
    if not wrong:
        return Result(given.id, given.kind, computed, "pass")
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return Result(given.id, given.kind, computed, "fail", "; ".join(wrong[:3]) + more)


def tolerance(case: Case, dtype: Dtype) -> tuple[float, float]:
    """(relative, absolute). In float32 the case may tighten the relative one, never loosen it."""
    default = DEFAULT_TOLERANCE[dtype]
    own = {**default, **case.tolerance.get(dtype, {})}
    rtol, atol = float(own["rtol"]), float(own["atol"])
    if dtype == "float32":
        looser = LOOSER_FLOAT32.get(case.given.kind)
        rtol = looser[0] if looser else min(rtol, default["rtol"])
    return rtol, atol


def differences(
    expected: Any, computed: Any, rtol: float, atol: float, where: str = ""
) -> Iterator[str]:
    """What of ``expected`` is missing or different; keys ``info_*`` are not compared."""
    if isinstance(expected, Mapping):
        if not isinstance(computed, Mapping):
            yield f"{where}: expected an object, computed {computed!r}"
            return
        for key, value in expected.items():
            inner = f"{where}.{key}" if where else key
            if key.startswith(NOT_COMPARED):
                continue
            if key not in computed:
                yield f"{inner} was not computed"
            else:
                yield from differences(value, computed[key], rtol, atol, inner)
    elif isinstance(expected, list):
        if not isinstance(computed, list) or len(computed) != len(expected):
            got = f"{len(computed)} entries" if isinstance(computed, list) else repr(computed)
            yield f"{where}: expected {len(expected)} entries, computed {got}"
            return
        for k, (e, c) in enumerate(zip(expected, computed, strict=True)):
            yield from differences(e, c, rtol, atol, f"{where}[{k}]")
    elif not _same(expected, computed, rtol, atol):
        yield f"{where}: expected {expected!r}, computed {computed!r}"


def _same(expected: Any, computed: Any, rtol: float, atol: float) -> bool:
    numbers = isinstance(expected, int | float) and isinstance(computed, int | float)
    if not numbers or (isinstance(expected, int) and isinstance(computed, int)):
        return bool(expected == computed)  # text, null, yes or no, counts
    if math.isfinite(expected) and math.isfinite(computed):
        return bool(abs(computed - expected) <= atol + rtol * abs(expected))
    return bool(expected == computed or (math.isnan(expected) and math.isnan(computed)))
