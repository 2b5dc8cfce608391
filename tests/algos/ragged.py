"""Ragged lists of response tokens as a row of segments, through an objective, and back to lists."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pydantic import TypeAdapter

from megarl.algos.diagnostics import loss_metrics
from megarl.algos.objective import Objective
from megarl.algos.presets import SURROGATES
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
    _same_as_specified(objective, inputs, segments, coefficients, loss.detach(), metrics)
    zeros = torch.zeros_like(inputs.entropy)  # no gradient is one of zeros
    lengths = (segments.cu_seqlens[1:] - segments.cu_seqlens[:-1]).tolist()

    def parts(values: torch.Tensor | None) -> list[list[Any]]:
        return [] if values is None else [part.tolist() for part in values.split(lengths)]

    return Evaluated(
        loss.detach(),
        parts(inputs.logprobs.grad),
        parts(zeros if inputs.entropy.grad is None else inputs.entropy.grad),
        parts(dropped),
        metrics,
    )


def _same_as_specified(
    objective: Objective,
    inputs: LossInputs,
    segments: Segments,
    coefficients: Coefficients,
    loss: torch.Tensor,
    metrics: StepMetrics,
) -> None:
    """Every row that a test evaluates compares the compiled op with its reference."""
    with torch.no_grad():
        expected = objective.evaluate(inputs, segments, coefficients)
    surrogate = SURROGATES[objective.policy.name]
    tolerance = 2e-6 if inputs.logprobs.dtype == torch.float32 else 1e-12
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance, equal_nan=True)
    # a loss is a sum of terms that may cancel, each rounded in its own type
    terms = (expected.row.coef * expected.token.loss).abs().sum()
    assert loss.isnan() or abs(loss - expected.loss) <= tolerance * (abs(terms) + abs(loss) + 1)
    close(inputs.logprobs.grad, expected.grad_logprobs.to(inputs.logprobs.dtype))
    if inputs.entropy.grad is not None:
        close(inputs.entropy.grad, expected.grad_entropy.to(inputs.entropy.dtype))
    stated = loss_metrics(expected.sums(), surrogate.uses_ratio, segments.owns_sequences)
    assert [m.name for m in metrics] == [m.name for m in stated]
    found, specified = reduce_metrics([metrics]), reduce_metrics([stated])
    for name, value in specified.items():
        if not name.endswith("loss"):
            close(torch.tensor(found[name]), torch.tensor(value), msg=lambda m, n=name: f"{n}: {m}")


def spread(values: Sequence[float], like: Ragged) -> list[list[float]]:
    """One value a sequence -> one a token."""
    return [[v] * len(part) for v, part in zip(values, like, strict=True)]
