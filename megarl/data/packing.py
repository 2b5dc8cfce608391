"""Sequences -> rows: which sample lies in which row of which rank, then the rows themselves.

1. Rows are planned from lengths alone, the same on every rank, before any payload moves.
2. A row holds at most ``row_tokens`` padded tokens (a longer single sample is refused).
3. Every data-parallel rank gets the same number of rows, a multiple of ``rows_multiple``; the
   missing ones are empty. Rows, microbatches and ranks are balanced by estimated FLOPs
   (``ops/pack.py``): what the slowest rank computes is what the others wait for.
4. A microbatch has one length on all ranks: expert-parallel ranks run in step, and so do pipeline
   stages. With one bucket it is that of the whole optimizer step.
5. No sample is lost or doubled; order inside a row is by sample index, so the plan does not depend
   on sorting ties.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.errors import DataError
from megarl.ops import RowPlan, pack_rows
from megarl.types import PackedBatch, Sample

Floats = NDArray[np.float32]


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
    buckets: int = 1,
    flops: tuple[int, int] = (1, 0),
) -> RowPlan:
    """Place samples of ``lengths`` tokens into rows. Raises DataError for a sample longer than a
    row.

    Padded to a multiple: each sample's length (``segment_multiple``), the rows' length
    (``row_multiple``), and the number of rows of a rank (``rows_multiple``). ``buckets``: how many
    different row lengths there may be. ``flops``: of a token and of a pair of tokens.
    """
    sizes = [padded(n, segment_multiple) for n in lengths]
    too_long = [i for i, size in enumerate(sizes) if size > row_tokens]
    if too_long:
        i = too_long[0]
        raise DataError(
            f"sample {i} has {lengths[i]} tokens ({sizes[i]} padded), a row holds {row_tokens}; "
            f"raise train.row_tokens or lower rollout.max_new_tokens ({len(too_long)} such samples)"
        )
    return pack_rows(
        sizes,
        row_tokens=row_tokens,
        dp=dp,
        rows_multiple=rows_multiple,
        row_multiple=row_multiple,
        linear=flops[0],
        quadratic=flops[1],
        buckets=buckets,
    )


def build_row(
    samples: Sequence[Sample],
    indices: Sequence[int],
    *,
    length: int,
    segment_multiple: int = 1,
) -> PackedBatch:
    """The packed row of ``samples[i] for i in indices``, target-aligned (``types.py``).

    Holds what the samples bring; ``weight`` and ``advantages`` are 0 until ``experience.py`` has
    computed them. Raises DataError where only some samples bring values or reference log-probs.
    """
    tokens, targets = np.zeros(length, np.int64), np.zeros(length, np.int64)
    positions = np.zeros(length, np.int64)
    valid, mask = np.zeros(length, bool), np.zeros(length, bool)
    bounds, true_lengths, start = [0], [], 0
    for i in indices:
        sample, n = samples[i], len(samples[i].tokens)
        size = padded(n, segment_multiple)
        here, shifted = slice(start, start + n), slice(start, start + n - 1)
        tokens[here], valid[here] = sample.tokens, True
        positions[start : start + size] = np.arange(size)
        targets[shifted], mask[shifted] = sample.tokens[1:], sample.mask[1:]
        start += size
        bounds.append(start)
        true_lengths.append(n)
    if start < length:  # padding is a segment of its own: attention never reaches a sample from it
        positions[start:] = np.arange(length - start)
        bounds.append(length)
        true_lengths.append(0)
    row = PackedBatch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        lengths=torch.tensor(true_lengths, dtype=torch.int32),
        valid=torch.from_numpy(valid),
        mask=torch.from_numpy(mask),
        weight=torch.zeros(length),
        advantages=torch.zeros(length),
        rollout_logprobs=torch.zeros(length),
        samples=tuple(indices),
    )
    row.rollout_logprobs = row.spread(lambda i: samples[i].rollout_logprobs).float()
    if (refs := _of_all([s.ref_logprobs for s in samples], "ref_logprobs")) is not None:
        row.ref_logprobs = row.spread(lambda i: refs[i]).float()
    if (values := _of_all([s.values for s in samples], "values")) is not None:
        row.values = torch.zeros(length)
        for i, start, n in row.segments():  # of the state after token t, which is before target t
            row.values[start : start + n] = torch.from_numpy(values[i])
    return row


def local_index(bounds: tuple[int, ...], cp: int, rank: int) -> torch.Tensor:
    """Row positions that context-parallel ``rank`` holds, i64 [T / cp], in its order."""
    if cp == 1:
        return torch.arange(bounds[-1])
    parts = []
    for start, end in pairwise(bounds):
        chunk = (end - start) // (2 * cp)
        assert chunk * 2 * cp == end - start, (
            f"segment of {end - start} tokens is not cut by 2 * cp = {2 * cp}"
        )
        for k in (rank, 2 * cp - 1 - rank):
            parts.append(torch.arange(start + k * chunk, start + (k + 1) * chunk))
    return torch.cat(parts)


def _of_all(parts: Sequence[Floats | None], name: str) -> list[Floats] | None:
    """What every sample brings, or None where none does."""
    there = [part for part in parts if part is not None]
    if there and len(there) < len(parts):
        without = next(i for i, part in enumerate(parts) if part is None)
        raise DataError(
            f"sample {without} has no {name}, others of its step have; accepted: all or none"
        )
    return there or None
