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

from megarl.algos.diagnostics import RowSums, loss_metrics
from megarl.algos.evaluation import Evaluation
from megarl.algos.fused import OP, fused, ratio_sums, terms_of, tokens_reported
from megarl.algos.kl import kl_term
from megarl.algos.presets import SURROGATES
from megarl.algos.ratio import Row, SequenceSums, clamped, log_ratio
from megarl.algos.segments import Segments
from megarl.config.algo import AlgoSection, KlSection, OpsmSection
from megarl.ops import runs_native
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
    term of the loss, if any. ``all_metrics``: off, only losses, clip fractions and the mean
    log-ratio are reported.
    """

    policy: Any
    kl: KlSection | None = None
    opsm: OpsmSection | None = None
    all_metrics: bool = True

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
        """By the compiled op where there is one, else by ``evaluate``: the same to rounding.
        Collective over the row's context-parallel ranks.
        """
        compute = self._fused if runs_native(OP, inputs.logprobs.device) else self._evaluated
        with torch.no_grad():
            found = compute(inputs, segments, coefficients)
            uses_ratio = SURROGATES[self.policy.name].uses_ratio
            metrics = loss_metrics(
                found.sums, uses_ratio, segments.owns_sequences, self.all_metrics
            )
        loss: torch.Tensor = _ClosedForm.apply(  # type: ignore[no-untyped-call]
            inputs.logprobs, inputs.entropy, found.loss, found.grad_logprobs, found.grad_entropy
        )
        return RowLoss(loss, metrics, found.dropped)

    def _fused(
        self, inputs: LossInputs, segments: Segments, coefficients: Coefficients
    ) -> "_Computed":
        surrogate = SURROGATES[self.policy.name]
        terms = terms_of(self.policy, self.kl, self.opsm, coefficients, self.all_metrics)
        reads = self.reads_rollout or inputs.correction is not None
        found = fused(inputs, segments, terms, reads)
        kept = found.sequences.kept(self.opsm)
        sequences = found.sequences.counted(found.sequences.alive(surrogate.whole_sequences), kept)
        totals = found.totals
        sums = RowSums(
            tokens=totals["tokens"],
            dropped=totals["dropped"],
            pg_loss=totals["pg_loss"],
            kl_loss=coefficients.kl * totals["kl_loss"],
            # without a coefficient nobody has looked whether it is finite
            entropy_loss=-coefficients.entropy * totals["entropy_loss"]
            if coefficients.entropy
            else 0.0,
            entropy=totals["entropy"],
            kl=None if self.kl is None else totals["kl"],
            of_tokens=tokens_reported(self.policy, totals, self.all_metrics),
            ratios=ratio_sums(totals),
            sequences=sequences,
            kept=kept,
            seq_flags=surrogate.seq_flags(sequences, self.policy),
        )
        loss = found.grad_logprobs.new_tensor(
            sums.pg_loss + sums.kl_loss + sums.entropy_loss, dtype=torch.float64
        )
        dropped = torch.zeros_like(inputs.mask)
        if totals["dropped"]:
            _, dropped = self._used(inputs, coefficients)
        return _Computed(loss, found.grad_logprobs, found.grad_entropy, sums, dropped)

    def _evaluated(
        self, inputs: LossInputs, segments: Segments, coefficients: Coefficients
    ) -> "_Computed":
        found = self.evaluate(inputs, segments, coefficients)
        return _Computed(
            found.loss,
            found.grad_logprobs.to(inputs.logprobs.dtype),
            found.grad_entropy.to(inputs.entropy.dtype) if coefficients.entropy else None,
            found.sums(self.all_metrics),
            found.dropped,
        )

    def evaluate(
        self, inputs: LossInputs, segments: Segments, coefficients: Coefficients
    ) -> Evaluation:
        """Every part of the loss and its gradient, in torch: the specification of the compiled op
        (``ops/policy_loss.py``). Collective as above.
        """
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
            seq_flags=surrogate.seq_flags(row.sums, self.policy),
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
        near = clamped(d).double()
        sums = SequenceSums(
            *segments.sums(
                *(used, d, coef * a.clamp(min=0), coef * a.clamp(max=0), dropped, gap, a),
                *(near * near, torch.expm1(near).abs()),
            )
        )
        keep, alive = sums.kept(self.opsm), sums.alive(whole_sequences)
        if whole_sequences:
            x = _select(x, used & segments.expand(alive))
        row = Row(
            logprobs=x.logprobs.detach(),
            old_logprobs=x.old_logprobs,
            rollout_logprobs=x.rollout_logprobs,
            advantages=x.advantages,
            selected=x.selected,
            coef=torch.where(segments.expand(keep & alive), coef, 0.0),
            log_ratio=torch.where(segments.expand(alive), d, 0.0),
            sums=sums.counted(alive, keep),
            mask=used & segments.expand(alive),
            segments=segments,
        )
        return row, keep


class _Computed(NamedTuple):
    """A row's loss, with gradients in the types of what they are of; None: zero everywhere."""

    loss: torch.Tensor
    grad_logprobs: torch.Tensor
    grad_entropy: torch.Tensor | None
    sums: RowSums
    dropped: torch.Tensor


class _ClosedForm(torch.autograd.Function):
    """``loss`` with the gradients that are known already."""

    @staticmethod
    def forward(
        ctx: Any,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        loss: torch.Tensor,
        grad_logprobs: torch.Tensor,
        grad_entropy: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(grad_logprobs, grad_entropy)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = grads
        unscaled = scale.device.type == "cpu" and scale == 1  # to look would stall an accelerator
        scaled = [
            g if g is None or unscaled else (g * scale).to(g.dtype) for g in ctx.saved_tensors
        ]
        return *scaled, None, None, None


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
