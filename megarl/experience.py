"""A step's samples -> what each rank trains: advantages, aggregation weights, optimizer steps,
packed rows.

Everything here is computed from global data, the same on every rank, so that a loss downstream is a
plain sum.
"""

from collections.abc import Sequence

import numpy as np

from megarl.algos.advantages import group_advantages
from megarl.algos.normalize import token_weights
from megarl.config.schema import Config
from megarl.data.packing import build_row, plan_rows
from megarl.mesh import Mesh
from megarl.types import Mean, Metric, Sample, StepMetrics, TrainPlan


def make_plan(
    samples: Sequence[Sample], advantages: Sequence[float], config: Config, mesh: Mesh, dp_rank: int
) -> TrainPlan:
    """The rows of data-parallel rank ``dp_rank``: ``algo.minibatches`` optimizer steps, groups kept
    whole.
    """
    steps = []
    for part in split_by_group(samples, config.algo.minibatches):
        members = [samples[i] for i in part]
        weights = token_weights(config.algo.aggregation, [s.trained_tokens for s in members])
        rows = plan_rows(
            [len(s.tokens) for s in members],
            row_tokens=config.train.row_tokens,
            dp=mesh.dp,
            segment_multiple=mesh.segment_multiple,
            row_multiple=mesh.row_multiple,
            rows_multiple=mesh.rows_multiple,
        )
        steps.append(
            [
                build_row(
                    members,
                    row,
                    advantages=[float(advantages[i]) for i in part],
                    weights=weights.tolist(),
                    length=rows.length,
                    segment_multiple=mesh.segment_multiple,
                )
                for row in rows.rows[dp_rank]
            ]
        )
    return TrainPlan(steps)


def split_by_group(samples: Sequence[Sample], parts: int) -> list[list[int]]:
    """Sample indices of each optimizer step: whole groups, dealt in order of first appearance."""
    groups = list(dict.fromkeys(s.group for s in samples))
    share = {g: k * parts // len(groups) for k, g in enumerate(groups)}
    out: list[list[int]] = [[] for _ in range(parts)]
    for i, sample in enumerate(samples):
        out[share[sample.group]].append(i)
    return out


def advantages_of(samples: Sequence[Sample], config: Config) -> tuple[list[float], StepMetrics]:
    """One advantage a sample, and the share of groups that teach nothing (all rewards equal)."""
    rewards, groups = [s.reward for s in samples], [s.group for s in samples]
    values = group_advantages(config.algo.advantage, rewards, groups)
    labels = np.asarray(groups)
    flat = [not values[labels == g].any() for g in dict.fromkeys(groups)]
    return values.tolist(), [
        Metric("adv/zero_group_frac", Mean(float(sum(flat)), len(flat))),
        Metric("adv/abs_mean", Mean(float(np.abs(values).sum()), len(values))),
    ]
