"""A policy objective over one packed row: a plain weighted sum, and the metrics of the same pass.

``loss = sum_t weight_t l_t`` over trained tokens; ``weight`` carries the whole normalisation
(global counts), so microbatches, data-parallel and context-parallel ranks simply add. An empty row
gives an exact zero that still runs backward through the model.

Masked positions may hold anything, NaN included, in every field: they are selected away before
anything is computed. Zeroing their losses would not do, because 0 * NaN in the backward pass of a
sequence ratio reaches every token of the sequence.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch

from megarl.algos.presets import SURROGATES
from megarl.algos.ratio import sequence_log_ratio
from megarl.algos.segments import Segments
from megarl.algos.surrogates import TokenLoss, log_ratio_for_metrics
from megarl.types import LossInputs, Max, Mean, Metric, Min, StepMetrics, Sum


@dataclass(frozen=True)
class Objective:
    """``policy``: one of the policy sections of ``config/schema.py``; its ``name`` selects the
    function.
    """

    policy: Any

    def __call__(self, inputs: LossInputs, segments: Segments) -> tuple[torch.Tensor, StepMetrics]:
        """(scalar loss f64 with gradient, metrics). Collective over the row's context-parallel
        ranks.
        """
        inputs = _trained_only(inputs)
        token = SURROGATES[self.policy.name](inputs, segments, self.policy)
        loss = (token.loss.double() * inputs.weight.double()).sum()
        with torch.no_grad():
            return loss, self._metrics(loss, token, inputs, segments)

    def _metrics(
        self, loss: torch.Tensor, token: TokenLoss, inputs: LossInputs, segments: Segments
    ) -> StepMetrics:
        mask = inputs.mask
        count = float(mask.sum())

        def mean(name: str, values: torch.Tensor) -> Metric:
            return Metric(name, Mean(float(values[mask].double().sum()), count))

        metrics = [
            Metric("policy/loss", Sum(float(loss))),
            mean("policy/entropy", inputs.entropy),
            *(mean(f"policy/{name}", flag) for name, flag in token.flags.items()),
        ]
        if not token.uses_ratio:
            return metrics
        d = log_ratio_for_metrics(inputs)
        metrics += [mean("policy/approx_kl", -d), mean("policy/ratio_mean", d.exp())]
        if count:
            ratio = d[mask].exp()
            metrics += [
                Metric("policy/ratio_min", Min(float(ratio.min()))),
                Metric("policy/ratio_max", Max(float(ratio.max()))),
            ]
        return metrics + self._sequence_metrics(token, inputs, segments)

    def _sequence_metrics(
        self, token: TokenLoss, inputs: LossInputs, segments: Segments
    ) -> StepMetrics:
        trained = segments.sum(inputs.mask.float()) > 0
        ratio = sequence_log_ratio(inputs, segments)[trained].exp()
        if not segments.owns_sequences or not len(ratio):
            return []
        return [
            Metric("policy/seq_ratio_mean", Mean(float(ratio.sum()), len(ratio))),
            Metric("policy/seq_ratio_min", Min(float(ratio.min()))),
            Metric("policy/seq_ratio_max", Max(float(ratio.max()))),
            *(
                Metric(f"policy/{name}", Mean(float(flag[trained].sum()), len(ratio)))
                for name, flag in token.seq_flags.items()
            ),
        ]


def _trained_only(inputs: LossInputs) -> LossInputs:
    """Every field 0 where the mask is False."""
    mask = inputs.mask
    names = [field.name for field in fields(inputs) if field.name != "mask"]
    return LossInputs(**{n: torch.where(mask, getattr(inputs, n), 0.0) for n in names}, mask=mask)
