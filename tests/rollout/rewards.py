"""Rewards of the tests, named ``import:tests.rollout.rewards:NAME``. Texts are numbers."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from megarl.data.rewards import score
from megarl.protocols import Reward
from megarl.rollout.scoring import Grade
from megarl.types import Scored


def grading(reward: Reward) -> Grade:
    """A reward as a ``Scorer`` calls it, in this process."""

    def grade(responses: Any, payload: Any) -> list[Scored]:
        return [
            score(reward, text, payload, finished=True, sample=name) for name, text in responses
        ]

    return grade


def even_length(text: str, payload: Mapping[str, Any], finished: bool) -> float:
    assert finished
    return float(len(text.split()) % 2 == payload["answer"])


def in_parts(text: str, payload: Mapping[str, Any], finished: bool) -> Scored:
    """Right, and a bonus a word; a step after every second word, worth its number."""
    words = text.split()
    ends = [len(" ".join(words[: n + 1])) for n in range(1, len(words), 2)]
    return Scored(
        {"right": even_length(text, payload, finished), "words": 0.125 * len(words)},
        correct=len(words) > 2,
        steps=[(end, float(i)) for i, end in enumerate(ends)],
    )


def as_told(text: str, payload: Mapping[str, Any], finished: bool) -> Any:
    """What the prompt says: a number, or something that is none."""
    if "sleep" in payload:
        time.sleep(payload["sleep"])
    return {"none": None, "nan": float("nan"), "dict": {}, "text": "1"}.get(
        payload["reward"], payload["reward"]
    )


def mixed(text: str, payload: Mapping[str, Any], finished: bool) -> Any:
    return (as_told if "reward" in payload else even_length)(text, payload, finished)


def deadly(text: str, payload: Mapping[str, Any], finished: bool) -> float:
    """``mixed``, but where the payload has ``deed`` it never returns, or ends its process."""
    if deed := payload.get("deed"):
        DEEDS[deed]()
    return mixed(text, payload, finished)


def _start_children() -> None:
    """One, and one that leads a session; both sleep, and their pids are printed."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    children = [subprocess.Popen(sleep, start_new_session=new) for new in (False, True)]
    print("children", os.getpid(), *(child.pid for child in children), flush=True)


def _sleep_with_children() -> None:
    _start_children()
    time.sleep(600)


def _leave_orphans() -> None:
    _start_children()
    os._exit(7)


DEEDS = {
    "sleep": lambda: time.sleep(600),
    "loop": lambda: re.match("(a+)+$", "a" * 60 + "b"),  # lets no other thread run
    "exit": _leave_orphans,
    "sys.exit": lambda: sys.exit(0),
    "abort": os.abort,
    "children": _sleep_with_children,
}
