"""A collector whose process dies gets another, whatever it was doing, as often as is allowed."""

from collections.abc import Sequence
from typing import Any

import pytest

from megarl.errors import RunError
from megarl.rollout.collector_restart import RestartingCollector
from megarl.types import GroupOutcome, GroupRequest, Member
from tests.rollout.collecting import request

SERVERS = (Member("server 0", "http://nowhere:1", "a"),)


class Mortal:
    """A process that dies in the calls named in ``dies_in``; what it was told."""

    def __init__(self, *dies_in: str) -> None:
        self.dies_in, self.told = dies_in, list[Any]()
        self.reward_names: tuple[str, ...] = ()
        self.ended: list[GroupOutcome] = []

    def _tell(self, what: str, *rest: Any) -> None:
        self.told.append((what, *rest) if rest else what)
        if what in self.dies_in:
            raise RunError(f"died in {what}")

    def serve_from(self, members: Sequence[Member], version: int) -> None:
        self._tell("serve from", tuple(members), version)

    def issue(self, requests: Sequence[GroupRequest]) -> None:
        self._tell("issue", [r.serial for r in requests])

    def wait(self, count: int, timeout_s: float) -> None:
        self._tell("wait")

    def take(self) -> list[GroupOutcome]:
        self._tell("take")
        return self.ended

    def recall(self) -> None:
        self._tell("recall")

    def resume(self) -> None:
        self._tell("resume")

    def evaluate(self, *given: Any, **more: Any) -> list[Any]:
        self._tell("evaluate")
        return ["told"]

    def probe_routing(self, tokens: Sequence[int]) -> None:
        self._tell("probe")

    def close(self) -> None:
        self._tell("close")


def collector_of(*processes: Mortal, restarts: int = 8) -> RestartingCollector:
    """Which has three groups, one of which has ended."""
    lives = iter(processes)
    found = RestartingCollector(lambda: next(lives), restarts)  # type: ignore[arg-type,return-value]
    found.serve_from(SERVERS, 7)
    found.issue([request(n) for n in range(3)])
    processes[0].ended = [GroupOutcome(1, failed="x")]
    return found


DEEDS: dict[str, Any] = {
    "wait": lambda c: c.wait(1, 1.0),
    "take": lambda c: c.take(),
    "recall": lambda c: c.recall(),
    "evaluate": lambda c: c.evaluate([], None, area="eval"),
    "probe": lambda c: c.probe_routing([1]),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_whenever_it_dies_another_one_goes_on(deed: str) -> None:
    first, second = Mortal(), Mortal()
    collector = collector_of(first, second)
    assert [o.serial for o in collector.take()] == [1]
    first.ended, first.dies_in = [], (deed,)
    DEEDS[deed](collector)
    again = ["recall"] * (deed == "recall")
    assert second.told[: 2 + len(again)] == [("serve from", SERVERS, 7), *again, ("issue", [0, 2])]
    assert first.told[-1] == "close"


@pytest.mark.parametrize("deed", DEEDS)
def test_those_that_die_as_they_start_are_replaced_too(deed: str) -> None:
    """It is recalled; so is whoever comes next, before it is given the groups."""
    first, *others = Mortal(), Mortal("recall"), Mortal("recall"), Mortal()
    collector = collector_of(first, *others)
    collector.recall()
    first.dies_in = (deed,)
    DEEDS[deed](collector)
    for died in others[:2]:
        assert died.told == [("serve from", SERVERS, 7), "recall", "close"]
    expected = [("serve from", SERVERS, 7), "recall", ("issue", [0, 1, 2])]
    assert others[2].told[:3] == expected


def test_the_last_death_is_the_run_s() -> None:
    first = Mortal("take")
    collector = collector_of(first, *(Mortal("recall") for _ in range(2)), restarts=2)
    collector.recall()
    with pytest.raises(RunError, match="died in recall"):
        collector.take()
    with pytest.raises(RunError, match="died in take"):
        collector_of(Mortal("take"), restarts=0).take()
