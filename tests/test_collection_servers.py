"""Collecting for the next step while this one's weights are trained, and servers come and go."""

from pathlib import Path
from typing import Any

import pytest

from megarl.data.prompts import PromptStream
from megarl.types import Prompt
from tests.helpers.collecting import of_three
from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist

PROMPTS = [Prompt(f"p{i}", (1, 2), {}) for i in range(12)]


def collected(pool: WorkerPool, folder: Path, **script: Any) -> dict[str, Any]:
    """Two steps of a run that is one step off, as rank 0 of two sees them; one prompt is slow."""
    answers = {p.id: [True, False, False] for p in PROMPTS}
    given = {"prompts": PROMPTS, "answers": answers, "collectors": [0, 1], "per_step": 4}
    given |= {"schedule": "one_step_off", "count": 2, "folder": str(folder)}
    slow = PromptStream(PROMPTS, seed=0).take(6)[5].id
    found: dict[str, Any]
    given |= {"delays": {slow: 3}, **script}
    found, other = pool.run("tests.work_collection:steps", world=2, **given)
    assert found["error"] is other["error"] is None
    assert found["newcomers"] == other["newcomers"]
    assert found["counts"] == of_three(issued=8, trained=8)
    return found


def test_servers_that_come_while_the_weights_have_moved_wait_for_these(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """Else they would sample with the next weights, and say that it was with those before."""
    assert collected(pool, tmp_path)["newcomers"] == [True] + [False] * 4  # the first step; a push


def test_without_servers_the_weights_do_not_wait_for_the_next_steps_samples(
    pool: WorkerPool, tmp_path: Path
) -> None:
    found = collected(pool, tmp_path, server_dies=True)
    assert found["newcomers"] == [True, False, True, True, True]
