"""Worker side of test_schedules.py and test_clipping.py."""

from pathlib import Path
from typing import Any

import torch

from megarl.actor.actor import MegatronActor
from megarl.actor.state import load_trained, save_trained
from megarl.types import Sample
from tests.actor.work import config_for, make_actor, prepare


def _rates(actor: MegatronActor) -> tuple[float, float]:
    """Learning rate and weight decay that the optimizer's groups have now."""
    groups = [g for g in actor.optimizer.param_groups if g["params"]]
    (lr,) = {float(g["lr"]) for g in groups}
    # matrices have weight_decay, vectors (norms) none: upstream multiplies by wd_mult
    decays = {float(g["weight_decay"]) / g["wd_mult"] for g in groups if g["wd_mult"]}
    assert all(g["weight_decay"] == 0 for g in groups if not g["wd_mult"])
    (decay,) = decays
    return lr, decay


def updates(
    rank: int, hf: Path, optim: dict[str, Any], total: int, save_at: int, folder: Path
) -> list[tuple[float, float]]:
    """(lr, weight decay) of ``total`` updates; another actor goes on after ``save_at``."""
    from megatron.core import parallel_state

    from megarl.actor.optimizer import build_schedule

    config = config_for(hf, optim=optim)
    found = []
    try:
        for first, last in ((0, save_at), (save_at, total)):
            actor = make_actor(config, {})
            actor.schedule = build_schedule(config.optim, actor.optimizer, total)
            if first:
                load_trained(actor, folder)
            for _ in range(first, last):
                actor.update(skip=True)
                found.append(_rates(actor))
            if not first:
                save_trained(actor, folder)
            parallel_state.destroy_model_parallel()
        return found
    finally:
        parallel_state.destroy_model_parallel()


def rollouts(
    rank: int, hf: Path, optim: dict[str, Any], samples: list[Sample], stop: int, folder: Path
) -> dict[str, Any]:
    """Six rollouts of two updates each, in one go and with a restart after rollout ``stop``."""
    from megatron.core import parallel_state

    from megarl.actor.optimizer import build_schedule

    config = config_for(hf, optim=optim, algo={"minibatches": 2})

    def run(actor: MegatronActor, count: int) -> list[tuple[float, float]]:
        rates: list[tuple[float, float]] = []
        step = actor.optimizer.step

        def noting() -> Any:
            rates.append(_rates(actor))
            return step()

        actor.optimizer.step = noting
        for _ in range(count):
            actor.train(prepare(actor, config, samples))
        del actor.optimizer.step
        return rates

    def build() -> MegatronActor:
        actor = make_actor(config, {})
        actor.schedule = build_schedule(config.optim, actor.optimizer, 12)
        return actor

    def weights(actor: MegatronActor) -> dict[str, torch.Tensor]:
        return {n: t.clone() for n, t in actor.weights().tensors()}

    try:
        actor = build()
        through, ends = run(actor, 6), weights(actor)
        parallel_state.destroy_model_parallel()
        actor = build()
        stopped = run(actor, stop)
        folder.mkdir()
        save_trained(actor, folder)
        parallel_state.destroy_model_parallel()
        actor = build()
        load_trained(actor, folder)
        stopped += run(actor, 6 - stop)
        same = all(torch.equal(ends[n], t) for n, t in weights(actor).items())
        return {"through": through, "stopped": stopped, "same_weights": same}
    finally:
        parallel_state.destroy_model_parallel()
