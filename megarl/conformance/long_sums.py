"""Kind long_accum: what a long sequence's ratio loses in the summation of its log-ratios."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

from megarl.algos.objective import Objective
from megarl.algos.ratio import clamped
from megarl.algos.segments import Segments
from megarl.config.policies import GspoPolicy
from megarl.conformance.cases import Given, Inputs, Unsupported
from megarl.conformance.rows import Sequences
from megarl.conformance.sections import check_keys
from megarl.types import ONLY_POLICY, LossInputs


def long_accum(given: Given, dtype: torch.dtype) -> Mapping[str, Any]:
    check_keys(given.config, ("n", "seed"))
    if missing := {"n", "seed"} - set(given.config):
        raise Unsupported(f"config.{sorted(missing)[0]} is missing")
    d = _log_ratios(given.config["n"], given.config["seed"])
    zeros = [0.0] * len(d)
    sequences = Sequences(Inputs({"mask": [[1] * len(d)]}), dtype)
    packed = sequences.whole()
    flat = packed.put([zeros], dtype)
    x = LossInputs(
        logprobs=packed.put([d.tolist()], dtype),
        entropy=flat,
        old_logprobs=flat,
        rollout_logprobs=flat,
        advantages=flat,
        weight=flat,
        mask=packed.row.mask,
    )
    # Any objective sums its log-ratios alike.
    sums = (
        Objective(GspoPolicy()).evaluate(x, Segments(packed.row.cu_seqlens), ONLY_POLICY).row.sums
    )
    total = float(sums.log_ratio[0])
    naive = float(np.cumsum(d.astype(np.float32), dtype=np.float32)[-1])
    return {
        "first_four_d": d[:4].tolist(),
        "sum_exact": total,
        "mean": float(sums.mean_log_ratio[0]),
        "s_ratio": float(clamped(sums.mean_log_ratio).exp()[0]),
        "info_naive_float32_sum": naive,
        "info_naive_float32_abs_error": abs(naive - total),
    }


def _log_ratios(n: int, seed: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """x <- (1664525 x + 1013904223) mod 2^32, k = x >> 12, d = (k / 2^20 - 1/2) / 64."""

    def numbers() -> Any:
        x = seed
        while True:
            x = (1664525 * x + 1013904223) % 2**32
            yield ((x >> 12) / 2**20 - 0.5) / 64

    return np.fromiter(islice(numbers(), n), np.float64, n)
