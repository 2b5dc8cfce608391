"""Mismatch diagnostics against loops, whatever the split into rows and ranks."""

import math
from collections.abc import Sequence

import pytest
import torch

from megarl.algos.mismatch import mismatch_metrics, mismatch_sums
from megarl.algos.segments import Segments

LO = [[-1.0, -0.5, -3.0], [-2.0], [-0.25, -4.0, -0.125, -1.0], [-9.0], [-30.0, -1.0]]
LR = [[-1.25, -0.5, -2.0], [-2.5], [-0.5, -4.0, -1.0, -0.75], [-1.0], [-0.5, -1.5]]
MASK = [[1, 1, 1], [1], [1, 0, 1, 1], [0], [1, 1]]


def sums(chosen: Sequence[int], lo: Sequence[Sequence[float]] = LO) -> dict[str, float]:
    def flat(parts: Sequence[Sequence[float]]) -> torch.Tensor:
        return torch.tensor([x for i in chosen for x in parts[i]])

    mask = flat(MASK).bool()
    nan = torch.tensor(math.nan)
    lengths = torch.tensor([0, *(len(LO[i]) for i in chosen)])
    return mismatch_sums(
        torch.where(mask, flat(lo), nan),
        torch.where(mask, flat(LR), nan),
        mask,
        Segments(lengths.cumsum(0).int()),
    )


def naive() -> dict[str, float]:
    pairs = [
        [(a, b) for a, b, m in zip(*row, strict=True) if m]
        for row in zip(LO, LR, MASK, strict=True)
    ]
    pairs = [p for p in pairs if p]
    tokens = [a - b for p in pairs for a, b in p]
    rho = [math.exp(max(-20, min(20, g))) for g in tokens]

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)

    logs = [(-mean([a for a, _ in p]), -mean([b for _, b in p])) for p in pairs]
    return {
        "kl_rollout_train_k1": mean([-g for g in tokens]),
        "kl_rollout_train_k3": mean(
            [r - 1 - max(-20, g) for r, g in zip(rho, tokens, strict=True)]
        ),
        "abs_logprob_diff": mean([abs(g) for g in tokens]),
        "max_abs_logprob_diff": max(abs(g) for g in tokens),
        "mult_prob_error": mean([math.exp(min(20, abs(g))) for g in tokens]),
        "rho_mean": mean(rho),
        "ess": mean(rho) ** 2 / mean([r * r for r in rho]),
        "chi2_token": mean([r * r for r in rho]) - 1,
        "chi2_seq": mean(
            [math.exp(2 * max(-20, min(20, math.fsum(a - b for a, b in p)))) for p in pairs]
        )
        - 1,
        "train_ppl": mean([math.exp(t) for t, _ in logs]),
        "rollout_ppl": mean([math.exp(r) for _, r in logs]),
        "log_ppl_diff": mean([t - r for t, r in logs]),
        "log_ppl_abs_diff": mean([abs(t - r) for t, r in logs]),
        "ppl_ratio": mean([math.exp(t - r) for t, r in logs]),
        "extreme_frac_gt2": mean([float(abs(g) > math.log(2)) for g in tokens]),
    }


SPLITS = [[[0, 1, 2, 3, 4]], [[4, 0], [3], [2, 1]], [[0], [1], [2], [3], [4], []]]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_metrics_are_those_of_a_loop_over_all_tokens_and_sequences(split: list[list[int]]) -> None:
    """Sums of float64: 1e-12."""
    found = mismatch_metrics(sums(chosen) for chosen in split)
    assert found == pytest.approx(naive(), rel=1e-12)


def test_equal_log_probs_have_no_mismatch() -> None:
    found = mismatch_metrics([sums([0, 1, 2], LR)])
    for name in ("kl_rollout_train_k1", "kl_rollout_train_k3", "chi2_token", "chi2_seq"):
        assert found[name] == 0
    assert (found["ess"], found["rho_mean"], found["ppl_ratio"]) == (1, 1, 1)
    assert found["max_abs_logprob_diff"] == found["extreme_frac_gt2"] == 0


def test_nothing_trained_has_no_numbers() -> None:
    assert mismatch_metrics([]) == {}
    assert mismatch_metrics([sums([3]), sums([])]) == {}


def test_a_token_without_a_number_is_left_out() -> None:
    """It is reported by the loss; here it must not hide the other tokens."""
    broken = [list(row) for row in LO]
    broken[0][1] = math.nan
    broken[4][0] = -math.inf
    found = mismatch_metrics([sums(range(5), broken)])
    assert all(map(math.isfinite, found.values()))
    gaps = [0.25, -1.0, 0.5, 0.25, 0.875, -0.25, 0.5]
    assert found["abs_logprob_diff"] == pytest.approx(sum(map(abs, gaps)) / 7, rel=1e-12)
    assert found["max_abs_logprob_diff"] == 1.0
