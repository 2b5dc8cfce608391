"""Rewards of the tests, named ``import:tests.rollout.rewards:NAME``. Texts are numbers."""

import time
from collections.abc import Mapping
from typing import Any

from megarl.types import Scored


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
