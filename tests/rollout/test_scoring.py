"""Responses -> samples: masks, rewards in parts, names of components."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from megarl.errors import DataError
from megarl.rollout.scoring import Scorer
from megarl.types import Completion, Finish, GroupRequest, Prompt, Sampling, Scored, VersionSpan
from tests.rollout.rewards import even_length, grading, in_parts

EOS = 1


def spell(ids: Any) -> str:
    return " ".join(map(str, ids))


def completion(
    tokens: Sequence[int],
    finish: Finish = "stop",
    spans: Sequence[tuple[int, int]] = (),
) -> Completion:
    """``spans``: (version, end)"""
    ends = [0, *(end for _, end in spans)]
    return Completion(
        request_id="r",
        token_ids=np.array(tokens, np.int32),
        logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32) / 8,
        finish=finish,
        version_spans=tuple(
            VersionSpan(v, start, end) for (v, end), start in zip(spans, ends, strict=False)
        ),
    )


def request(serial: int = 3, answer: int = 0, count: int = 2) -> GroupRequest:
    prompt = Prompt(f"p{serial}", (5, 6, 7), {"answer": answer})
    return GroupRequest(serial, 1, prompt, tuple(range(count)), Sampling(1.0, 8))


def test_a_sample_is_its_response_behind_its_prompt() -> None:
    scorer = Scorer(spell, grading(even_length))
    right, cut = scorer.samples(request(), [completion([4, 9, EOS]), completion([4] * 8, "length")])
    assert right.tokens.tolist() == [5, 6, 7, 4, 9, EOS]
    assert right.mask.tolist() == [False] * 3 + [True] * 3
    assert right.rollout_logprobs.tolist() == [0, 0, 0, -0.125, -0.25, -0.375]
    assert (right.rewards.tolist(), right.correct, right.truncated) == ([1.0], True, False)
    assert (right.group, right.serial, right.index, right.name) == (3, 3, 0, "p3/0")
    assert (cut.rewards.tolist(), cut.correct, cut.truncated) == ([0.0], False, True)
    assert cut.index == 1
    types = [right.tokens.dtype, right.mask.dtype, right.rollout_logprobs.dtype]
    assert types == [np.int32, np.bool_, np.float32]


def test_text_is_the_response_without_its_end_token_and_nothing_for_what_was_cut() -> None:
    seen: list[str] = []

    def reward(text: str, payload: Mapping[str, Any], finished: bool) -> float:
        seen.append(text)
        return 0.0

    parts = [completion([4, EOS, 9, EOS]), completion([4, EOS], "length"), completion([EOS])]
    Scorer(spell, grading(reward)).samples(request(), parts)
    assert seen == ["4 1 9", ""]


@pytest.mark.parametrize(
    ("spans", "trained"),
    [
        ([(2, 7)], "1111111"),
        ([(1, 4), (2, 7)], "0000111"),  # F4: 4 old tokens and 3 new ones
        ([(1, 2), (2, 3), (5, 7)], "0001111"),
        ([(1, 6), (2, 7)], "0000001"),
        ([(2, 3), (2, 7)], "1111111"),  # of two servers
    ],
)
def test_f4_of_a_continued_response_only_the_last_versions_tokens_are_trained(
    spans: list[tuple[int, int]], trained: str
) -> None:
    part = completion([4, 9, 8, 4, 9, 8, EOS], spans=spans)
    (sample,) = Scorer(spell, grading(even_length), mask_continued=True).samples(request(), [part])
    mask = [c == "1" for c in "000" + trained]
    assert sample.mask.tolist() == mask
    expected = [0, 0, 0, *part.logprobs.tolist()]
    assert sample.rollout_logprobs.tolist() == [e * m for e, m in zip(expected, mask, strict=True)]
    assert len(sample.tokens) == len(sample.mask) == len(sample.rollout_logprobs) == 10
    (sample,) = Scorer(spell, grading(even_length)).samples(request(), [part])
    assert sample.mask.tolist() == [False] * 3 + [True] * 7


@pytest.mark.parametrize("wrong", [None, math.nan, math.inf, {}, "1", 1e300])
def test_f13_a_reward_that_is_no_number_names_the_sample(wrong: Any) -> None:
    scorer = Scorer(spell, grading(lambda *_: wrong))
    with pytest.raises(DataError, match=r"the reward of sample p3/1 is .*accepted: a finite"):
        scorer.samples(request(), [completion([4] * 8, "length"), completion([4, EOS])])


def test_a_reward_in_parts_is_kept_in_parts() -> None:
    parts = [completion([7] * n + [EOS]) for n in range(5)] + [completion([7] * 8, "length")]
    scorer = Scorer(spell, grading(in_parts))
    *scored, cut = scorer.samples(request(), parts)
    assert scorer.reward_names == ("right", "words")
    for n, s in enumerate(scored):
        assert s.rewards.tolist() == [float(n % 2 == 0), 0.125 * n] and s.correct == (n > 2)
        if n > 1:
            assert s.step_ends is not None and s.step_rewards is not None
            assert s.step_ends.tolist() == list(range(3 + 1, 3 + n, 2))
            assert s.step_rewards.tolist() == [float(i) for i in range(n // 2)]
            assert (s.step_ends.dtype, s.step_rewards.dtype) == (np.int32, np.float32)
        else:
            assert s.step_ends is None and s.step_rewards is None
    assert (cut.rewards.tolist(), cut.correct, cut.step_ends) == ([0.0, 0.0], False, None)


def test_components_with_other_names_name_both_samples_and_both_lists() -> None:
    def reward(text: str, payload: Mapping[str, Any], finished: bool) -> Scored | float:
        return Scored({"a": 1.0, "b": 0.0}) if payload["answer"] else 1.0

    scorer = Scorer(spell, grading(reward))
    scorer.samples(request(serial=1, answer=1), [completion([4, EOS])])
    words = "sample p2/0 has the components reward; accepted: those of sample p1/0, a, b$"
    with pytest.raises(DataError, match=words):
        scorer.samples(request(serial=2), [completion([4, EOS])])


def test_names_are_remembered_while_nothing_ends() -> None:
    """0 in as many components as were seen."""
    scorer, cut = Scorer(spell, grading(in_parts)), completion([7] * 8, "length")
    (first,) = scorer.samples(request(), [cut])
    assert scorer.reward_names == () and first.rewards.tolist() == [0.0]
    scorer.samples(request(), [completion([7, EOS])])
    (later,) = scorer.samples(request(), [cut])
    assert later.rewards.tolist() == [0.0, 0.0]
