"""What workers do in tests of models that lie in host memory while idle, and of the reference
policy. As ``work.py``: imported by workers only.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from megarl.actor.actor import MegatronActor
from megarl.actor.critic import build_critic
from megarl.actor.names import global_parameters
from megarl.actor.residence import WEIGHTS
from megarl.actor.state import load_trained, save_trained
from megarl.actor.trained import TrainedModel
from megarl.models.spec import read_spec
from tests.actor.work import config_for, make_actor, plan_for, prepare
from tests.actor.work_critic import PPO, _folder, _write_here
from tests.helpers.samples import random_samples

Layout = dict[str, int]
ONE_STEP = {"policy": {"name": "gspo"}, "minibatches": 1, "kl": {"coef": 0.05}}


def trained(rank: int, hf: Path, layout: Layout, path: Path, **sections: Any) -> dict[str, Any]:
    """Two steps, a checkpoint, a step; loaded again, the same step. Where the model's memory is
    before and after each of them, in bytes.
    """
    _write_here()
    config = config_for(hf, **{"algo": ONE_STEP, **sections})
    try:
        actor = make_actor(config, layout)
        actor.keep_reference()
        held = [_held(actor)]
        for k in range(2):
            actor.train(prepare(actor, config, random_samples(4, 4, seed=k)))
            held.append(_held(actor))
        _folder(rank, path)
        save_trained(actor, path)
        metrics = actor.train(prepare(actor, config, random_samples(4, 4, seed=2)))
        found = {"metrics": [metrics], "weights": _weights(actor), "gradients": {}}
        load_trained(actor, path)
        actor.train(prepare(actor, config, random_samples(4, 4, seed=2)))
        held.append(_held(actor))
        actor.onload()
        return {**found, "again": _weights(actor), "held": held, "whole": _held(actor)}
    finally:
        parallel_state.destroy_model_parallel()


def alternating(rank: int, hf: Path, layout: Layout) -> list[tuple[int, int]]:
    """Bytes that (actor, critic) hold on the device at every collective call of a training step
    and between the phases.
    """
    config = config_for(hf, **PPO, memory={"offload": "idle"})
    seen: list[tuple[int, int]] = []
    try:
        actor = make_actor(config, layout)
        critic = build_critic(config, read_spec(hf), actor.parallel, 100)
        run = TrainedModel.record, TrainedModel.gradients, TrainedModel.update

        def spy(method: Any) -> Any:
            def watched(self: TrainedModel, *args: Any, **kwargs: Any) -> Any:
                seen.append((_held(actor), _held(critic)))
                return method(self, *args, **kwargs)

            return watched

        try:
            for method in run:
                setattr(TrainedModel, method.__name__, spy(method))
            plan = plan_for(actor, config, random_samples(4, 4, seed=0))
            actor.logprobs(plan)
            critic.values(plan)
            for row in (row for rows in plan.steps for row in rows):
                row.returns = torch.zeros_like(row.weight)
            actor.train(plan)
            critic.train(plan)
            seen.append((_held(actor), _held(critic)))
        finally:
            for method in run:
                setattr(TrainedModel, method.__name__, method)
        return seen
    finally:
        parallel_state.destroy_model_parallel()


def references(rank: int, hf: Path, layout: Layout, path: Path, **sections: Any) -> dict[str, Any]:
    """Three steps, after each of which but the first the policy becomes the reference, with a
    checkpoint after the second: reference log-probs and weights of the third step, without a stop
    and with one; and what the passes of the reference leave of everything that is the policy's.
    """
    _write_here()
    config = config_for(hf, **{"algo": ONE_STEP, **sections})
    found: dict[str, Any] = {}
    try:
        for name in ("whole", "rest"):
            actor = make_actor(config, layout)
            actor.keep_reference()
            if name == "whole":
                for k in range(2):
                    actor.train(prepare(actor, config, random_samples(4, 4, seed=k)))
                actor.keep_reference()
                _folder(rank, path)
                _folder(rank, path / "reference")
                (path / "policy").mkdir(exist_ok=True)
                actor.save_reference(path / "reference")
                save_trained(actor, path / "policy")
            else:
                with torch.no_grad(), actor.resident():
                    for _, parameter in global_parameters(actor.model, actor.parallel):
                        parameter.add_(0.25)
                load_trained(actor, path / "policy")
                with actor.resident():
                    before = {n: t.clone() for n, t in _everything(actor)}
                actor.load_reference(path / "reference")
                with actor.resident():
                    found["kept"] = _same(before, actor)
            actor.train(prepare(actor, config, random_samples(4, 4, seed=7)))  # moves away from it
            with actor.resident():
                before = {n: t.clone() for n, t in _everything(actor)}
            plan = prepare(actor, config, random_samples(4, 4, seed=8))
            with actor.resident():
                found[f"{name} undisturbed"] = _same(before, actor)
            rows = [row for rows in plan.steps for row in rows]
            refs = [row.ref_logprobs for row in rows if row.ref_logprobs is not None]
            olds = [row.old_logprobs for row in rows if row.old_logprobs is not None]
            actor.train(plan)
            found[name] = {"refs": refs, "olds": olds, "weights": _weights(actor)}
            parallel_state.destroy_model_parallel()
        return found
    finally:
        parallel_state.destroy_model_parallel()


def _everything(actor: MegatronActor) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers, main parameters and moments."""
    for k, chunk in enumerate(actor.model):
        module = chunk.module
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield f"{k} {name}", tensor
    for k, part in enumerate(getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])):
        groups = part.optimizer.param_groups
        for i, p in enumerate(p for group in groups for p in group["params"]):
            yield f"main {k} {i}", p
            for name, value in part.optimizer.state[p].items():
                if torch.is_tensor(value):
                    yield f"{name} {k} {i}", value


def _same(before: dict[str, torch.Tensor], actor: MegatronActor) -> bool:
    now = dict(_everything(actor))
    assert len(now) > 100 and now.keys() == before.keys()
    return all(torch.equal(now[n], t) and now[n].dtype == t.dtype for n, t in before.items())


def _weights(actor: MegatronActor) -> dict[str, torch.Tensor]:
    with actor.resident(WEIGHTS):
        return {n: t.clone() for n, t in actor.weights().tensors()}


def _held(trained: TrainedModel) -> int:
    """Bytes of all storages that a model in training refers to; counted apart from what moves
    them.
    """
    tensors: list[torch.Tensor] = []
    for chunk in trained.model:
        tensors += [*chunk.module.parameters(), *chunk.module.buffers()]
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            tensors += [buffer.grad_data, *(x for x in [buffer.param_data] if x is not None)]
    for part in getattr(trained.optimizer, "chained_optimizers", [trained.optimizer]):
        for p in (p for group in part.optimizer.param_groups for p in group["params"]):
            tensors += [p, *(v for v in part.optimizer.state[p].values() if torch.is_tensor(v))]
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())
