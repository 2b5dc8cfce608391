"""Plans of a step, made and completed by every data-parallel rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megarl.algos.control import Controllers
from megarl.config.schema import Config
from megarl.experience import Ranks, complete_plan, make_plan
from megarl.mesh import Mesh
from megarl.types import PackedBatch, Sample, StepMetrics, TrainPlan
from tests.helpers.ranks import Gather, on_ranks

Passes = Callable[[PackedBatch], None]  # what the passes before the update leave in a row


@dataclass(frozen=True)
class Completed:
    """Of one rank."""

    plan: TrainPlan
    metrics: StepMetrics
    controllers: Controllers


def config_of(**sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": "unused", "steps": 1},
        "model": {"hf": "unused"},
        "optim": {"lr": 1.0},
        "algo": {"policy": {"name": "reinforce"}},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Config.model_validate(base)


def rollout_as_old(row: PackedBatch) -> None:
    """A trainer that agrees with the rollout server."""
    row.old_logprobs = row.rollout_logprobs


def completed(
    samples: Sequence[Sample],
    config: Config,
    mesh: Mesh | None = None,
    passes: Passes = rollout_as_old,
) -> list[Completed]:
    """One of every data-parallel rank, all of which hold the last stage."""
    mesh = mesh or Mesh()

    def rank(index: int, gather: Gather) -> Completed:
        return complete(samples, config, mesh, index, passes, Ranks(gather))

    return on_ranks([partial(rank, index) for index in range(mesh.dp)])


def complete(
    samples: Sequence[Sample],
    config: Config,
    mesh: Mesh,
    dp_rank: int,
    passes: Passes,
    ranks: Ranks,
) -> Completed:
    plan = make_plan(samples, config, mesh, dp_rank)
    for row in (row for rows in plan.steps for row in rows) if ranks.holds else ():
        passes(row)
    controllers = Controllers.of(config.algo)
    return Completed(plan, complete_plan(plan, samples, config, controllers, ranks), controllers)


def rows_of(ranks: Sequence[Completed], step: int = 0) -> list[PackedBatch]:
    return [row for rank in ranks for row in rank.plan.steps[step]]
