"""Stages of the response length: when they end, and that a resumed run is in the same one."""

import json

import pytest

from megarl.config.rollout import Convergence, LengthStage
from megarl.curriculum import LengthCurriculum
from megarl.errors import DataError


def lengths(curriculum: LengthCurriculum, accuracies: list[float], first: int = 1) -> list[int]:
    """What every step from ``first`` on was allowed."""
    found = []
    for step, accuracy in enumerate(accuracies, first):
        found.append(curriculum.max_new_tokens)
        curriculum.update(step, accuracy)
    return found


def until(tokens: int, step: int | None = None) -> LengthStage:
    return LengthStage(max_new_tokens=tokens, until_step=step)


def converged(tokens: int, window: int, min_gain: float) -> LengthStage:
    end = Convergence(window=window, min_gain=min_gain)
    return LengthStage(max_new_tokens=tokens, until_converged=end)


def test_one_stage_lasts() -> None:
    assert lengths(LengthCurriculum([until(8)]), [0.0] * 5) == [8] * 5


def test_a_stage_ends_after_its_last_step() -> None:
    curriculum = LengthCurriculum([until(8, 2), until(16, 5), until(32)])
    assert lengths(curriculum, [0.5] * 7) == [8, 8, 16, 16, 16, 32, 32]


def test_a_stage_ends_when_accuracy_has_gained_too_little() -> None:
    """Windows of 2, means of eighths. After step 4: 5/16 - 1/8 = 3/16, after 5: 3/8 - 1/4 = 1/8,
    after 6: 3/8 - 5/16 = 1/16.
    """
    curriculum = LengthCurriculum([converged(8, 2, 0.125), until(16)])
    accuracies = [0.0, 0.25, 0.25, 0.375, 0.375, 0.375, 0.9]
    assert lengths(curriculum, accuracies) == [8] * 6 + [16]


@pytest.mark.parametrize("min_gain, stays", [(0.25, True), (0.26, False)])
def test_a_gain_as_large_as_asked_for_is_enough(min_gain: float, stays: bool) -> None:
    curriculum = LengthCurriculum([converged(8, 1, min_gain), until(16)])
    lengths(curriculum, [0.25, 0.5])
    assert (curriculum.max_new_tokens == 8) is stays


def test_falling_accuracy_ends_a_stage_even_where_no_gain_is_asked_for() -> None:
    assert lengths(LengthCurriculum([converged(8, 1, 0.0), until(16)]), [0.5] * 9) == [8] * 9
    curriculum = LengthCurriculum([converged(8, 1, 0.0), until(16)])
    assert lengths(curriculum, [0.5, 0.25, 0.0]) == [8, 8, 16]


def test_only_steps_of_the_stage_count() -> None:
    """Both stages need 2 windows of 2 steps of their own, whatever came before."""
    stages = [converged(8, 2, 0.1), converged(16, 2, 0.1), until(32)]
    assert lengths(LengthCurriculum(stages), [0.5] * 9) == [8] * 4 + [16] * 4 + [32]


def test_a_stage_whose_last_step_has_passed_is_left_out() -> None:
    stages = [converged(8, 2, 0.1), until(16, 3), until(32)]
    assert lengths(LengthCurriculum(stages), [0.5] * 5) == [8] * 4 + [32]


@pytest.mark.parametrize("cut", range(12))
def test_a_resumed_run_goes_on_in_the_same_stage_with_the_same_history(cut: int) -> None:
    stages = [converged(8, 2, 0.1), until(16, 8), converged(24, 1, 0.5), until(32)]
    accuracies = [0.0, 0.2, 0.2, 0.3, 0.3, 0.3, 0.9, 0.1, 0.0, 0.6, 0.7, 0.7]
    whole = lengths(LengthCurriculum(stages), accuracies)
    assert len(set(whole)) == 4
    before = LengthCurriculum(stages)
    head = lengths(before, accuracies[:cut])
    after = LengthCurriculum(stages)
    after.load_state(json.loads(json.dumps(before.state())))
    assert head + lengths(after, accuracies[cut:], cut + 1) == whole
    assert len(before.state()["accuracies"]) <= 4


def test_a_later_stage_may_be_changed_and_added_on_resuming() -> None:
    curriculum = LengthCurriculum([until(8, 2), until(16)])
    lengths(curriculum, [0.5] * 3)
    longer = LengthCurriculum([until(4, 1), until(16, 5), until(64)])
    longer.load_state(curriculum.state())
    assert lengths(longer, [0.5] * 3, 4) == [16, 16, 64]


@pytest.mark.parametrize("stages", [[until(8, 2)], [until(8, 2), until(32)]])
def test_a_saved_stage_that_is_no_more_is_refused(stages: list[LengthStage]) -> None:
    curriculum = LengthCurriculum([until(8, 2), until(16)])
    lengths(curriculum, [0.5] * 3)
    with pytest.raises(DataError, match=r"stage 2 of rollout.length_stages, with 16 new tokens; "):
        LengthCurriculum(stages).load_state(curriculum.state())
