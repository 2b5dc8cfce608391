"""What ranks tell each other about a step's rows, from a real ``complete_plan`` of small ones. For
``simulate_scale.py``.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scale_sizes import timed

from megarl.algos.control import Controllers
from megarl.config.schema import Config
from megarl.experience import Ranks, complete_plan, make_plan
from megarl.mesh import Mesh
from megarl.monitor.metrics import decode, encode, reduce_metrics
from megarl.types import Mean, Metric, Sample


@dataclass(frozen=True)
class Statistics:
    """JSON that ranks tell each other in a step (``complete_plan``), and metrics to rank 0."""

    calls: int
    bytes_of_a_row: float
    bytes_of_a_rank: float  # that has no rows
    metrics_bytes: int  # of a rank, 120 of them
    metrics_s: float  # rank 0: those of one rank


def statistics(config_of: Callable[[int], Config]) -> Statistics:
    """From small steps of 32 and 64 rows. ``config_of``: for so many samples, in groups of 4."""
    few, many = (_said(rows, config_of(4 * rows)) for rows in (32, 64))
    metrics = [Metric(f"area/of_a_metric_{i}", Mean(0.1234567 * i, 1021.0)) for i in range(120)]
    parts, world = encode(metrics), 64
    _, seconds = timed(lambda: reduce_metrics([decode(parts) for _ in range(world)]))
    return Statistics(
        len(many),
        (sum(many) - sum(few)) / 32,
        len("null,") * len(many),
        len(parts),
        seconds / world,
    )


def _said(num_rows: int, config: Config) -> list[int]:
    """Bytes of every value that one rank with ``num_rows`` rows of 4 samples says."""
    rng, said = np.random.default_rng(0), list[int]()
    samples = [_small_sample(rng, i) for i in range(4 * num_rows)]

    def gather(value: Any) -> list[Any]:
        said.append(len(json.dumps(value)))
        return [value]

    plan = make_plan(samples, config, Mesh(), 0)
    rows = [row for rows in plan.steps for row in rows]
    assert len(rows) == num_rows, len(rows)
    for row in rows:
        row.old_logprobs = row.rollout_logprobs - 0.1 * torch.rand(len(row.tokens))
    complete_plan(plan, samples, config, Controllers.of(config.algo), Ranks(gather))
    return said


def _small_sample(rng: np.random.Generator, i: int) -> Sample:
    return Sample(
        prompt_id=str(i // 4),
        group=i // 4,
        index=i % 4,
        tokens=np.ones(8, np.int32),
        mask=np.arange(8) > 1,
        rollout_logprobs=-rng.random(8).astype(np.float32),
        rewards=np.array([i % 2], np.float32),
        correct=bool(i % 2),
        truncated=False,
    )
