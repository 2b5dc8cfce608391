"""A step's samples -> what each rank trains.

After the passes that give old and reference log-probs: advantages, correction weights, aggregation
weights, selected tokens, coefficients. Everything that needs the whole batch or a quantile is
computed here, so that a loss downstream is a plain sum.

1. Advantages are of the rollout batch. What weighs tokens inside a loss (aggregation, corrections,
   selections) is of the optimizer step.
2. Group statistics come from samples' facts, which every rank has; token statistics from this
   rank's rows, put together over ranks (``share``) in rank order. Both are float64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megarl.algos.advantages import Batch, Share, assign_advantages
from megarl.algos.control import Controllers
from megarl.algos.group_advantages import Outcomes
from megarl.algos.kl import kl_term
from megarl.algos.mismatch import mismatch_metrics, mismatch_sums
from megarl.algos.segments import Segments
from megarl.algos.selection import SELECTIONS
from megarl.algos.shaping import overlong_penalty
from megarl.algos.value import value_metrics
from megarl.algos.weighting import TokenWeights, weigh
from megarl.config.algo import AlgoSection
from megarl.config.schema import Config
from megarl.drift import server_metrics
from megarl.mesh import Mesh
from megarl.planning import build_plan, plan_steps, split_by_group, trained_samples
from megarl.types import (
    Coefficients,
    Known,
    Mean,
    Metric,
    PackedBatch,
    Sample,
    StepMetrics,
    TrainPlan,
)


def needs_reference(config: Config) -> bool:
    """Whether a reference policy is compared with."""
    return config.algo.kl is not None


def moving_reference(config: Config, step: int = 0) -> bool:
    """Whether the policy after ``step`` becomes the reference; of step 0: whether any ever does."""
    every = config.algo.kl.reference_every if config.algo.kl is not None else 0
    return every > 0 and step % every == 0


def make_plan(
    samples: Sequence[Sample],
    config: Config,
    mesh: Mesh,
    dp_rank: int,
    flops: tuple[int, int] = (1, 0),
    step: int = 0,
) -> TrainPlan:
    """The plan of a rank that has all samples itself, as in one process (``planning.py``)."""
    steps = plan_steps(samples, config, mesh, flops)
    return build_plan(steps, samples, samples, config, mesh, dp_rank)


@dataclass(frozen=True)
class Ranks:
    """This rank among those that complete a plan. ``holds``: it is on the last pipeline stage,
    where losses are. ``speaks``: one of those with the same rows. ``gather``: every rank's JSON
    value, in rank order.
    """

    gather: Callable[[Any], list[Any]]
    holds: bool = True
    speaks: bool = True

    def share(self, value: Any) -> list[Any]:
        """The values of the ranks that speak. Collective over all trainer ranks."""
        return [v for v in self.gather(value if self.speaks else None) if v is not None]


ONE_RANK = Ranks(gather=lambda value: [value])


def complete_plan(
    plan: TrainPlan,
    samples: Sequence[Known],
    config: Config,
    controllers: Controllers,
    ranks: Ranks = ONE_RANK,
    *,
    steer: bool = True,
) -> StepMetrics:
    """Fill what the loss needs into the rows, and the plan's coefficients. Collective. ``steer``:
    controllers move on; not where the policy is not trained, whose doing they answer to.

    Returns the same metrics on every rank.
    """
    algo = config.algo
    rows = [row for rows in plan.steps for row in rows] if ranks.holds else []
    metrics: StepMetrics = []
    if config.run.mode != "sft":
        outcomes = _outcomes(samples, algo)
        assign_advantages(
            algo.advantage, Batch(samples, outcomes, rows, _penalty(algo, controllers), ranks.share)
        )
        metrics += _advantage_metrics(outcomes, rows, ranks.share)
        metrics += value_metrics(rows, ranks.share) if algo.needs_values else []
        if algo.old_logprobs == "recompute":
            metrics += _mismatch(rows, ranks.share)
            metrics += server_metrics(rows, samples, ranks.share)
    trained = trained_samples(samples, algo)
    for part, here in zip(split_by_group(samples, algo.minibatches), plan.steps, strict=True):
        metrics += _complete_step(part, here if ranks.holds else [], trained, algo, ranks.share)
    metrics += _response_metrics(samples, trained)
    steered = len(samples) if steer else 0
    plan.coefficients, measured = _coefficients(rows, algo, controllers, steered, ranks.share)
    return metrics + measured


def _outcomes(samples: Sequence[Known], algo: AlgoSection) -> Outcomes:
    """Rewards with their length penalty. A trajectory of several samples is one outcome."""
    shared = any(s.trajectory is not None for s in samples)
    found = Outcomes.of(
        [s.reward for s in samples],
        [s.group for s in samples],
        [s.response_tokens for s in samples],
        [s.truncated for s in samples],
        # one without a trajectory is one of its own: below 0, where no trajectory is
        [-1 - i if s.trajectory is None else s.trajectory for i, s in enumerate(samples)]
        if shared
        else None,
    )
    if algo.overlong is None:
        return found
    lengths = found.of_trajectories().lengths.tolist()
    penalty = overlong_penalty(lengths, algo.overlong.l_max, algo.overlong.l_cache)
    return replace(found, rewards=found.rewards + penalty)


def _penalty(algo: AlgoSection, controllers: Controllers) -> Callable[[PackedBatch], torch.Tensor]:
    """The divergence from the reference as a penalty on every token's reward, f64 [T]."""
    kl = algo.kl
    if kl is None or kl.place != "reward":
        return lambda row: torch.zeros(len(row.mask), dtype=torch.float64)
    coef = controllers.kl.coefficient(0.0)

    def penalty(row: PackedBatch) -> torch.Tensor:
        return coef * _kl_of(row, algo)

    return penalty


def _kl_of(row: PackedBatch, algo: AlgoSection) -> torch.Tensor:
    """f64 [T]: the estimate for the old policy, 0 where nothing is trained."""
    assert row.old_logprobs is not None and row.ref_logprobs is not None and algo.kl is not None
    old = torch.where(row.mask, row.old_logprobs.double(), 0.0)
    value, _ = kl_term(old, torch.where(row.mask, row.ref_logprobs.double(), 0.0), old, algo.kl)
    return value


def _complete_step(
    part: Sequence[int],
    rows: Sequence[PackedBatch],
    samples: Sequence[Known],
    algo: AlgoSection,
    share: Share,
) -> StepMetrics:
    """Corrections, weights and selections of one optimizer step: samples ``part``."""
    trained = {i: samples[i].trained_tokens for i in part}
    groups = {i: samples[i].group for i in part}
    weights = weigh(algo, rows, trained, groups, share)
    for row, found in zip(rows, weights, strict=True):
        row.weight = found.aggregation.float()
        if found.correction is not None:
            row.correction = found.correction.weight.float()
    if (select := SELECTIONS.get(algo.policy.name)) is not None:
        select(algo.policy, rows, share)
    return [] if algo.correction is None else _correction_metrics(rows, weights, share)


def _coefficients(
    rows: Sequence[PackedBatch],
    algo: AlgoSection,
    controllers: Controllers,
    num_samples: int,
    share: Share,
) -> tuple[Coefficients, StepMetrics]:
    """This step's coefficients from token means of the old policy; controllers then move on.

    A number that is not finite is left out: it must not stay in a controller after its step.
    ``num_samples`` 0: controllers stay.
    """
    entropies, kls = [], []
    for row in rows:
        if row.old_entropy is not None:
            entropies.append(row.old_entropy[row.mask])
        if algo.kl is not None:
            kls.append(_kl_of(row, algo)[row.mask])
    parts = share([*_sum_and_count(entropies), *_sum_and_count(kls)])
    totals = [math.fsum(p[k] for p in parts) for k in range(4)]
    if not totals[1] and not totals[3]:
        return controllers.coefficients(0.0, math.inf), []
    entropy, kl = totals[0] / max(1.0, totals[1]), totals[2] / max(1.0, totals[3])
    found = controllers.coefficients(kl, entropy)
    if num_samples:
        controllers.update(kl, entropy, num_samples)
    metrics = []
    if algo.kl is not None:
        metrics += [_number("kl/old_policy", kl), _number("kl/coef", found.kl)]
    if algo.entropy is not None:
        metrics.append(_number("policy/entropy_coef", found.entropy))
    return found, metrics


def _sum_and_count(values: Sequence[torch.Tensor]) -> tuple[float, int]:
    finite = [v[v.isfinite()].double() for v in values]
    return math.fsum(float(v.sum()) for v in finite), sum(map(len, finite))


def _mismatch(rows: Sequence[PackedBatch], share: Share) -> StepMetrics:
    sums = []
    for row in rows:
        assert row.old_logprobs is not None
        sums.append(
            mismatch_sums(
                row.old_logprobs, row.rollout_logprobs, row.mask, Segments(row.cu_seqlens)
            )
        )
    found = mismatch_metrics(part for rank in share(sums) for part in rank)
    return [_number(f"mismatch/{name}", value) for name, value in found.items()]


def _advantage_metrics(
    outcomes: Outcomes, rows: Sequence[PackedBatch], share: Share
) -> StepMetrics:
    """Of trained tokens; and what groups and rewards are like."""
    values = [row.advantages[row.mask].double() for row in rows]
    here = torch.cat(values) if values else torch.zeros(0, dtype=torch.float64)
    here = here[here.isfinite()]
    ends = [float(here.min()), float(here.max())] if len(here) else []
    parts = share(
        [len(here), float(here.sum()), float((here**2).sum()), float(here.abs().sum()), ends]
    )
    count = sum(p[0] for p in parts)
    groups = [outcomes.rewards[m] for m in outcomes.members(outcomes.valid)]
    flat = sum(1 for g in groups if not len(g) or g.max() == g.min())
    single = sum(1 for g in groups if len(g) == 1)
    valid = outcomes.rewards[outcomes.valid]
    metrics = [
        Metric("adv/zero_group_frac", Mean(flat, len(groups))),
        Metric("adv/singleton_groups", Mean(single, 1)),
        Metric("reward/nonfinite", Mean(float((~outcomes.valid).sum()), 1)),
        Metric("reward/mean", Mean(float(valid.sum()), len(valid))),
        Metric("reward/std", Mean(float(valid.std(ddof=1)) if len(valid) > 1 else 0.0, 1)),
    ]
    if not count:
        return metrics
    mean = math.fsum(p[1] for p in parts) / count
    square = math.fsum(p[2] for p in parts) / count
    return [
        *metrics,
        _number("adv/mean", mean),
        _number("adv/std", math.sqrt(max(square - mean**2, 0.0))),
        _number("adv/abs_mean", math.fsum(p[3] for p in parts) / count),
        _number("adv/min", min(p[4][0] for p in parts if p[4])),
        _number("adv/max", max(p[4][1] for p in parts if p[4])),
    ]


def _response_metrics(samples: Sequence[Known], trained: Sequence[Known]) -> StepMetrics:
    """Of responses as they came, and of what the data masks leave of them."""
    lengths = [s.response_tokens for s in samples]
    return [
        Metric("resp/len_mean", Mean(sum(lengths), len(lengths))),
        _number("resp/len_max", max(lengths, default=0)),
        Metric("resp/trunc_frac", Mean(sum(s.truncated for s in samples), len(samples))),
        _number("resp/all_masked", sum(s.trained_tokens == 0 for s in trained)),
    ]


def _correction_metrics(
    rows: Sequence[PackedBatch], weights: Sequence[TokenWeights], share: Share
) -> StepMetrics:
    """What a correction keeps and how its weights spread, of one optimizer step."""
    sums = []
    for row, found in zip(rows, weights, strict=True):
        c = found.correction
        assert c is not None
        w, keep = c.weight[row.mask], c.keep[row.mask]
        kept_tokens = Segments(row.cu_seqlens).sums(c.keep)[0]
        sums.append(
            [
                *(float(row.mask.sum()), float(keep.sum()), float(w.sum()), float((w * w).sum())),
                *(float((c.count > 0).sum()), float((kept_tokens > 0).sum())),
            ]
        )
    everywhere = [part for rank in share(sums) for part in rank]
    tokens, kept, total, square, sequences, alive = (
        math.fsum(part[k] for part in everywhere) for k in range(6)
    )
    mean = total / tokens if tokens else 0.0
    spread = math.sqrt(max(0.0, square / tokens - mean**2)) if tokens else 0.0
    return [
        Metric("correction/kept_tokens", Mean(kept, tokens)),
        Metric("correction/kept_sequences", Mean(alive, sequences)),
        Metric("correction/weight_mean", Mean(total, tokens)),
        Metric("correction/weight_std", Mean(spread * tokens, tokens)),
    ]


def _number(name: str, value: float) -> Metric:
    """A number that is final already, the same on every rank."""
    return Metric(name, Mean(value, 1))
