"""What workers do in tests of frozen parameters. As ``work.py``: imported by workers only."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from megarl.actor.actor import MegatronActor
from megarl.actor.export import MegatronWeights
from megarl.actor.names import global_parameters
from megarl.actor.state import load_trained, save_trained
from megarl.types import Sample
from tests.actor.work import config_for, make_actor, prepare
from tests.actor.work_critic import _folder, _write_here

Layout = dict[str, int]
ALGO = {"policy": {"name": "gspo"}, "minibatches": 1, "old_logprobs": "rollout"}
OPTIM = {"lr": 1e-3, "weight_decay": 0.1, "distributed": False}


def trained(
    rank: int,
    hf: Path,
    layout: Layout,
    cases: dict[str, list[str]],
    samples: list[Sample],
    **sections: dict[str, Any],
) -> dict[str, Any]:
    """By name of a case: gradients (NaN of what is frozen), weights before and after two optimizer
    steps, names of frozen Megatron parameters, and the numbers that this rank's optimizer holds.
    """
    found = {}
    for name, patterns in cases.items():
        given = {"algo": ALGO, "optim": OPTIM, "train": {"frozen": patterns}, **sections}
        config = config_for(hf, **given)
        try:
            actor = make_actor(config, layout)
            before = _weights(actor)
            plan = prepare(actor, config, samples)
            actor.forward_backward(plan.steps[0])
            gradients = _gradients(actor)
            actor.update()
            actor.train(prepare(actor, config, samples))
            named = dict(global_parameters(actor.model, actor.parallel))
            found[name] = {
                "gradients": gradients,
                "before": before,
                "after": _weights(actor),
                "frozen": {n for n, p in named.items() if not p.requires_grad},
                "trainable": sum(p.numel() for p in named.values() if p.requires_grad),
                "optimized": sum(p.numel() for p in _optimized(actor)),
            }
        finally:
            parallel_state.destroy_model_parallel()
    return found


def resumed(
    rank: int,
    hf: Path,
    layout: Layout,
    path: Path,
    patterns: list[str],
    samples: list[Sample],
    distributed: bool,
) -> dict[str, Any]:
    """Weights after three steps without a stop, and with one after the second."""
    _write_here()
    optim = {**OPTIM, "distributed": distributed}
    config = config_for(hf, algo=ALGO, optim=optim, train={"frozen": patterns})
    found = {}
    try:
        for name in ("whole", "rest"):
            actor = make_actor(config, layout)
            if name == "whole":
                for _ in range(2):
                    actor.train(prepare(actor, config, samples))
                _folder(rank, path)
                save_trained(actor, path)
            else:
                with torch.no_grad():
                    for _, parameter in global_parameters(actor.model, actor.parallel):
                        parameter.add_(0.25)
                load_trained(actor, path)
            actor.train(prepare(actor, config, samples))
            found[name] = _weights(actor)
            parallel_state.destroy_model_parallel()
        return found
    finally:
        parallel_state.destroy_model_parallel()


def _optimized(actor: MegatronActor) -> list[torch.Tensor]:
    parts = getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])
    inner = [part.optimizer for part in parts if part.optimizer is not None]
    return [p for one in inner for group in one.param_groups for p in group["params"]]


def _weights(actor: MegatronActor) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in actor.weights().tensors()}


def _gradients(actor: MegatronActor) -> dict[str, torch.Tensor]:
    """Under HF names, on the stage's sender."""
    parameters = [p for _, p in global_parameters(actor.model, actor.parallel)]
    data = [p.data for p in parameters]
    for p in parameters:
        p.data = p.main_grad.clone() if p.requires_grad else torch.full_like(p, torch.nan)
    found = dict(MegatronWeights(actor.model, actor.spec, actor.parallel).tensors())
    for p, d in zip(parameters, data, strict=True):
        p.data = d
    return {name: t.clone() for name, t in found.items()}
