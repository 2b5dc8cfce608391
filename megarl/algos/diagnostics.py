"""Metrics of the loss pass: sums and counts of used tokens and sequences, never averages.

Names and definitions: docs/objectives.md, "Metrics". A row split over context-parallel ranks counts
its tokens where they are and its sequences on one rank.
"""

import torch

from megarl.algos.evaluation import Evaluation
from megarl.algos.kl import k3
from megarl.algos.ratio import LOG_RATIO_LIMIT, Row, clamped
from megarl.types import Max, Mean, Metric, Min, StepMetrics, Sum

# SAPO's token gates act like one gate a sequence where the sequence's ratios are close to 1 and to
# one another; beyond either of these a sequence is counted as one where they do not.
NEAR_ONE = 0.1  # mean |r - 1|
NARROW = 0.02  # variance of the log-ratio


def loss_metrics(found: Evaluation, uses_ratio: bool) -> StepMetrics:
    row = found.row
    metrics = [
        Metric("policy/loss", Sum(float(found.loss))),
        Metric("policy/pg_loss", Sum(float(found.pg_loss))),
        Metric("policy/entropy_loss", Sum(float(found.entropy_loss))),
        Metric("policy/nonfinite_tokens", Sum(float(found.dropped.sum()))),
        _mean("policy/entropy", found.entropy, row.mask),
        *(_mean(f"policy/{n}", flag, row.mask) for n, flag in found.token.flags.items()),
        *(_mean(f"policy/{n}", value, row.mask) for n, value in found.token.means.items()),
    ]
    if found.kl is not None:
        metrics += [
            Metric("policy/kl_loss", Sum(float(found.kl_loss))),
            _mean("policy/kl", found.kl, row.mask),
        ]
    if uses_ratio:
        metrics += _ratio_metrics(row) + _sequence_metrics(found)
    return metrics


def _ratio_metrics(row: Row) -> StepMetrics:
    d = clamped(row.log_ratio)
    ratio = d.exp().double()
    metrics = [
        _mean("policy/approx_kl_k1", -d, row.mask),
        _mean("policy/approx_kl_k3", k3(d.double()), row.mask),
        _mean("policy/ratio_mean", ratio, row.mask),
        _mean("policy/ratio_sq_mean", ratio * ratio, row.mask),
        _mean("policy/ratio_clamped", row.log_ratio.abs() > LOG_RATIO_LIMIT, row.mask),
    ]
    used = ratio[row.mask]
    if len(used):
        metrics += [
            Metric("policy/ratio_min", Min(float(used.min()))),
            Metric("policy/ratio_max", Max(float(used.max()))),
        ]
    return metrics


def _sequence_metrics(found: Evaluation) -> StepMetrics:
    """Of sequences with a used token; SAPO's two assumptions among them."""
    row = found.row
    there = row.count > 0
    if not row.segments.owns_sequences or not bool(there.any()):
        return []
    n = row.count[there]
    z = row.mean_log_ratio[there]
    variance = (row.square_sum[there] / n - z * z).clamp(min=0)
    distance = row.distance_sum[there] / n
    wide = (variance > NARROW) | (distance > NEAR_ONE)
    ratio = clamped(z).exp()

    def mean(name: str, values: torch.Tensor) -> Metric:
        return Metric(f"policy/{name}", Mean(float(values.double().sum()), len(n)))

    return [
        mean("seq_ratio_mean", ratio),
        Metric("policy/seq_ratio_min", Min(float(ratio.min()))),
        Metric("policy/seq_ratio_max", Max(float(ratio.max()))),
        mean("seq_ratio_clamped", z.abs() > LOG_RATIO_LIMIT),
        mean("seq_log_ratio_var", variance),
        mean("seq_ratio_distance", distance),
        mean("seq_gates_differ", wide),
        mean("opsm_dropped", ~found.keep_sequence[there]),
        *(mean(name, flag[there]) for name, flag in found.token.seq_flags.items()),
    ]


def _mean(name: str, values: torch.Tensor, mask: torch.Tensor) -> Metric:
    return Metric(name, Mean(float(values[mask].double().sum()), float(mask.sum())))
