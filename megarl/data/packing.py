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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.errors import DataError
from megarl.ops import RowPlan, pack_rows
from megarl.types import Known, PackedBatch, Sample, SampleFacts


@dataclass(frozen=True)
class Payload:
    """What a rank uses of a sample's tokens; None: nothing of it there."""

    length: int
    tokens: NDArray[np.int32] | None = None  # [L]
    mask: NDArray[np.bool_] | None = None  # [L]
    rollout_logprobs: NDArray[np.float32] | None = None  # [L]
    values: NDArray[np.float32] | None = None  # [L]
    ref_logprobs: NDArray[np.float32] | None = None  # [L]
    routing: NDArray[Any] | None = None  # u8 | u16 [L - 1, M of the rank's stage, K]


# Of the step's samples, by index: those that a row is made of at least
Tokens = Sequence[Sample] | Mapping[int, Payload | Sample]


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


def brought(samples: Sequence[Known]) -> tuple[str, ...]:
    """The optional numbers of every token that all samples have. Raises DataError where only some
    have them.
    """
    return tuple(
        name
        for name in ("values", "ref_logprobs")
        if _all_or_none([name in s.brings for s in samples], name)
    )


def routing_shape(samples: Sequence[SampleFacts]) -> tuple[int, int, str] | None:
    """MoE layers, experts a token and dtype of the samples' routing, None without it. Raises
    DataError where they differ.
    """
    if not _all_or_none([s.routing is not None for s in samples], "routing"):
        return None
    shapes = {s.routing for s in samples}
    if len(shapes) > 1:
        raise DataError(
            f"routing of (MoE layers, experts a token, dtype) {sorted(map(str, shapes))} in a "
            "step; accepted: one kind"
        )
    return shapes.pop()


def build_row(
    samples: Tokens,
    indices: Sequence[int],
    *,
    length: int,
    segment_multiple: int = 1,
    brings: Sequence[str] = (),
    routing: tuple[int, int, str] | None = None,
) -> PackedBatch:
    """The packed row of ``samples[i] for i in indices``, target-aligned (``types/``).

    Holds what the samples bring (``brings``, ``routing``: of all samples of the step) as far as it
    is here: 0 where a payload has None, and no routing is known there. ``weight`` and
    ``advantages`` are 0 until ``experience.py`` has computed them.
    """
    here = [(i, samples[i]) for i in indices]
    bounds = np.cumsum([0, *(padded(s.length, segment_multiple) for _, s in here)]).tolist()
    lengths = [s.length for _, s in here]
    if bounds[-1] < length:  # padding is a segment of its own: attention never reaches a sample
        bounds.append(length)
        lengths.append(0)
    valid, positions = np.zeros(length, bool), np.zeros(length, np.int64)
    for start, end, n in zip(bounds, bounds[1:], lengths, strict=False):
        valid[start : start + n] = True
        positions[start:end] = np.arange(end - start)
    tokens, targets, mask = _token_fields(here, bounds, length)
    row = PackedBatch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        valid=torch.from_numpy(valid),
        mask=torch.from_numpy(mask),
        weight=torch.zeros(length),
        advantages=torch.zeros(length),
        rollout_logprobs=torch.zeros(length),
        samples=tuple(indices),
    )
    row.rollout_logprobs = _spread(row, samples, "rollout_logprobs")
    if "ref_logprobs" in brings:
        row.ref_logprobs = _spread(row, samples, "ref_logprobs")
    if "values" in brings:
        row.values = torch.zeros(length)
        for i, start, n in row.segments():  # of the state after token t, which is before target t
            if (values := samples[i].values) is not None:
                row.values[start : start + n] = torch.from_numpy(values)
    if routing is not None:
        row.routing, row.routed = _routing(row, samples, routing)
    return row


def _routing(
    row: PackedBatch, samples: Tokens, kind: tuple[int, int, str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [T, M of the stage, K], where they are known bool [T]): never of a sample's last token,
    which no expert saw, or of padding. Raises DataError for routing of other tokens.
    """
    ids = np.zeros((len(row.tokens), *kind[:2]), np.dtype(kind[2]))
    known = np.zeros(len(row.tokens), bool)
    for i, start, n in row.segments():
        if (chosen := samples[i].routing) is None:
            continue
        if chosen.shape != (n - 1, *kind[:2]):
            raise DataError(
                f"sample {i} of {n} tokens has routing of (tokens, MoE layers, experts a token) "
                f"{chosen.shape}; accepted: {(n - 1, *kind[:2])}"
            )
        ids[start : start + n - 1] = chosen
        known[start : start + n - 1] = True
    return torch.from_numpy(ids), torch.from_numpy(known)


def _token_fields(
    here: Sequence[tuple[int, Sample | Payload]], bounds: Sequence[int], length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """(tokens, targets, mask) [T]."""
    tokens, targets = np.zeros(length, np.int64), np.zeros(length, np.int64)
    mask = np.zeros(length, bool)
    for (_, sample), start in zip(here, bounds, strict=False):
        end = start + sample.length
        if sample.tokens is not None:
            tokens[start:end] = sample.tokens
            targets[start : end - 1] = sample.tokens[1:]
        if sample.mask is not None:
            mask[start : end - 1] = sample.mask[1:]
    return tokens, targets, mask


def _spread(row: PackedBatch, samples: Tokens, name: str) -> torch.Tensor:
    """f32 [T], target-aligned, 0 where nothing is trained."""
    parts = {i: getattr(samples[i], name) for i in row.samples}
    return row.spread(lambda i: 0.0 if parts[i] is None else parts[i]).float()


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


def _all_or_none(there: Sequence[bool], name: str) -> bool:
    if any(there) and not all(there):
        raise DataError(
            f"sample {there.index(False)} has no {name}, others of its step have; accepted: all or "
            "none"
        )
    return any(there)
