"""The vocabulary: every dataclass that crosses a package.

Sizes: N samples in a step, G samples per prompt, L tokens of one sample (prompt + response), Lp
prompt tokens, Lc = L - Lp response tokens, T tokens of a packed row (after padding), S segments in
it, V vocabulary, M MoE layers, K routed experts a token.

One sample's life, with real numbers (prompt ``3 + 5 - 2 = <think>``, ids 9 16 11 17 8 20 2; Lp=7)::

    Prompt(id="p12", token_ids=(9, 16, 11, 17, 8, 20, 2), payload={"answer": "6"})
      -> Completion(token_ids=[14, 17, 8, 3, 12, 1], logprobs=[-.1, ...], finish="stop")    Lc=6
      -> Sample(tokens=[9 ... 2 14 17 8 3 12 1], mask=[F]*7 + [T]*6, rewards=[1.0])         L=13
      -> one segment of a PackedBatch, target-aligned: entry t is about targets[t] = tokens[t + 1]
         tokens   9 16 11 17  8 20  2 14 17  8  3 12  1
         targets 16 11 17  8 20  2 14 17  8  3 12  1  0
         mask     F  F  F  F  F  F  T  T  T  T  T  T  F     the last position is never trained
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Job:
    """A trainer process's place among the others; ``launch`` names this start of the job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launch: str
    master_address: str  # of rank 0's node, as every rank reaches it

    @property
    def nodes(self) -> int:
        return self.world_size // self.local_world_size


@dataclass(frozen=True)
class Prompt:
    """What is asked. ``payload`` is private to the task (answer, metadata) and never reaches a
    server.
    """

    id: str
    token_ids: tuple[int, ...]
    payload: Mapping[str, Any]


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens ``[start, end)`` were sampled by weights ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class RoutingShape:
    """What routing is of a model: ``moe_layers`` [layers], True where a layer has experts, of which
    ``topk`` of ``experts`` are chosen for a token.
    """

    moe_layers: tuple[bool, ...]
    topk: int
    experts: int

    @property
    def num_moe_layers(self) -> int:
        return sum(self.moe_layers)


@dataclass(frozen=True)
class Completion:
    """One response as the server returned it; ``logprobs[t]`` is of ``token_ids[t]``, natural log,
    fp32.
    """

    request_id: str
    token_ids: NDArray[np.int32]  # [Lc]
    logprobs: NDArray[np.float32]  # [Lc]
    finish: Finish
    version_spans: tuple[VersionSpan, ...]
    routing: NDArray[Any] | None = None  # u8 | u16 [L - 1, M, K]; the last token was never routed


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
            rewards=self.rewards,
            correct=self.correct,
            truncated=self.truncated,
            trajectory=self.trajectory,
            step_rewards=self.step_rewards,
            step_ends=self.step_ends,
            brings=self.brings,
            routing=None if routing is None else (*routing.shape[1:], routing.dtype.name),
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
    rewards: NDArray[np.float32]
    correct: bool
    truncated: bool
    trajectory: int | None = None
    step_rewards: NDArray[np.float32] | None = None
    step_ends: NDArray[np.int32] | None = None
    brings: tuple[str, ...] = ()
    routing: tuple[int, int, str] | None = None  # M, K and dtype of what it has

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
class Scored:
    """A reward in parts. ``components``: name -> reward, their sum is the sample's reward; the same
    names for every sample. ``correct``: raw correctness, None where full marks (a sum of 1 or more)
    decide. ``steps``: (end, reward) of every reasoning step, ``end`` counted in characters of the
    response's text.
    """

    components: Mapping[str, float]
    correct: bool | None = None
    steps: Sequence[tuple[int, float]] = ()


@dataclass
class PackedBatch:
    """One row of packed sequences: a microbatch of one data-parallel rank. Target-aligned (module
    docstring).

    Segments lie one after another; each is padded to a multiple the layout needs, and padding at
    the end of the row is a segment of its own without a true token. Padding has ``valid`` and
    ``mask`` False and weight 0. Every pipeline stage has the bounds; tokens only the first and the
    last, what a loss needs only the last: elsewhere they are 0. ``weight`` carries the whole
    normalisation from *global* counts: a loss is ``(per_token * weight).sum()``.
    """

    tokens: torch.Tensor  # i64 [T]
    targets: torch.Tensor  # i64 [T]
    positions: torch.Tensor  # i64 [T], restart at 0 in every segment
    cu_seqlens: torch.Tensor  # i32 [S + 1] padded bounds; cu_seqlens[S] == T
    lengths: torch.Tensor  # i32 [S] true tokens of every segment (0 for pure padding)
    valid: torch.Tensor  # bool [T]
    mask: torch.Tensor  # bool [T]
    weight: torch.Tensor  # f32 [T]
    advantages: torch.Tensor  # f32 [T]
    rollout_logprobs: torch.Tensor  # f32 [T]
    samples: tuple[int, ...]  # index in the step's sample list of every non-padding segment
    routing: torch.Tensor | None = None  # u8 | u16 [T, M of the stage, K] experts of the rollout
    routed: torch.Tensor | None = None  # bool [T], where ``routing`` says something
    # Of the pass before the update: u8 | u16 [T / (cp tp), M of the stage, K], this rank's tokens
    old_routing: torch.Tensor | None = None
    # Of the passes before the update, on the last pipeline stage; or recorded
    old_logprobs: torch.Tensor | None = None  # f32 [T]
    old_entropy: torch.Tensor | None = None  # f32 [T]
    ref_logprobs: torch.Tensor | None = None  # f32 [T]
    values: torch.Tensor | None = None  # f32 [T]
    # Computed from them (``experience.py``), constants of the loss
    returns: torch.Tensor | None = None  # f32 [T], what values are regressed on
    correction: torch.Tensor | None = None  # f32 [T], weight of the policy term
    selected: torch.Tensor | None = None  # bool [T], tokens an objective treats differently

    def spread(self, of_sample: Callable[[int], "NDArray[Any] | float"]) -> torch.Tensor:
        """f64 [T], target-aligned: ``of_sample(i)`` is a number for all trained tokens of sample i,
        or one for each of its L tokens. 0 where nothing is trained.
        """
        out = np.zeros(len(self.tokens))
        for i, start, length in self.segments():
            values = np.broadcast_to(of_sample(i), length)
            out[start : start + length - 1] = values[1:]
        return torch.where(self.mask, torch.from_numpy(out), 0.0)

    def segments(self) -> Iterator[tuple[int, int, int]]:
        """(sample, first position, true length) of every sequence."""
        starts, lengths = self.cu_seqlens.tolist(), self.lengths.tolist()
        for k, i in enumerate(self.samples):
            yield i, starts[k], lengths[k]

    def of_segments(self, values: Sequence[float] | Mapping[int, float]) -> torch.Tensor:
        """f64 [S]: ``values[i]`` of every segment's sample i, 0 for padding."""
        out = torch.zeros(len(self.cu_seqlens) - 1, dtype=torch.float64)
        for k, i in enumerate(self.samples):
            out[k] = values[i]
        return out


@dataclass(frozen=True)
class Coefficients:
    """Weights of the loss's further terms in one step; controllers move them."""

    kl: float = 0.0
    entropy: float = 0.0


ONLY_POLICY = Coefficients()


@dataclass
class TrainPlan:
    """What one data-parallel rank trains: ``steps[optimizer step][microbatch]``.

    Every rank has the same number of microbatches in each step, each of one length on all ranks; a
    rank without data gets empty rows. ``trained_tokens``: of all ranks, of every optimizer step.
    ``names``: of every sample, for errors. ``step``: the training step it is of."""

    steps: list[list[PackedBatch]]
    trained_tokens: list[int]
    names: list[str]
    coefficients: Coefficients = ONLY_POLICY
    step: int = 0


@dataclass(frozen=True)
class LossInputs:
    """The row as a loss sees it, local to its context-parallel rank (``T`` here is T / cp)."""

    logprobs: torch.Tensor  # f32 [T], with gradient
    entropy: torch.Tensor  # f32 [T], with gradient
    old_logprobs: torch.Tensor  # f32 [T]
    rollout_logprobs: torch.Tensor  # f32 [T]
    advantages: torch.Tensor  # f32 [T]
    weight: torch.Tensor  # f32 [T]
    mask: torch.Tensor  # bool [T]
    ref_logprobs: torch.Tensor | None = None  # f32 [T]
    correction: torch.Tensor | None = None  # f32 [T], constant weight of the policy term
    selected: torch.Tensor | None = None  # bool [T]


# ---- metrics: a value that knows how to reduce
# ------------------------------------------------------------------


@dataclass(frozen=True)
class Mean:
    """``total / count``, both summed over ranks and microbatches: never a mean of means."""

    total: float
    count: float


@dataclass(frozen=True)
class Sum:
    value: float


@dataclass(frozen=True)
class Max:
    value: float


@dataclass(frozen=True)
class Min:
    value: float


MetricValue = Mean | Sum | Max | Min


@dataclass(frozen=True)
class Metric:
    """A named value, e.g. ``Metric("policy/entropy", Mean(total=-713.2, count=1021))``."""

    name: str
    value: MetricValue


StepMetrics = list[Metric]


# ---- weights ----


@dataclass(frozen=True)
class TensorSpec:
    """A tensor under its Hugging Face name; ``dtype`` like ``"bfloat16"``."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class SyncReceipt:
    """Proof of one weight push: what the trainer sent and every server confirmed before it sampled
    again.
    """

    version: int
    tensors: int
    num_bytes: int
    seconds: float
    digest: str


@dataclass(frozen=True)
class Rollouts:
    """One round's samples of one collector, with what collecting them cost. ``reward_names``: of
    the components in ``Sample.rewards``; empty as long as no response has ended, so that none was
    scored.
    """

    samples: Sequence[Sample]
    metrics: StepMetrics = field(default_factory=list)
    reward_names: tuple[str, ...] = ()
    seconds: float = 0.0
