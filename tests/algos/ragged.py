"""Ragged lists of response tokens as a row of segments, through an objective, and back to lists."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import TypeAdapter

from megarl.algos.objective import Objective
from megarl.algos.segments import Segments
from megarl.config.schema import Policy
from megarl.monitor.metrics import merge_metrics, scalar
from megarl.types import LossInputs, StepMetrics

Ragged = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Evaluated:
    """``grad[i][t]`` is d loss / d logp of token t of sequence i."""

    loss: torch.Tensor
    grad: list[list[float]]
    metrics: StepMetrics

    def value(self, name: str) -> float | None:
        return scalar({m.name: m.value for m in merge_metrics([self.metrics])}[name])


def policy(**settings: Any) -> Any:
    """One of the policy sections of the configuration."""
    return TypeAdapter(Policy).validate_python(settings)


def row(
    *,
    logp: Ragged,
    old: Ragged,
    advantages: Ragged,
    weight: Ragged,
    mask: Ragged | None = None,
    rollout: Ragged | None = None,
    entropy: Ragged | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[LossInputs, Segments]:
    """Sequences end to end, without padding. ``mask`` None: every token is trained."""
    ones = [[1.0] * len(part) for part in logp]

    def flat(parts: Ragged | None, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.tensor([x for part in (parts or ones) for x in part], dtype=kind)

    inputs = LossInputs(
        logprobs=flat(logp).requires_grad_(),
        entropy=flat(entropy).requires_grad_(),
        old_logprobs=flat(old),
        rollout_logprobs=flat(rollout),
        advantages=flat(advantages),
        weight=flat(weight),
        mask=flat(mask, torch.bool),
    )
    bounds = torch.tensor([0] + [len(part) for part in logp]).cumsum(0).int()
    return inputs, Segments(bounds)


def evaluate(settings: Mapping[str, Any], inputs: LossInputs, segments: Segments) -> Evaluated:
    """Loss, gradient in the log-probs, and metrics of one row."""
    loss, metrics = Objective(policy(**settings))(inputs, segments)
    loss.backward()
    assert inputs.logprobs.grad is not None
    lengths = (segments.cu_seqlens[1:] - segments.cu_seqlens[:-1]).tolist()
    grad = [part.tolist() for part in inputs.logprobs.grad.split(lengths)]
    return Evaluated(loss.detach(), grad, metrics)


def spread(values: Sequence[float], like: Ragged) -> list[list[float]]:
    """One value a sequence -> one a token."""
    return [[v] * len(part) for v, part in zip(values, like, strict=True)]
