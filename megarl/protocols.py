"""The seams: what siblings know of each other. ``loop.py`` is the only place where implementations
meet.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from megarl.types import Metric, Prompt, Rollouts, Scored, StepMetrics, SyncReceipt, TrainPlan

Bucket = list[tuple[str, torch.Tensor]]


class WeightSource(Protocol):
    """The trainer's weights under Hugging Face names."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor) of this rank's pipeline stage, in a fixed order, on the stage's
        sender.

        Collective: all ranks of the stage iterate to the end (gathers inside); the others get
        nothing.
        """
        ...


class WeightSink(Protocol):
    """One server, as a weight push sees it: a closed vocabulary of control operations."""

    name: str
    ranks: int  # members of a weight group

    def control(self, op: str, payload: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """``op``: begin, join_group, leave_group, receive, load_path, digest, commit.

        Raises ServerError when the server refuses, does not answer in time or answers
        success=false.
        """
        ...


class Transport(Protocol):
    def connect(self, source: WeightSource, sinks: Sequence[WeightSink]) -> None: ...

    def push(self, version: int) -> SyncReceipt | None:
        """Collective. The receipt on rank 0, None elsewhere. Raises SyncError; a failed push is
        never silent.
        """
        ...

    def close(self) -> None: ...


class Actor(Protocol):
    """A model in training, in whatever layout. Collective: every rank calls in the same order."""

    def logprobs(self, plan: TrainPlan) -> None:
        """Fill every row's old and reference log-probs, as far as the objective wants them (last
        stage only).
        """
        ...

    def train(self, plan: TrainPlan) -> StepMetrics: ...

    def offload(self) -> None:
        """Weights, optimizer state and gradient buffers to host memory; not collective. What
        computes brings back what it needs, and leaves the device as it found it.
        """
        ...

    def onload(self) -> None:
        """Back to the device, to stay; bit for bit but for gradients, which are zero."""
        ...

    def weights(self) -> WeightSource: ...


class Critic(Protocol):
    """A value model in training beside an actor, in its layout or in another. Collective likewise;
    it has ``offload`` and ``onload`` as an actor has.
    """

    def values(self, plan: TrainPlan) -> None:
        """Fill every row's ``values`` (last stage only)."""
        ...

    def train(self, plan: TrainPlan) -> StepMetrics:
        """Towards the rows' ``returns``."""
        ...


class Collector(Protocol):
    def collect(
        self,
        prompts: Sequence[Prompt],
        step: int,
        max_new_tokens: int,
        *,
        earlier: Sequence[Prompt] = (),
    ) -> Rollouts:
        """``earlier``: prompts that come before these in the same step, whoever samples them."""
        ...


class Reward(Protocol):
    """Scores one response. ``text`` is the decoded response without the end token.

    A ``Scored`` has the reward in parts, and of every reasoning step; a number is the whole.
    """

    def __call__(self, text: str, payload: Mapping[str, Any], finished: bool) -> float | Scored: ...


class MetricSink(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


__all__ = [
    "Actor",
    "Bucket",
    "Collector",
    "Critic",
    "Metric",
    "MetricSink",
    "Reward",
    "Transport",
    "WeightSink",
    "WeightSource",
]
