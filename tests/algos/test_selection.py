"""Tokens chosen before the step: the same ones however the batch is split."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algos.selection import high_entropy, num_selected, select_by_covariance
from megarl.config.policies import KlCovPolicy
from megarl.types import PackedBatch
from tests.helpers.ranks import on_ranks

LENGTHS = [9, 4, 12, 1, 7, 6, 10, 3]


def tokens(seed: int, ties: bool) -> list[dict[str, torch.Tensor]]:
    """Of every sample. Multiples of 1/4, and with ties only two of them: sums are exact, equal
    covariances are equal numbers.
    """
    rng = np.random.default_rng(seed)
    found = []
    for length in LENGTHS:
        count = 2 if ties else 64
        found.append(
            {
                "advantages": torch.from_numpy(rng.integers(0, count, length) / 4).float(),
                "old_logprobs": torch.from_numpy(-rng.integers(0, count, length) / 4).float(),
                "mask": torch.from_numpy(rng.random(length) < 0.7),
            }
        )
    found[3]["mask"][:] = False
    return found


def row(batch: Sequence[dict[str, torch.Tensor]], samples: Sequence[int], pad: int) -> PackedBatch:
    """Of the samples in order, and padding; garbage where nothing is trained."""
    lengths = [LENGTHS[i] for i in samples]
    size = sum(lengths) + pad

    def of(name: str, fill: float) -> torch.Tensor:
        parts = [
            torch.where(batch[i]["mask"], batch[i][name].double(), fill).float() for i in samples
        ]
        return torch.cat([*parts, torch.full((pad,), fill)])

    zeros = torch.zeros(size)
    return PackedBatch(
        tokens=zeros.long(),
        targets=zeros.long(),
        positions=zeros.long(),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths), size], dtype=torch.int32),
        lengths=torch.tensor([*lengths, 0], dtype=torch.int32),
        valid=zeros.bool(),
        mask=of("mask", 0.0).bool(),
        weight=zeros,
        advantages=of("advantages", math.nan),
        rollout_logprobs=zeros,
        samples=tuple(samples),
        old_logprobs=of("old_logprobs", math.nan),
    )


Split = list[list[list[int]]]  # [rank][row][sample]
SPLITS: list[Split] = [
    [[[0, 1, 2, 3, 4, 5, 6, 7]]],
    [[[0, 3], [1, 2]], [[4, 7], [5, 6]]],
    [[[7]], [[2, 5, 6]], [[0, 1, 3, 4]], [[]]],
    [[[k]] for k in range(8)],
]


def selected(batch: Any, policy: KlCovPolicy, split: Split) -> set[tuple[int, int]]:
    """(sample, position) of what the ranks chose together."""
    ranks = [[row(batch, samples, pad=3) for samples in rank] for rank in split]
    on_ranks([partial(select_by_covariance, policy, rows) for rows in ranks])
    chosen = set()
    for rows in ranks:
        for r in rows:
            assert r.selected is not None and not (r.selected & ~r.mask).any()
            for i, start, length in r.segments():
                here = r.selected[start : start + length].nonzero().flatten().tolist()
                chosen |= {(i, t) for t in here}
    return chosen


def naive(batch: Any, ratio: float) -> set[tuple[int, int]]:
    """The most covariant of all trained tokens, ties to the earlier."""
    flat = [
        (i, t, float(b["advantages"][t]), float(b["old_logprobs"][t]))
        for i, b in enumerate(batch)
        for t in range(len(b["mask"]))
        if b["mask"][t]
    ]
    mean_a = math.fsum(x[2] for x in flat) / len(flat)
    mean_lp = math.fsum(x[3] for x in flat) / len(flat)
    ranked = sorted(flat, key=lambda x: (-(x[2] - mean_a) * (x[3] - mean_lp), x[0], x[1]))
    return {(i, t) for i, t, _, _ in ranked[: max(1, int(ratio * len(flat)))]}


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("ratio", [1e-4, 0.1, 0.4, 0.9])
def test_the_most_covariant_tokens_of_the_whole_step_are_selected(
    ratio: float, ties: bool, split: Split
) -> None:
    for seed in range(3):
        batch = tokens(seed, ties)
        found = selected(batch, KlCovPolicy(ratio=ratio), split)
        assert found == naive(batch, ratio)


def test_a_token_without_a_number_is_not_selected_and_moves_nobody_else() -> None:
    batch = tokens(0, ties=False)
    for name, at in (("old_logprobs", 1), ("advantages", 2)):
        i, t = next((6, t) for t in range(at, 10) if batch[6]["mask"][t])
        broken = [dict(b) for b in batch]
        broken[i] = {**batch[i], name: batch[i][name].clone()}
        broken[i][name][t] = math.nan
        without = [dict(b) for b in batch]
        without[i] = {**batch[i], "mask": batch[i]["mask"].clone()}
        without[i]["mask"][t] = False
        for split in SPLITS:
            assert selected(broken, KlCovPolicy(ratio=0.3), split) == naive(without, 0.3)


def test_a_step_that_trains_nothing_selects_nothing() -> None:
    batch = tokens(0, ties=False)
    for b in batch:
        b["mask"][:] = False
    assert selected(batch, KlCovPolicy(ratio=0.5), SPLITS[1]) == set()
    assert [num_selected(0.5, n) for n in (0, 1, 2, 5)] == [0, 1, 1, 2]


# --- ASPO's quantile ------------------------------------------------------------------------------


def naive_quantile(values: list[float], q: float) -> float:
    """Linear interpolation between the order statistics around q (n - 1)."""
    ranked, at = sorted(values), q * (len(values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (at - low) * (ranked[high] - ranked[low])


@pytest.mark.parametrize("q", [0.2, 0.5, 0.8, 0.95])
def test_tokens_at_or_above_their_own_sequences_quantile_are_selected(q: float) -> None:
    rng = np.random.default_rng(7)
    total = sum(LENGTHS)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    mask = torch.from_numpy(rng.random(total) < 0.6)
    mask[int(bounds[3])] = False  # the sequence of one token
    entropy = torch.from_numpy(rng.integers(0, 9, total) / 8).float()
    found = high_entropy(torch.where(mask, entropy, math.nan), mask, bounds, q)
    for start, end in pairwise(bounds.tolist()):
        there = [t for t in range(start, end) if mask[t]]
        limit = naive_quantile([float(entropy[t]) for t in there], q) if there else math.inf
        for t in range(start, end):
            # entropies are eighths, and so are quantiles on one of them: a tie is one exactly
            assert bool(found[t]) == (t in there and float(entropy[t]) >= limit - 1e-12)
