"""Packed rows, and the plan they are trained by."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


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
