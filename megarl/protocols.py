"""The seams: what siblings know of each other. ``loop.py`` is the only place where implementations
meet.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from megarl.types import (
    GroupOutcome,
    GroupRequest,
    Member,
    Metric,
    Prompt,
    Push,
    Sampling,
    Scored,
    StepMetrics,
    TrainPlan,
)

Bucket = list[tuple[str, torch.Tensor]]


class WeightSource(Protocol):
    """The trainer's weights under Hugging Face names."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor) of this rank's pipeline stage, in a fixed order; each on one of
        the stage's senders.

        Collective: all ranks of the stage iterate to the end (gathers inside); those that send
        nothing get nothing.
        """
        ...


class WeightSink(Protocol):
    """One server, as a weight push sees it: a closed vocabulary of control operations."""

    name: str
    boot: str  # of one start of its process (``Member``)
    ranks: int  # members of a weight group
    proves: bool  # once, that what it receives is what it computes with (``snapshot``)

    @property
    def local_address(self) -> str:
        """This machine's, as the server reaches it."""
        ...

    def control(self, op: str, payload: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """``op``: held, begin, join_group, leave_group, receive, receive_shared, receive_tensors,
        load_path, digest, snapshot, compare, commit, alive, release, resume_memory.

        Raises ServerError when the server refuses, does not answer in time or answers
        success=false.
        """
        ...


class Transport(Protocol):
    def push(self, version: int, sinks: Sequence[WeightSink]) -> Push:
        """Whole weights to these servers. Collective; every rank names the same ones in the same
        order. A server that fails, or does not answer in time, is left out and told of; the others
        get everything. Raises SyncError where the trainer's own part fails.
        """
        ...

    def stored(self, version: int) -> bool:
        """Whether a push of this version reads no weights of the source: what was sent of it lies
        where servers can load it. The same on all ranks.
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

    def weights(self, senders: int = 1) -> WeightSource:
        """``senders`` of every pipeline stage."""
        ...


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
    """Samples groups of a node's share in a process of its own, in the background. Calls return at
    once unless they say otherwise. One caller; while it waits in ``evaluate``, another thread may
    call ``suspects`` and ``serve_from``. ``reward_names``: of the components of samples'
    rewards; empty as long as no response has been scored.
    """

    reward_names: tuple[str, ...]

    def serve_from(self, members: Sequence[Member], version: int) -> None:
        """The servers that may be asked from now on, all of them with weights of this version at
        least: what older ones sample is not taken. What others have is withdrawn from them and
        asked for elsewhere.
        """
        ...

    def issue(self, requests: Sequence[GroupRequest]) -> None:
        """More groups, behind those that wait."""
        ...

    def wait(self, count: int, timeout_s: float) -> None:
        """Blocks until ``count`` outcomes can be taken, or something else is to be told (``take``
        raises, ``suspects`` is not empty), for at most ``timeout_s``.
        """
        ...

    def take(self) -> list[GroupOutcome]:
        """What has ended since the last call, in the order in which it ended. Raises DataError for
        a reward that is none, RunError when the process is gone.
        """
        ...

    def suspects(self) -> dict[Member, str]:
        """Servers that failed requests since the last call, and how."""
        ...

    def recall(self) -> None:
        """Stop sampling; returns when servers have none of its requests. Groups under way keep
        what they have, or not, as ``rollout.partial`` says; they go on at ``resume``.
        """
        ...

    def resume(self) -> None: ...

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        area: str,
        samples_per_prompt: int = 1,
        pass_at: Sequence[int] = (),
    ) -> StepMetrics:
        """Blocks. Metrics are ``{area}/*``; the same seeds every time, of no training step."""
        ...

    def close(self) -> None: ...


class Fleet(Protocol):
    """The rollout servers, as rank 0 watches over them: started, probed, restarted, or only
    probed. Safe to call from any thread.
    """

    def members(self) -> list[Member]:
        """Those that answered when last asked, in an order that lasts."""
        ...

    def suspect(self, member: Member, reason: str) -> None:
        """Have it probed now: requests to it failed."""
        ...

    def give_up(self, member: Member, reason: str) -> None:
        """It cannot be used as it is (its weights are broken, its answers are garbage): it is no
        member any more, and restarted if that is ours to do.
        """
        ...

    def hold(self) -> AbstractContextManager[None]:
        """Inside, nobody is probed: servers pause while weights arrive."""
        ...

    def pushed(self, members: Sequence[Member], version: int) -> None:
        """To be told inside a hold: they have the weights of this version now, which may be an
        older one than before.
        """
        ...

    def trouble(self) -> str | None:
        """Why no server will come any more, if that is so; with what each died of."""
        ...

    def close(self) -> None: ...


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
    "Fleet",
    "Metric",
    "MetricSink",
    "Reward",
    "Transport",
    "WeightSink",
    "WeightSource",
]
