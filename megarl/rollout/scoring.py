"""Whole responses -> scored samples: text, reward, mask."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.data.rewards import UNSCORED, pad_rewards, step_tokens
from megarl.errors import DataError
from megarl.types import Completion, GroupRequest, Sample, Scored

Decode = Callable[[Sequence[int]], str]
# of (name, text) of responses to one prompt, and its payload
Grade = Callable[[Sequence[tuple[str, str]], Mapping[str, Any]], Sequence[Scored]]


class Scorer:
    """`decode` turns token ids into text; the end token of a response is left out. `grade` scores
    those that ended.

    Remembers the names of the reward's components: every response's are compared with those of the
    first one that was scored.
    """

    def __init__(self, decode: Decode, grade: Grade, *, mask_continued: bool = False) -> None:
        """`mask_continued`: train only what the last version of each response sampled."""
        self._decode, self._grade, self._mask_continued = decode, grade, mask_continued
        self.reward_names: tuple[str, ...] = ()
        self._named_by = ""

    def samples(
        self, request: GroupRequest, completions: Sequence[Completion]
    ) -> tuple[Sample, ...]:
        """Raises DataError for a reward that is no finite number, or has other components than
        those before it, and UnscoredError.
        """
        name = request.prompt.id
        spoken = [_spoken(completion) for completion in completions]
        ended = [i for i, completion in enumerate(completions) if completion.finish == "stop"]
        texts = [(f"{name}/{i}", self._decode(spoken[i])) for i in ended]
        scored = [UNSCORED] * len(completions)
        for i, found in zip(ended, self._grade(texts, request.prompt.payload), strict=True):
            self._compare_names(found, f"{name}/{i}")
            scored[i] = found
        samples = [
            self._sample(request, index, completion, spoken[index], scored[index])
            for index, completion in enumerate(completions)
        ]
        return tuple(pad_rewards(samples, len(self.reward_names) or 1))

    def _sample(
        self,
        request: GroupRequest,
        index: int,
        completion: Completion,
        spoken: Sequence[int],
        scored: Scored,
    ) -> Sample:
        prompt = request.prompt
        asked = np.array(prompt.token_ids, np.int32)
        steps = bool(scored.steps)
        ends = step_tokens(spoken, [end for end, _ in scored.steps], self._decode) if steps else []
        trained = np.ones(len(completion.token_ids), bool)
        if self._mask_continued:
            trained = _of_last_version(completion)
        return Sample(
            prompt_id=prompt.id,
            group=request.serial,
            index=index,
            tokens=np.concatenate([asked, completion.token_ids]),
            mask=np.concatenate([np.zeros(len(asked), bool), trained]),
            rollout_logprobs=np.concatenate(
                [np.zeros(len(asked), np.float32), np.where(trained, completion.logprobs, 0)]
            ),
            rewards=np.array(list(scored.components.values()), np.float32),
            correct=bool(scored.correct),
            truncated=completion.finish != "stop",
            version_spans=completion.version_spans,
            routing=completion.routing,
            step_rewards=np.array([r for _, r in scored.steps], np.float32) if steps else None,
            step_ends=np.array(ends, np.int32) + np.int32(len(asked)) if steps else None,
            serial=request.serial,
        )

    def _compare_names(self, scored: Scored, sample: str) -> None:
        names = tuple(scored.components)
        if not self.reward_names:
            self.reward_names, self._named_by = names, sample
        elif names != self.reward_names:
            raise DataError(
                f"the reward of sample {sample} has the components {', '.join(names)}; accepted: "
                f"those of sample {self._named_by}, {', '.join(self.reward_names)}"
            )


def _spoken(completion: Completion) -> list[int]:
    """The response without its end token."""
    response: list[int] = completion.token_ids.tolist()
    return response[:-1] if completion.finish == "stop" else response


def _of_last_version(completion: Completion) -> NDArray[np.bool_]:
    """bool [Lc]"""
    spans = completion.version_spans
    last = np.zeros(len(completion.token_ids), bool)
    for span in spans:
        last[span.start : span.end] = span.version == spans[-1].version
    return last
