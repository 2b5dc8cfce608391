"""F7: what is trained is what was sampled, id for id, however a tokenizer would spell its text."""

from typing import Any

import numpy as np
import pytest

from megarl.rollout.scoring import Scorer
from megarl.types import Completion, GroupRequest, Prompt, Sampling, VersionSpan
from tests.rollout.rewards import grading

PIECES = ["", "</s>", "he", "llo", "hello", "h", "e", "l", "o", "<think>", "</think>", "\ufffd"]
END = 1


def decode(ids: Any) -> str:
    return "".join(PIECES[i] for i in ids)


def encode(text: str) -> list[int]:
    """The longest piece first, as a tokenizer with merges has it."""
    ids: list[int] = []
    while text:
        piece = max((p for p in PIECES[2:] if text.startswith(p)), key=len)
        ids.append(PIECES.index(piece))
        text = text[len(piece) :]
    return ids


@pytest.mark.parametrize(
    "response",
    [
        [2, 3, END],  # he llo, which would be encoded as hello
        [5, 6, 7, 7, 8, END],  # letter by letter
        [9, 2, 3, 10, 4, END],  # thoughts that a chat template would strip from its history
        [9, 5, 6, 3, 10],  # the same, cut off
        [11, 11, END],  # bytes that are no text
        [10, 10, 9, 9, END],  # marks in an odd order
        [END],
    ],
)
def test_ids_mask_and_log_probs_are_those_of_the_server(response: list[int]) -> None:
    heard: list[str] = []

    def reward(text: str, payload: Any, finished: bool) -> float:
        heard.append(text)
        return 0.0

    prompt = (2, 3, 5)  # itself spelled as encode() would not
    assert encode(decode(prompt)) != list(prompt)
    finish: Any = "stop" if response[-1] == END else "length"
    completion = Completion(
        "r",
        np.array(response, np.int32),
        -np.arange(1, len(response) + 1, dtype=np.float32),
        finish,
        (VersionSpan(3, 0, len(response), "server 0"),),
    )
    request = GroupRequest(5, 1, Prompt("p", prompt, {}), (0,), Sampling(1.0, 9))
    (sample,) = Scorer(decode, grading(reward)).samples(request, [completion])
    assert sample.tokens.tolist() == [*prompt, *response]
    assert sample.mask.tolist() == [False] * 3 + [True] * len(response)
    assert sample.rollout_logprobs.tolist() == [
        0,
        0,
        0,
        *(-float(i + 1) for i in range(len(response))),
    ]
    ended = response[-1] == END
    assert heard == ([decode(response[:-1])] if ended else [])  # text is for rewards alone
