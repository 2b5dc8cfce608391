"""Processes that a collector's rewards have started, and whether they are gone."""

import time
from dataclasses import replace
from pathlib import Path

from megarl.rollout.process import lives
from megarl.types import GroupRequest
from tests.rollout.scripted import respond


def ends_with(request: GroupRequest) -> GroupRequest:
    """With a sample that is scored: its response ends."""
    prompt, budget = len(request.prompt.token_ids), request.sampling.max_new_tokens
    seeds = (s for s in range(1000) if respond(prompt, s, budget)[1] == "stop")
    return replace(request, seeds=(next(seeds),))


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = path.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == pid:
            found.append(int(path.parent.name))
    return found


def started_by_reward(log: Path, count: int = 1) -> list[list[int]]:
    """Of ``count`` deeds with children the pids of the reward's process and of these, once they are
    there.
    """
    deadline = time.monotonic() + 20
    while True:
        lines = [x for x in log.read_text().splitlines() if x.startswith("children ")]
        if len(lines) >= count:
            return [[int(pid) for pid in line.split()[1:]] for line in lines]
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def gone(*pids: int) -> None:
    """Waits for it."""
    deadline = time.monotonic() + 10
    while left := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
