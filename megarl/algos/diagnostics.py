"""Metrics of the loss pass: sums and counts of used tokens and sequences, never averages.

Names and definitions: docs/objectives.md, "Metrics". A row split over context-parallel ranks counts
its tokens where they are and its sequences on one rank.
"""

from dataclasses import dataclass

import torch

from megarl.algos.ratio import LOG_RATIO_LIMIT, SequenceSums, clamped
from megarl.types import Max, Mean, Metric, Min, StepMetrics, Sum

# SAPO's token gates act like one gate a sequence where the sequence's ratios are close to 1 and to
# one another; beyond either of these a sequence is counted as one where they do not.
NEAR_ONE = 0.1  # mean |r - 1|
NARROW = 0.02  # variance of the log-ratio


@dataclass(frozen=True)
class RatioSums:
    """Over used tokens: of -d, k3(d), r and r^2, d clamped; how many were; extremes of r."""

    approx_kl_k1: float
    approx_kl_k3: float
    ratio: float
    ratio_sq: float
    clamped: float
    smallest: float
    largest: float


@dataclass(frozen=True)
class RowSums:
    """What a row's metrics are made of. ``tokens``: used ones on this rank; ``dropped``: those that
    were not finite; losses with their coefficients; ``entropy``, ``kl`` (None: no such term), and
    ``of_tokens`` (name -> total): sums over used tokens. ``sequences``: as the objective used
    them; ``kept`` and ``seq_flags``: bool [S].
    """

    tokens: float
    dropped: float
    pg_loss: float
    kl_loss: float
    entropy_loss: float
    entropy: float
    kl: float | None
    of_tokens: dict[str, float]
    ratios: RatioSums
    sequences: SequenceSums
    kept: torch.Tensor
    seq_flags: dict[str, torch.Tensor]


def loss_metrics(
    row: RowSums, uses_ratio: bool, counts_sequences: bool, all_metrics: bool = True
) -> StepMetrics:
    """``counts_sequences``: on one of the ranks that share the row. Without ``all_metrics``:
    losses, token flags and the mean log-ratio.
    """

    def mean(name: str, total: float) -> Metric:
        return Metric(f"policy/{name}", Mean(total, row.tokens))

    metrics = [
        Metric("policy/loss", Sum(row.pg_loss + row.kl_loss + row.entropy_loss)),
        Metric("policy/pg_loss", Sum(row.pg_loss)),
        Metric("policy/entropy_loss", Sum(row.entropy_loss)),
        Metric("policy/nonfinite_tokens", Sum(row.dropped)),
        *([mean("entropy", row.entropy)] if all_metrics else []),
        *(mean(name, total) for name, total in row.of_tokens.items()),
    ]
    if row.kl is not None:
        metrics += [Metric("policy/kl_loss", Sum(row.kl_loss)), mean("kl", row.kl)]
    if not uses_ratio:
        return metrics
    metrics.append(mean("approx_kl_k1", row.ratios.approx_kl_k1))
    if not all_metrics:
        return metrics
    metrics += [
        mean("approx_kl_k3", row.ratios.approx_kl_k3),
        mean("ratio_mean", row.ratios.ratio),
        mean("ratio_sq_mean", row.ratios.ratio_sq),
        mean("ratio_clamped", row.ratios.clamped),
    ]
    if row.tokens:
        metrics += [
            Metric("policy/ratio_min", Min(row.ratios.smallest)),
            Metric("policy/ratio_max", Max(row.ratios.largest)),
        ]
    return metrics + (_sequence_metrics(row) if counts_sequences else [])


def _sequence_metrics(row: RowSums) -> StepMetrics:
    """Of sequences with a used token; SAPO's two assumptions among them."""
    sums = row.sequences
    there = sums.count > 0
    if not bool(there.any()):
        return []
    n = sums.count[there]
    z = sums.mean_log_ratio[there]
    variance = (sums.square[there] / n - z * z).clamp(min=0)
    distance = sums.distance[there] / n
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
        mean("opsm_dropped", ~row.kept[there]),
        *(mean(name, flag[there]) for name, flag in row.seq_flags.items()),
    ]
