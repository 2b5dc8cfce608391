"""Aggregation weights: how token losses become one number, from counts of the whole optimizer step.

n_i trained tokens of sample i, N samples with n_i > 0::

    token_mean            w = 1 / sum_j n_j
    seq_mean_token_mean   w = 1 / (N n_i)
    seq_mean_token_sum    w = 1 / N

The counts are global (every rank, every microbatch) and known before any forward pass, so that a
loss is ``sum w l`` however the batch is split. Source: docs/objectives.md, "Aggregation weights".
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

AGGREGATIONS: dict[str, Callable[[Floats, float, float], Floats]] = {
    "token_mean": lambda n, sequences, tokens: np.full_like(n, 1 / tokens),
    "seq_mean_token_mean": lambda n, sequences, tokens: 1 / (sequences * np.maximum(n, 1)),
    "seq_mean_token_sum": lambda n, sequences, tokens: np.full_like(n, 1 / sequences),
}


def token_weights(aggregation: str, trained_tokens: Sequence[int]) -> Floats:
    """f64 [N]: the weight of each of sample i's trained tokens; finite also for a batch without
    any.
    """
    n = np.asarray(trained_tokens, np.float64)
    return AGGREGATIONS[aggregation](n, max(1.0, float((n > 0).sum())), max(1.0, float(n.sum())))
