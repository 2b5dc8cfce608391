"""What became of every group of samples that a run issued: the books balance.

``books.jsonl`` of the run directory has a line for every time that groups were issued or ended::

    {"step": 3, "event": "issued",   "groups": {"16": "p4", "17": "p9"}, "samples": 4}
    {"step": 3, "event": "trained",  "groups": [16]}
    {"step": 3, "event": "filtered", "groups": [17], "why": "uninformative"}

Groups are named by their serial, samples are ``serial/index`` with an index below ``samples``.
``step`` is the training step in which it happened. At the end of a run

    issued = trained + filtered + expired + failed

trained: used by a step. filtered: no use for dynamic sampling. expired: older than
``rollout.max_staleness`` allows, stopped half-way and not kept, or left over when the run ended.
failed: no server gave it, or its reward did not end. Each serial is issued once and ends once. A
checkpoint knows how long the file was; a run that goes on from it forgets the lines after.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.errors import DataError
from megarl.rundir import sync_path
from megarl.types import Max, Metric, StepMetrics

ISSUED = "issued"
TRAINED, FILTERED, EXPIRED, FAILED = FATES = ("trained", "filtered", "expired", "failed")


@dataclass
class Books:
    """Every rank counts; the one with a ``path`` writes."""

    path: Path | None
    counts: Counter[str] = field(default_factory=Counter)  # samples by event
    out: dict[int, int] = field(default_factory=dict)  # samples of every group that has not ended

    def issue(self, step: int, groups: Mapping[int, str], samples: int) -> None:
        """``groups``: prompt ids by serial, each asked for ``samples`` times."""
        if groups:
            self.out |= dict.fromkeys(groups, samples)
            self.counts[ISSUED] += len(groups) * samples
            named = {str(serial): prompt for serial, prompt in groups.items()}
            self._write(step, ISSUED, {"groups": named, "samples": samples})

    def end(self, step: int, fate: str, serials: Iterable[int], why: str = "") -> None:
        """``fate``: one of FATES."""
        ended = sorted(serials)
        if ended:
            self.counts[fate] += sum(self.out.pop(serial) for serial in ended)
            self._write(step, fate, {"groups": ended} | ({"why": why} if why else {}))

    def metrics(self) -> StepMetrics:
        """Samples since the start of the run, the same on every rank."""
        return [Metric(f"books/{event}", Max(self.counts[event])) for event in (ISSUED, *FATES)]

    def state(self) -> dict[str, Any]:
        """JSON. Of the rank that writes; the others' has no length. What is written is durable."""
        length = 0
        if self.path is not None and self.path.exists():
            sync_path(self.path)
            length = self.path.stat().st_size
        out = {str(serial): samples for serial, samples in self.out.items()}
        return {"samples": dict(self.counts), "out": out, "bytes": length}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Back to a checkpoint: what was written after it never happened."""
        self.counts = Counter({k: int(v) for k, v in state["samples"].items()})
        self.out = {int(serial): int(samples) for serial, samples in state["out"].items()}
        if self.path is not None and self.path.exists():
            os.truncate(self.path, min(int(state["bytes"]), self.path.stat().st_size))

    def _write(self, step: int, event: str, entry: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        line = json.dumps({"step": step, "event": event, **entry})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


@dataclass(frozen=True)
class Balance:
    """Of a run's books: serials by what became of them, and those that are still out."""

    ended: Mapping[str, tuple[int, ...]]
    out: tuple[int, ...]
    samples: int  # that were issued

    @property
    def balanced(self) -> bool:
        return not self.out


def read_books(path: Path) -> Balance:
    """Raises DataError for a serial that was issued or ended twice, or ended without being issued,
    naming the line.
    """
    out: dict[int, int] = {}  # samples by serial
    ended: dict[str, list[int]] = {fate: [] for fate in FATES}
    seen: set[int] = set()
    samples = 0
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            event, serials = entry["event"], [int(s) for s in entry["groups"]]
            for serial in serials:
                if event == ISSUED:
                    if serial in seen:
                        raise ValueError(f"group {serial} is issued again")
                    seen.add(serial)
                    out[serial] = int(entry["samples"])
                    samples += out[serial]
                elif serial not in out:
                    raise ValueError(f"group {serial} ends ({event}) without being out")
                else:
                    out.pop(serial)
                    ended[event].append(serial)
        except (ValueError, KeyError, TypeError) as e:
            raise DataError(f"{path}:{number}: the books are wrong: {e}") from e
    return Balance({fate: tuple(s) for fate, s in ended.items()}, tuple(sorted(out)), samples)


def main(arguments: Sequence[str]) -> int:
    """``python -m megarl.books RUN``: says what became of a run's groups; 1 where some are out."""
    balance = read_books(Path(arguments[0]) / "books.jsonl")
    issued = sum(map(len, balance.ended.values())) + len(balance.out)
    told = ", ".join(f"{len(serials)} {fate}" for fate, serials in balance.ended.items())
    print(f"{issued} groups ({balance.samples} samples) issued: {told}, {len(balance.out)} out")
    return int(not balance.balanced)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
