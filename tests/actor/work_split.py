"""What workers do in ``test_split.py``: gradients of one optimizer step, for many objectives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megarl.actor.actor import MegatronActor
from megarl.algos.control import Controllers
from megarl.algos.objective import Objective
from megarl.config.schema import Config
from megarl.experience import complete_plan
from megarl.parts import ranks_of
from megarl.types import PackedBatch, Sample, TrainPlan
from tests.actor.work import config_for, gradients, make_actor, plan_for

Case = tuple[str, dict[str, Any], list[Sample], dict[str, Any]]  # name, algo, batch, train section


def gradients_of(
    rank: int, hf: Path, layout: dict[str, int], cases: list[Case]
) -> dict[str, dict[str, Any]]:
    """Of every case: metrics, gradient norm, and the gradients that this rank is the sender of."""
    from megatron.core import parallel_state

    first = config_of(hf, *cases[0][1::2])
    actor = make_actor(first, layout)
    try:
        return {
            name: _evaluate(actor, config_of(hf, algo, train), samples)
            for name, algo, samples, train in cases
        }
    finally:
        parallel_state.destroy_model_parallel()


def config_of(hf: Path, algo: dict[str, Any], train: dict[str, Any]) -> Config:
    return config_for(hf, algo={"minibatches": 1, **algo}, train=train)


def _evaluate(actor: MegatronActor, config: Config, samples: list[Sample]) -> dict[str, Any]:
    actor.objective = Objective.of(config.algo)
    actor.recompute_old = config.algo.old_logprobs == "recompute"
    plan = plan_for(actor, config, samples)
    actor.logprobs(plan)
    move_other_policies(plan)
    shared = complete_plan(
        plan, samples, config, Controllers.of(config.algo), ranks_of(actor.parallel)
    )
    metrics, nonfinite = actor.forward_backward(plan.steps[0], plan.coefficients)
    assert not nonfinite
    actor.optimizer.prepare_grads()
    norm = float(actor.optimizer.get_grad_norm())
    found = {"metrics": [metrics, shared if actor.parallel.rank == 0 else []]}
    return found | {"norm": norm, "gradients": gradients(actor), "weights": {}}


def move_other_policies(plan: TrainPlan) -> None:
    """Old and rollout log-probs away from the current ones, by some 0.4 and 0.3."""
    for row in plan.steps[0]:
        if row.old_logprobs is None:  # not the last pipeline stage
            continue
        current = row.old_logprobs.double()
        row.old_logprobs = (current + row.spread(noise_of(row, 0.4))).float()
        row.rollout_logprobs = (current + row.spread(noise_of(row, 0.3))).float()


def noise_of(row: PackedBatch, size: float) -> Callable[[int], Any]:
    """For every token of a sample, from the sample itself: the same wherever it stands."""
    tokens = {i: row.tokens[start : start + n].tolist() for i, start, n in row.segments()}

    def noise(i: int) -> Any:
        rng = np.random.default_rng([round(1000 * size), *tokens[i]])
        return rng.normal(0.05, size, len(tokens[i]))

    return noise
