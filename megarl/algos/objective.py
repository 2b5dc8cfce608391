"""The loss of a packed row: a plain weighted sum with its gradient in closed form, and its metrics.

::

    loss = sum_t w_t [ omega_t o_i l_t + kl_coef k_t - entropy_coef H_t ]

over trained tokens. w carries the whole normalisation (global counts, ``normalize.py``), so
microbatches, data-parallel and context-parallel ranks simply add; omega is the correction weight
(``correction.py``), o_i switches off-policy sequences off (``_opsm``), l the policy objective
(``presets.py``), k the divergence (``kl.py``), H the entropy.

1. Masked positions may hold anything, NaN included: they are selected away, never multiplied by 0.
2. A trained token with a number that is not finite is left out (for sequence objectives its
   sequence is), counted, and the denominators stay; what follows is ``train.on_nonfinite``.
3. One all-reduce over the context-parallel ranks, in the forward pass (gmpo: two).
4. An empty row gives an exact zero that still runs backward through the model.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from megarl.algos.diagnostics import loss_metrics
from megarl.algos.evaluation import Evaluation
from megarl.algos.kl import kl_term
from megarl.algos.presets import SURROGATES
from megarl.algos.ratio import Row, clamped, log_ratio
from megarl.algos.segments import Segments
from megarl.config.algo import AlgoSection, KlSection, OpsmSection
from megarl.types import ONLY_POLICY, Coefficients, LossInputs, StepMetrics


class RowLoss(NamedTuple):
    """``loss``: f64 scalar with gradient. ``dropped``: bool [T], trained tokens that were not
    finite.
    """

    loss: torch.Tensor
    metrics: StepMetrics
    dropped: torch.Tensor


@dataclass(frozen=True)
class Objective:
    """``policy``: a section of ``config/policies.py``; its ``name`` selects the function. ``kl``: a
    term of the loss, if any.
    """

    policy: Any
    kl: KlSection | None = None
    opsm: OpsmSection | None = None

    @classmethod
    def of(cls, algo: AlgoSection) -> "Objective":
        in_loss = algo.kl is not None and algo.kl.place == "loss"
        return cls(algo.policy, algo.kl if in_loss else None, algo.opsm)

    @property
    def reads_rollout(self) -> bool:
        """Whether the rollout server's log-probs enter the loss, besides a correction's weights."""
        against = self.opsm is not None and self.opsm.against == "rollout"
        return against or SURROGATES[self.policy.name].reads_rollout

    def __call__(
        self, inputs: LossInputs, segments: Segments, coefficients: Coefficients = ONLY_POLICY
    ) -> RowLoss:
        """Collective over the row's context-parallel ranks."""
        with torch.no_grad():
            found = self.evaluate(inputs, segments, coefficients)
            metrics = loss_metrics(found, SURROGATES[self.policy.name].uses_ratio)
        loss: torch.Tensor = _ClosedForm.apply(  # type: ignore[no-untyped-call]
            inputs.logprobs,
            inputs.entropy,
            found.loss,
            found.grad_logprobs.to(inputs.logprobs.dtype),
            found.grad_entropy.to(inputs.entropy.dtype),
        )
        return RowLoss(loss, metrics, found.dropped)

    def evaluate(
        self, inputs: LossInputs, segments: Segments, coefficients: Coefficients
    ) -> Evaluation:
        """Every part of the loss and its gradient. Collective as above."""
        surrogate = SURROGATES[self.policy.name]
        used, dropped = self._used(inputs, coefficients)
        x = _select(inputs, used)
        row, keep = self._row(x, used, dropped, segments, surrogate.whole_sequences)
        if surrogate.whole_sequences:
            x = _select(x, row.mask)
        token = surrogate.compute(row, self.policy)
        weight = x.weight.double()
        pg_loss = _total(row.coef * token.loss)
        grad = token.grad
        kl, kl_loss, entropy_loss = None, torch.zeros_like(pg_loss), torch.zeros_like(pg_loss)
        if self.kl is not None:
            assert x.ref_logprobs is not None, "of a reference pass, or recorded"
            kl, kl_grad = kl_term(x.logprobs, x.ref_logprobs, x.old_logprobs, self.kl)
            kl_loss = coefficients.kl * _total(weight * kl)
            grad = grad + coefficients.kl * weight * kl_grad
        if coefficients.entropy:  # else nobody has looked whether it is finite
            entropy_loss = -coefficients.entropy * _total(weight * x.entropy)
        return Evaluation(
            loss=pg_loss + kl_loss + entropy_loss,
            pg_loss=pg_loss,
            kl_loss=kl_loss,
            entropy_loss=entropy_loss,
            grad_logprobs=grad,
            grad_entropy=-coefficients.entropy * weight,
            token=token,
            row=row,
            kl=kl,
            entropy=x.entropy,
            keep_sequence=keep,
            dropped=dropped,
        )

    def _used(
        self, inputs: LossInputs, coefficients: Coefficients
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens that are trained and finite, trained ones that are not) in what is read."""
        read = [inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.weight]
        if self.kl is not None and inputs.ref_logprobs is not None:
            read.append(inputs.ref_logprobs)
        if self.reads_rollout or inputs.correction is not None:
            read.append(inputs.rollout_logprobs)
        if inputs.correction is not None:
            read.append(inputs.correction)
        if coefficients.entropy:
            read.append(inputs.entropy)
        finite = torch.stack([torch.isfinite(values.detach()) for values in read]).all(0)
        return inputs.mask & finite, inputs.mask & ~finite

    def _row(
        self,
        x: LossInputs,
        used: torch.Tensor,
        dropped: torch.Tensor,
        segments: Segments,
        whole_sequences: bool,
    ) -> tuple[Row, torch.Tensor]:
        """The row with its sequence sums, and which sequences are kept as on-policy: one
        all-reduce.
        """
        d, a = log_ratio(x), x.advantages
        coef = x.weight.double() * (1.0 if x.correction is None else x.correction.double())
        gap = (
            d
            if self.opsm is None or self.opsm.against == "old"
            else (x.logprobs.detach() - x.rollout_logprobs)
        )
        weighted = coef * a
        near = clamped(d).double()
        count, d_sum, positive, negative, bad, gap_sum, a_sum, squares, far = segments.sums(
            *(used, d, weighted.clamp(min=0), weighted.clamp(max=0), dropped, gap, a),
            *(near * near, torch.expm1(near).abs()),
        )
        keep = torch.ones_like(count, dtype=torch.bool)
        if self.opsm is not None:
            lost = -gap_sum / count.clamp(min=1)
            keep = ~((a_sum < 0) & (lost > self.opsm.delta))
        alive = bad == 0 if whole_sequences else torch.ones_like(keep)
        if whole_sequences:
            x = _select(x, used & segments.expand(alive))
        counted = keep & alive
        row = Row(
            logprobs=x.logprobs.detach(),
            old_logprobs=x.old_logprobs,
            rollout_logprobs=x.rollout_logprobs,
            advantages=x.advantages,
            selected=x.selected,
            coef=torch.where(segments.expand(counted), coef, 0.0),
            log_ratio=torch.where(segments.expand(alive), d, 0.0),
            count=torch.where(alive, count, 0.0),
            log_ratio_sum=torch.where(alive, d_sum, 0.0),
            positive=torch.where(counted, positive, 0.0),
            negative=torch.where(counted, negative, 0.0),
            square_sum=squares,
            distance_sum=far,
            mask=used & segments.expand(alive),
            segments=segments,
        )
        return row, keep


class _ClosedForm(torch.autograd.Function):
    """``loss`` with the gradients that are known already."""

    @staticmethod
    def forward(
        ctx: Any,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        loss: torch.Tensor,
        grad_logprobs: torch.Tensor,
        grad_entropy: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(grad_logprobs, grad_entropy)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_logprobs, grad_entropy = ctx.saved_tensors
        scale = grads[0]
        return (
            (grad_logprobs * scale).to(grad_logprobs.dtype),
            (grad_entropy * scale).to(grad_entropy.dtype),
            None,
            None,
            None,
        )


def _total(values: torch.Tensor) -> torch.Tensor:
    return values.double().sum()


def _select(inputs: LossInputs, mask: torch.Tensor) -> LossInputs:
    """Every field 0 where ``mask`` is False."""
    values = {f.name: getattr(inputs, f.name) for f in fields(inputs) if f.name != "mask"}
    selected: dict[str, Any] = {
        name: None if v is None else torch.where(mask, v, torch.zeros((), dtype=v.dtype))
        for name, v in values.items()
    }
    return LossInputs(**selected, mask=mask)
