"""Samples, their rewards, and what is known of them everywhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megarl.types.rollout import VersionSpan


@dataclass(frozen=True)
class Sample:
    """One trajectory with its reward: what is trained is what was sampled, token for token."""

    prompt_id: str
    group: int  # samples of one prompt in one step share it
    index: int  # 0..G-1 inside the group
    tokens: NDArray[np.int32]  # [L] prompt + response
    mask: NDArray[np.bool_]  # [L] True where the token is trained
    rollout_logprobs: NDArray[np.float32]  # [L] 0 where mask is False
    rewards: NDArray[np.float32]  # [k] reward components; their sum is the reward
    correct: bool  # raw correctness, before any shaping
    truncated: bool
    version_spans: tuple[VersionSpan, ...] = ()
    routing: NDArray[Any] | None = None  # u8 | u16 [L - 1, M, K]
    trajectory: int | None = (
        None  # samples of one episode share it and its reward; None: an episode
    )
    step_rewards: NDArray[np.float32] | None = None  # [k] of the reasoning steps
    step_ends: NDArray[np.int32] | None = None  # [k] index in ``tokens`` of every step's last token
    values: NDArray[np.float32] | None = None  # [L] critic's value of the state after token t
    ref_logprobs: NDArray[np.float32] | None = None  # [L] reference policy
    serial: int = -1  # of its group in the run (``GroupRequest``); -1: it was not sampled here

    @property
    def name(self) -> str:
        return f"{self.prompt_id}/{self.index}"

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def reward(self) -> float:
        return float(self.rewards.sum())

    @property
    def trained_tokens(self) -> int:
        """The first token follows on nothing: it has no log-prob and is never trained."""
        return int(self.mask[1:].sum())

    @property
    def response_tokens(self) -> int:
        """That were sampled, trained or not; where nobody told versions, those that are trained: a
        tool's answer between them is none of the policy's.
        """
        return self.version_spans[-1].end if self.version_spans else self.trained_tokens

    @property
    def brings(self) -> tuple[str, ...]:
        """The optional numbers of every token that it has."""
        return tuple(n for n in ("values", "ref_logprobs") if getattr(self, n) is not None)

    @property
    def facts(self) -> "SampleFacts":
        routing = self.routing
        return SampleFacts(
            prompt_id=self.prompt_id,
            group=self.group,
            index=self.index,
            length=self.length,
            trained_tokens=self.trained_tokens,
            response_tokens=self.response_tokens,
            rewards=self.rewards,
            correct=self.correct,
            truncated=self.truncated,
            trajectory=self.trajectory,
            step_rewards=self.step_rewards,
            step_ends=self.step_ends,
            brings=self.brings,
            routing=None if routing is None else (*routing.shape[1:], routing.dtype.name),
            serial=self.serial,
            version_spans=self.version_spans,
        )

    def untrained(self) -> "Sample":
        return replace(self, mask=np.zeros_like(self.mask))


@dataclass(frozen=True)
class SampleFacts:
    """What every rank knows of every sample: all of it that does not grow with its length. Fields
    and properties are those of ``Sample``.
    """

    prompt_id: str
    group: int
    index: int
    length: int
    trained_tokens: int
    response_tokens: int
    rewards: NDArray[np.float32]
    correct: bool
    truncated: bool
    trajectory: int | None = None
    step_rewards: NDArray[np.float32] | None = None
    step_ends: NDArray[np.int32] | None = None
    brings: tuple[str, ...] = ()
    routing: tuple[int, int, str] | None = None  # M, K and dtype of what it has
    serial: int = -1
    version_spans: tuple[VersionSpan, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.prompt_id}/{self.index}"

    @property
    def reward(self) -> float:
        return float(self.rewards.sum())

    def untrained(self) -> "SampleFacts":
        return replace(self, trained_tokens=0)


# What plans and statistics are made of, either will do
Known = Sample | SampleFacts


OneOfKnown = TypeVar("OneOfKnown", Sample, SampleFacts)


@dataclass(frozen=True)
class GroupOutcome:
    """What became of a group. ``samples``: all of it, in the order of the seeds, or none."""

    serial: int
    samples: tuple[Sample, ...] = ()
    failed: str = ""  # why it has no samples, where that was not asked for
    unscored: bool = False  # it failed because of its reward, not of servers
    discarded: bool = False  # stopped half-way, where partial responses are not kept
    attempts: int = 1  # times that it was asked for because servers failed it, plus 1
    tokens: int = 0  # sampled for it, those included that were thrown away


@dataclass(frozen=True)
class Scored:
    """A reward in parts. ``components``: name -> reward, their sum is the sample's reward; the same
    names for every sample. ``correct``: raw correctness, None where full marks (a sum of 1 or more)
    decide. ``steps``: (end, reward) of every reasoning step, ``end`` counted in characters of the
    response's text.
    """

    components: Mapping[str, float]
    correct: bool | None = None
    steps: Sequence[tuple[int, float]] = ()
