"""Worker side of ``test_relayout.py``."""

from typing import Any

import torch
from megatron.core import parallel_state

from megarl.actor.setup import init_beside, init_parallel
from megarl.experience import make_plan
from megarl.relayout import move
from megarl.types import Sample, TrainPlan
from tests.actor.compare import mesh_of
from tests.helpers.plans import config_of

Layout = dict[str, int]


def moved(
    rank: int, first: Layout, second: Layout, samples: list[Sample], numbers: list[torch.Tensor]
) -> dict[str, Any]:
    """``numbers[i]`` f32 [L] of sample i, given to the rows of one layout and found in those of the
    other, each way: as bits, by sample, on the ranks of the last stage.
    """
    try:
        one = init_parallel(mesh_of(first), seed=1, timeout_s=60)
        two = init_beside(one, mesh_of(second), timeout_s=60)
        config = config_of(algo={"minibatches": 2}, train={"row_tokens": 64})
        sides = [(make_plan(samples, config, p.mesh, p.at.dp), p) for p in (one, two)]
        found: dict[str, Any] = {}
        for name, source, target in (("values", *sides), ("returns", *reversed(sides))):
            _give(name, source[0], numbers if source[1].last_stage else [])
            move(name, samples, source, target)
            found[name] = _bits(name, target[0])
        return {**found, "holds": (two.last_stage, one.last_stage)}
    finally:
        parallel_state.destroy_model_parallel()


def _give(name: str, plan: TrainPlan, numbers: list[torch.Tensor]) -> None:
    for row in (row for rows in plan.steps for row in rows) if numbers else ():
        values = torch.full([len(row.tokens)], 7.0)  # between samples lies what is not theirs
        for i, start, n in row.segments():
            values[start : start + n] = numbers[i]
        setattr(row, name, values)


def _bits(name: str, plan: TrainPlan) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row in (row for rows in plan.steps for row in rows):
        if (values := getattr(row, name)) is not None:
            assert values.dtype == torch.float32 and values.shape == row.tokens.shape
            for i, start, n in row.segments():
                found[i] = values[start : start + n].view(torch.int32).tolist()
    return found
