"""What is told of samples: sums and counts, so that collectors' metrics add up."""

import math
from collections.abc import Sequence

from megarl.data.rewards import pad_rewards
from megarl.types import GroupOutcome, Known, Max, Mean, Metric, StepMetrics, Sum


def rollout_metrics(samples: Sequence[Known], area: str) -> StepMetrics:
    count = len(samples)
    lengths = [sample.response_tokens for sample in samples]
    return [
        Metric(f"{area}/reward", Mean(sum(s.reward for s in samples), count)),
        Metric(f"{area}/accuracy", Mean(sum(s.correct for s in samples), count)),
        Metric(f"{area}/truncated", Mean(sum(s.truncated for s in samples), count)),
        Metric(f"{area}/response_length", Mean(sum(lengths), count)),
        Metric(f"{area}/response_length_max", Max(max(lengths, default=0))),
        Metric(f"{area}/tokens", Sum(sum(s.length for s in samples))),
        Metric(f"{area}/samples", Sum(count)),
    ]


def effort_metrics(outcomes: Sequence[GroupOutcome]) -> StepMetrics:
    """What groups took: times each was asked for, and tokens of all times together."""
    count = len(outcomes)
    return [
        Metric("rollout/attempts", Mean(sum(o.attempts for o in outcomes), count)),
        Metric("rollout/sampled_tokens", Sum(sum(o.tokens for o in outcomes))),
    ]


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that one of k of the samples is right, drawn without replacement: 1 - C(n - c, k)
    / C(n, k) (arXiv:2107.03374, equation 1).
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def component_metrics(samples: Sequence[Known], names: Sequence[str], area: str) -> StepMetrics:
    """Means of the reward's components; of a reward that has only one, nothing beyond the whole."""
    count = len(samples)
    if len(names) < 2:
        return []
    return [
        Metric(f"{area}/reward/{name}", Mean(sum(float(s.rewards[i]) for s in samples), count))
        for i, name in enumerate(names)
    ]


def evaluation_metrics(
    outcomes: Sequence[GroupOutcome],
    samples_per_prompt: int,
    names: Sequence[str],
    area: str,
    pass_at: Sequence[int] = (),
) -> StepMetrics:
    """``names``: of the reward's components. Groups that failed are counted, and left out of all
    else.
    """
    whole = [outcome.samples for outcome in outcomes if not outcome.failed]
    samples = pad_rewards([s for group in whole for s in group], len(names) or 1)
    failed = samples_per_prompt * (len(outcomes) - len(whole))
    metrics = rollout_metrics(samples, area) + component_metrics(samples, names, area)
    metrics.append(Metric(f"{area}/failed", Sum(failed)))
    for k in pass_at:
        passed = sum(pass_at_k(len(g), sum(s.correct for s in g), k) for g in whole)
        metrics.append(Metric(f"{area}/pass@{k}", Mean(passed, len(whole))))
    return metrics
