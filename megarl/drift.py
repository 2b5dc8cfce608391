"""Which rollout server's log-probs leave the trainer's: a watch on every server, in every step.

Servers have the same weights and should be as far from the trainer's log-probs as each other:
rounding, other kernels, and, of older tokens, the updates since. One that is much farther serves
other weights, or computes wrongly. Tokens are told apart by the server that sampled them
(``VersionSpan.server``); measured are k3 = e^g - 1 - g with g = old - rollout log-prob, and the
share of tokens with abs(g) > ln 2 (docs/objectives.md, "Mismatch").
"""

import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megarl.algos.advantages import Share
from megarl.algos.mismatch import EXTREME
from megarl.algos.ratio import clamped
from megarl.types import Known, Max, Mean, Metric, PackedBatch, StepMetrics

log = logging.getLogger(__name__)

TIMES_OTHERS = 5.0  # so many times the median of the other servers is too far,
FLOOR = 1e-3  # where it is more than this;
ALONE = 0.1  # and of a server without others, this
TOKENS = 256  # fewer say nothing
MOST_SHOWN = 16  # servers that have metrics of their own, the farthest ones


@dataclass(frozen=True)
class Distance:
    """Of the tokens of one server."""

    tokens: float
    k3: float  # mean
    extreme: float  # share


def server_metrics(
    rows: Sequence[PackedBatch], samples: Sequence[Known], share: Share
) -> StepMetrics:
    """Of a step, the same on every rank. Collective (``share``)."""
    found = distances(part for rank in share(server_sums(rows, samples)) for part in rank)
    if not found:
        return []
    far = drifting(found)
    for name, why in far.items():
        log.warning("%s drifts from the trainer: %s", name, why)
    shown = sorted(found, key=lambda name: -found[name].k3)[:MOST_SHOWN]
    metrics = [Metric("servers/drifting", Max(len(far)))]
    for name in sorted(shown):
        area, d = f"servers/{name.replace(' ', '_')}", found[name]
        metrics.append(Metric(f"{area}/mismatch_k3", Mean(d.k3 * d.tokens, d.tokens)))
        metrics.append(Metric(f"{area}/extreme", Mean(d.extreme * d.tokens, d.tokens)))
    return metrics


def server_sums(
    rows: Sequence[PackedBatch], samples: Sequence[Known]
) -> list[tuple[str, list[float]]]:
    """(server, [tokens, sum of k3, extreme tokens]) of this rank's rows, over their trained tokens
    of which both log-probs are finite.
    """
    sums: dict[str, torch.Tensor] = {}
    for row in rows:
        assert row.old_logprobs is not None
        raw = row.old_logprobs.double() - row.rollout_logprobs.double()
        good = row.mask & raw.isfinite()
        g = clamped(torch.where(good, raw, 0.0))
        values = torch.stack([good, torch.expm1(g) - g, g.abs() > EXTREME]).double() * good
        values = values.cumsum(-1)
        for server, first, last in _stretches(row, samples):
            part = values[:, last] - (values[:, first - 1] if first else 0.0)
            sums[server] = sums.get(server, torch.zeros(3, dtype=torch.float64)) + part
    return [(server, found.tolist()) for server, found in sorted(sums.items())]


def _stretches(row: PackedBatch, samples: Sequence[Known]) -> Iterable[tuple[str, int, int]]:
    """(server, first, last) position of every stretch of response tokens, target-aligned."""
    for i, start, length in row.segments():
        spans = samples[i].version_spans
        prompt = length - spans[-1].end if spans else 0
        for span in spans:
            if span.server and span.end > span.start:
                at = start + prompt - 1  # of the target that is the response's first token
                yield span.server, max(at + span.start, start), at + span.end - 1


def distances(parts: Iterable[tuple[str, Sequence[float]]]) -> dict[str, Distance]:
    """By server, from what ``server_sums`` gave on all ranks."""
    totals: dict[str, list[float]] = {}
    for server, sums in parts:
        total = totals.setdefault(server, [0.0, 0.0, 0.0])
        for k, value in enumerate(sums):
            total[k] += value
    return {
        server: Distance(tokens, k3 / tokens, extreme / tokens)
        for server, (tokens, k3, extreme) in sorted(totals.items())
        if tokens
    }


def drifting(found: Mapping[str, Distance]) -> dict[str, str]:
    """Servers that are too far from the trainer, and why that is said of them."""
    measured = {name: d for name, d in found.items() if d.tokens >= TOKENS}
    far = {}
    for name, d in measured.items():
        others = [other.k3 for key, other in measured.items() if key != name]
        usual = statistics.median(others) if others else None
        limit = ALONE if usual is None else max(FLOOR, TIMES_OTHERS * usual)
        if d.k3 > limit:
            compared = (
                "it is alone" if usual is None else f"the other servers' median is {usual:.2g}"
            )
            far[name] = (
                f"k3 {d.k3:.2g} over {d.tokens:.0f} tokens, {d.extreme:.1%} of them by a factor of "
                f"2 or more; {compared}, up to {limit:.2g} is accepted"
            )
    return far
