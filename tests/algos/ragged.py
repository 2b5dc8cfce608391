"""Ragged lists of response tokens as a row of segments, through an objective, and back to lists."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import TypeAdapter

from megarl.algos.objective import Objective
from megarl.algos.segments import Segments
from megarl.config.algo import KlSection, OpsmSection
from megarl.config.policies import Policy
from megarl.monitor.metrics import reduce_metrics
from megarl.types import ONLY_POLICY, Coefficients, LossInputs, StepMetrics

Ragged = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Evaluated:
    """``grad[i][t]`` is d loss / d logp of token t of sequence i, ``grad_entropy`` likewise;
    ``dropped[i][t]``: trained, but not finite.
    """

    loss: torch.Tensor
    grad: list[list[float]]
    grad_entropy: list[list[float]]
    dropped: list[list[bool]]
    metrics: StepMetrics

    def value(self, name: str) -> float | None:
        return reduce_metrics([self.metrics]).get(name)

    @property
    def flat_grad(self) -> torch.Tensor:
        return torch.tensor([g for part in self.grad for g in part], dtype=torch.float64)


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
    ref: Ragged | None = None,
    correction: Ragged | None = None,
    selected: Ragged | None = None,
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
        ref_logprobs=None if ref is None else flat(ref),
        correction=None if correction is None else flat(correction),
        selected=None if selected is None else flat(selected, torch.bool),
    )
    bounds = torch.tensor([0] + [len(part) for part in logp]).cumsum(0).int()
    return inputs, Segments(bounds)


def evaluate(
    settings: Mapping[str, Any],
    inputs: LossInputs,
    segments: Segments,
    *,
    kl: Mapping[str, Any] | None = None,
    opsm: Mapping[str, Any] | None = None,
    coefficients: Coefficients = ONLY_POLICY,
) -> Evaluated:
    """Loss, gradients in log-probs and entropies, and metrics of one row."""
    objective = Objective(
        policy(**settings),
        None if kl is None else KlSection(coef=coefficients.kl, **kl),
        None if opsm is None else OpsmSection(**opsm),
    )
    loss, metrics, dropped = objective(inputs, segments, coefficients)
    loss.backward()
    lengths = (segments.cu_seqlens[1:] - segments.cu_seqlens[:-1]).tolist()

    def parts(values: torch.Tensor | None) -> list[list[Any]]:
        return [] if values is None else [part.tolist() for part in values.split(lengths)]

    return Evaluated(
        loss.detach(),
        parts(inputs.logprobs.grad),
        parts(inputs.entropy.grad),
        parts(dropped),
        metrics,
    )


def spread(values: Sequence[float], like: Ragged) -> list[list[float]]:
    """One value a sequence -> one a token."""
    return [[v] * len(part) for v, part in zip(values, like, strict=True)]
