"""Steps that are collected from made-up answers (``tests/work_collection.py``), and what came of
them.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.data.prompts import PromptStream
from megarl.types import Prompt
from tests.helpers.dist import WorkerPool

ALL, NONE, SOME = [True, True, True], [False, False, False], [True, False, False]
PROMPTS = [Prompt(f"p{i}", (1, 2), {}) for i in range(12)]
ORDER = [p.id for p in PromptStream(PROMPTS, seed=0).take(24)]  # as a run meets them: two epochs
EVEN = dict.fromkeys(ORDER[:12], SOME)

Run = Callable[..., dict[str, Any]]


def runner(pool: WorkerPool, folder: Path) -> Run:
    """Steps on two ranks; what both of them say, with every rank's own part."""

    def collect(collectors: list[int] | None = None, **arguments: Any) -> dict[str, Any]:
        base = {"prompts": PROMPTS, "collectors": collectors or [0], "per_step": 4, "answers": EVEN}
        settings = {"folder": str(folder), **base, **arguments}
        one, two = pool.run("tests.work_collection:steps", world=2, **settings)
        for step, other in zip(one["steps"], two["steps"], strict=True):
            for key in ("samples", "rewards", "versions", "holders", "accuracy"):
                assert step[key] == other[key], key
            step["held"] = [step.pop("tokens"), other["tokens"]]
        for key in ("stream", "names", "counts"):
            assert one[key] == two[key], key
        both = {k: [one[k], two[k]] for k in ("issued", "temperatures", "recalls", "most", "error")}
        return one | both

    return collect


def answers(*pattern: Any) -> dict[str, Any]:
    """The n-th prompt that a run meets is answered by the n-th of ``pattern``, then NONE."""
    return {key: pattern[i] if i < len(pattern) else NONE for i, key in enumerate(ORDER[:12])}


def of_three(**groups: int) -> dict[str, int]:
    """What books count: samples, of groups of three."""
    return {event: 3 * count for event, count in groups.items()}


def serials(step: dict[str, Any]) -> list[int]:
    """Of a step's groups. Labels count from 0, samples are whole, prompts are those issued."""
    found = [(label, serial) for _, label, index, serial in step["samples"] if index == 0]
    assert [label for label, _ in found] == list(range(len(found)))
    assert set(Counter(label for _, label, _, _ in step["samples"]).values()) == {3}
    assert all(prompt == ORDER[serial] for prompt, _, _, serial in step["samples"])
    return [serial for _, serial in found]
