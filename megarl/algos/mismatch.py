"""How far the trainer's log-probs are from the rollout server's, on the same tokens.

g = lo - lr, rho = e^g (g clamped at +-20), means over trained tokens, sequence means over sequences
that have any. Names, thresholds and sources: docs/objectives.md, "Mismatch". ``mismatch_sums`` adds
up over rows and ranks, ``mismatch_metrics`` makes the numbers.
"""

import math
from collections.abc import Iterable, Mapping

import torch

from megarl.algos.ratio import clamped
from megarl.algos.segments import Segments

EXTREME = math.log(2.0)
Sums = dict[str, float]


def mismatch_sums(
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    segments: Segments,
) -> Sums:
    """Sums (and one maximum) of a row of whole sequences, over its trained, finite tokens."""
    mask = mask & torch.isfinite(old_logprobs) & torch.isfinite(rollout_logprobs)
    lo = torch.where(mask, old_logprobs.double(), 0.0)
    lr = torch.where(mask, rollout_logprobs.double(), 0.0)
    raw = lo - lr
    g = clamped(raw)
    rho = g.exp()
    token = {
        "k1": -raw,
        "k3": torch.expm1(g) - g,
        "abs": raw.abs(),
        "mult": clamped(raw.abs()).exp(),
        "rho": rho,
        "rho_sq": rho * rho,
        "extreme": (raw.abs() > EXTREME).double(),
    }
    sums = {name: float(values[mask].sum()) for name, values in token.items()}
    n, lo_sum, lr_sum, g_sum = segments.sums(mask, lo, lr, raw)
    there = n > 0
    n = n[there]
    log_train, log_rollout = -lo_sum[there] / n, -lr_sum[there] / n
    sequence = {
        "chi2_seq": (2 * clamped(g_sum[there])).exp(),
        "train_ppl": log_train.exp(),
        "rollout_ppl": log_rollout.exp(),
        "log_ppl_diff": log_train - log_rollout,
        "log_ppl_abs_diff": (log_train - log_rollout).abs(),
        "ppl_ratio": (log_train - log_rollout).exp(),
    }
    sums |= {name: float(values.sum()) for name, values in sequence.items()}
    sums |= {"tokens": float(mask.sum()), "sequences": float(len(n))}
    return sums | {"max": float(raw.abs().max()) if len(raw) else 0.0}


def mismatch_metrics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Name -> number, from the sums of all rows and ranks; empty without trained tokens."""
    parts = list(parts)
    total = {k: math.fsum(p[k] for p in parts) for k in (parts[0] if parts else {})}
    tokens, sequences = total.get("tokens", 0.0), total.get("sequences", 0.0)
    if not tokens:
        return {}
    mean = {k: v / tokens for k, v in total.items()}
    of_sequences = {k: v / sequences for k, v in total.items()}
    return {
        "kl_rollout_train_k1": mean["k1"],
        "kl_rollout_train_k3": mean["k3"],
        "abs_logprob_diff": mean["abs"],
        "max_abs_logprob_diff": max(p["max"] for p in parts),
        "mult_prob_error": mean["mult"],
        "rho_mean": mean["rho"],
        "ess": mean["rho"] ** 2 / mean["rho_sq"],
        "chi2_token": mean["rho_sq"] - 1,
        "chi2_seq": of_sequences["chi2_seq"] - 1,
        "train_ppl": of_sequences["train_ppl"],
        "rollout_ppl": of_sequences["rollout_ppl"],
        "log_ppl_diff": of_sequences["log_ppl_diff"],
        "log_ppl_abs_diff": of_sequences["log_ppl_abs_diff"],
        "ppl_ratio": of_sequences["ppl_ratio"],
        "extreme_frac_gt2": mean["extreme"],
    }
