"""What a source of rollouts makes of its settings, without servers."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist
ROOM = 64  # rollout.context_length
HALF = {"name": "a", "every": 1}


@pytest.mark.parametrize(
    ("evaluation", "train", "heldout", "own", "wrong"),
    [
        ({"every": 2, "max_new_tokens": 8, "sets": [{**HALF, "max_new_tokens": 50}]},
         *(48, 56, 14, None)),
        ({"every": 2, "max_new_tokens": 8, "sets": [{**HALF, "max_new_tokens": 50}]},
         *(48, 56, 15, "own.jsonl")),
        ({"every": 2, "max_new_tokens": 8, "sets": [{**HALF, "max_new_tokens": 50}]},
         *(48, 57, 14, "heldout.jsonl")),
        ({"every": 2, "max_new_tokens": 60, "sets": [{**HALF, "max_new_tokens": 5}]},
         *(48, 4, 59, None)),
        ({"every": 0, "max_new_tokens": 60, "sets": [HALF]}, *(48, None, 4, None)),
        ({"every": 0, "max_new_tokens": 60, "sets": [HALF]}, *(48, None, 5, "own.jsonl")),
        ({"every": 1}, *(49, 40, None, "train.jsonl")),
        ({"every": 1}, *(48, 41, None, "heldout.jsonl")),
    ],
)  # fmt: skip
def test_prompts_leave_room_for_the_longest_response_to_them(
    pool: WorkerPool,
    tmp_path: Path,
    evaluation: dict[str, Any],
    train: int,
    heldout: int | None,
    own: int | None,
    wrong: str | None,
) -> None:
    """``train``, ``heldout``, ``own``: tokens of the only prompt of each file; responses have 16 in
    training and 24 in evaluations, where nothing else is said.
    """
    files = {"train": train, "heldout": heldout, "own": own}
    lengths = {name: n for name, n in files.items() if n is not None}
    (found,) = pool.run(
        "tests.work_sources:prompts",
        world=1,
        folder=str(tmp_path),
        lengths=lengths,
        evaluation=evaluation,
    )
    if wrong is None:
        assert found == lengths
    else:
        assert wrong in found and "1 prompts are longer than" in found


def test_a_run_that_goes_on_samples_anew_with_the_length_of_its_stage(pool: WorkerPool) -> None:
    (limits,) = pool.run("tests.work_sources:limits_as_the_collection_loads", world=1)
    assert limits == {"of stage 2": 24, "without stages": 9}


def test_a_collection_knows_what_decides_its_samples(pool: WorkerPool) -> None:
    (known,) = pool.run("tests.work_sources:decisive", world=1, rollout={"temperature": 0.7})
    assert known["rollout.temperature"] == 0.7 and known["moe.routing_replay"] == "without rollout"


def test_a_checkpoint_needs_room_for_the_samples_that_are_left_over(pool: WorkerPool) -> None:
    """Models of 1,000 bytes a rank on 4 ranks, and 77 of samples on all of them together."""
    (needed,) = pool.run("tests.work_sources:bytes_of_a_checkpoint", world=1)
    assert needed == 4077
