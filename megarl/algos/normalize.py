"""Aggregation weights: how token losses become one number, from counts of the whole optimizer step.

n_i trained tokens of sample i, N samples counted, g(i) its prompt, P prompts with tokens, C a
constant::

    token_mean            w = 1 / sum_j n_j
    seq_mean_token_mean   w = 1 / (N n_i)
    seq_mean_token_sum    w = 1 / N
    constant              w = 1 / (N C), N all samples
    group_token_mean      w = 1 / (P sum_{j in g(i)} n_j)

The counts are global (every rank, every microbatch) and known before any forward pass, so that a
loss is ``sum w l`` however the batch is split. Denominators are at least 1: a batch without trained
tokens gives 0. Source: docs/objectives.md, "Aggregation weights".
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.config.algo import (
    Aggregation,
    ConstantDenominator,
    GroupTokenMean,
    SequenceMean,
    TokenMean,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def token_weights(
    aggregation: Aggregation, counted: Sequence[int], groups: Sequence[int]
) -> Floats:
    """f64 [N]: the weight of each of sample i's counted tokens, finite for any counts.

    ``aggregation``: a section of ``config/algo.py``; ``counted``: n_i; ``groups``: the prompt of
    sample i.
    """
    n = np.asarray(counted, np.float64)
    return AGGREGATIONS[aggregation.name](aggregation, n, np.asarray(groups, np.int64))


def _sequences(aggregation: SequenceMean, n: Floats) -> float:
    """N of the two sequence means."""
    all_of_them = aggregation.seq_denominator == "all"
    return max(1.0, float(len(n) if all_of_them else (n > 0).sum()))


def _token_mean(aggregation: TokenMean, n: Floats, groups: Ints) -> Floats:
    return np.full_like(n, 1 / max(1.0, float(n.sum())))


def _seq_mean_token_mean(aggregation: SequenceMean, n: Floats, groups: Ints) -> Floats:
    return 1 / (_sequences(aggregation, n) * np.maximum(n, 1))


def _seq_mean_token_sum(aggregation: SequenceMean, n: Floats, groups: Ints) -> Floats:
    return np.full_like(n, 1 / _sequences(aggregation, n))


def _constant(aggregation: ConstantDenominator, n: Floats, groups: Ints) -> Floats:
    return np.full_like(n, 1 / (max(1, len(n)) * aggregation.constant))


def _group_token_mean(aggregation: GroupTokenMean, n: Floats, groups: Ints) -> Floats:
    _, which = np.unique(groups, return_inverse=True)
    tokens = np.bincount(which, weights=n) if len(n) else np.zeros(0)
    prompts = max(1, int((tokens > 0).sum()))
    return 1 / (prompts * np.maximum(tokens, 1)[which])


AGGREGATIONS: dict[str, Callable[[Any, Floats, Ints], Floats]] = {
    "token_mean": _token_mean,
    "seq_mean_token_mean": _seq_mean_token_mean,
    "seq_mean_token_sum": _seq_mean_token_sum,
    "constant": _constant,
    "group_token_mean": _group_token_mean,
}
