"""Sequences -> rows: which sample lies in which row of which rank, then the rows themselves.

1. Rows are planned from lengths alone, the same on every rank, before any payload moves.
2. A row holds at most ``row_tokens`` padded tokens (a longer single sample is refused).
3. Every data-parallel rank gets the same number of rows, a multiple of ``rows_multiple``; the
   missing ones are empty. Longest first into the emptiest row keeps the rows even, which is what
   the slowest rank waits for.
4. All rows of an optimizer step have one length T: expert and pipeline parallel ranks run in step.
5. No sample is lost or doubled; order inside a row is by sample index, so the plan does not depend
   on sorting ties.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megarl.errors import DataError
from megarl.types import PackedBatch, Sample


@dataclass(frozen=True)
class RowPlan:
    """``rows[dp rank][microbatch]``: sample indices; ``length``: T, common to all rows."""

    rows: list[list[list[int]]]
    length: int


def padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def plan_rows(
    lengths: Sequence[int],
    *,
    row_tokens: int,
    dp: int,
    segment_multiple: int = 1,
    row_multiple: int = 1,
    rows_multiple: int = 1,
) -> RowPlan:
    """Place samples of ``lengths`` tokens into rows. Raises DataError for a sample longer than a
    row.

    Padded to a multiple: each sample's length (``segment_multiple``), the rows' common length
    (``row_multiple``), and the number of rows of a rank (``rows_multiple``).
    """
    sizes = [padded(n, segment_multiple) for n in lengths]
    too_long = [i for i, size in enumerate(sizes) if size > row_tokens]
    if too_long:
        i = too_long[0]
        raise DataError(
            f"sample {i} has {lengths[i]} tokens ({sizes[i]} padded), a row holds {row_tokens}; "
            f"raise train.row_tokens or lower rollout.max_new_tokens ({len(too_long)} such samples)"
        )
    step = dp * rows_multiple
    count = padded(max(1, -(-sum(sizes) // row_tokens)), step)
    while (bins := _fill(sizes, count, row_tokens)) is None:
        count += step
    longest = max((sum(sizes[i] for i in row) for row in bins), default=0)
    by_load = sorted(bins, key=lambda row: (-sum(sizes[i] for i in row), row))
    return RowPlan(
        rows=[[by_load[k] for k in range(rank, count, dp)] for rank in range(dp)],
        length=padded(max(longest, 1), row_multiple),
    )


def _fill(sizes: Sequence[int], count: int, capacity: int) -> list[list[int]] | None:
    """``count`` rows, longest sample first into the emptiest row; None if it does not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        k = min(range(count), key=loads.__getitem__)
        if loads[k] + sizes[i] > capacity:
            return None
        bins[k].append(i)
        loads[k] += sizes[i]
    return [sorted(row) for row in bins]


def build_row(
    samples: Sequence[Sample],
    indices: Sequence[int],
    *,
    advantages: Sequence[float],
    weights: Sequence[float],
    length: int,
    segment_multiple: int = 1,
) -> PackedBatch:
    """The packed row of ``samples[i] for i in indices``, target-aligned (``types.py``).

    ``advantages[i]`` and ``weights[i]`` go to each of sample i's trained tokens.
    """
    tokens, targets = np.zeros(length, np.int64), np.zeros(length, np.int64)
    positions = np.zeros(length, np.int64)
    valid, mask = np.zeros(length, bool), np.zeros(length, bool)
    weight, advantage = np.zeros(length, np.float32), np.zeros(length, np.float32)
    rollout = np.zeros(length, np.float32)
    bounds, true_lengths, start = [0], [], 0
    for i in indices:
        sample, n = samples[i], len(samples[i].tokens)
        size = padded(n, segment_multiple)
        here, shifted = slice(start, start + n), slice(start, start + n - 1)
        tokens[here], valid[here] = sample.tokens, True
        positions[start : start + size] = np.arange(size)
        targets[shifted], mask[shifted] = sample.tokens[1:], sample.mask[1:]
        rollout[shifted] = np.where(sample.mask[1:], sample.rollout_logprobs[1:], 0.0)
        weight[shifted] = np.where(sample.mask[1:], weights[i], 0.0)
        advantage[shifted] = np.where(sample.mask[1:], advantages[i], 0.0)
        start += size
        bounds.append(start)
        true_lengths.append(n)
    if start < length:  # padding is a segment of its own: attention never reaches a sample from it
        positions[start:] = np.arange(length - start)
        bounds.append(length)
        true_lengths.append(0)
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        lengths=torch.tensor(true_lengths, dtype=torch.int32),
        valid=torch.from_numpy(valid),
        mask=torch.from_numpy(mask),
        weight=torch.from_numpy(weight),
        advantages=torch.from_numpy(advantage),
        rollout_logprobs=torch.from_numpy(rollout),
        samples=tuple(indices),
    )
