"""What workers do in tests of the critic. As ``work.py``: imported by workers only."""

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megarl.actor.actor import build_actor
from megarl.actor.critic import HEAD, MegatronCritic, build_critic, load_start
from megarl.actor.export import MegatronWeights
from megarl.actor.names import global_parameters, unwrap
from megarl.actor.setup import init_beside, init_parallel
from megarl.actor.state import load_model, load_trained, save_model, save_trained
from megarl.algos.control import Controllers
from megarl.config.schema import Config
from megarl.experience import complete_plan, make_plan
from megarl.models.spec import read_spec
from megarl.parts import ranks_of
from megarl.relayout import move
from megarl.types import PackedBatch, Sample, StepMetrics, TrainPlan
from tests.actor.work import config_for, mesh_of
from tests.helpers.samples import random_samples

Layout = dict[str, int]
Tensors = dict[str, torch.Tensor]

PPO = {
    "algo": {
        "policy": {"name": "ppo_clip"},
        "advantage": {"name": "gae", "lam": 0.9},
        "value": {"clip": 0.2},
        "old_logprobs": "rollout",
        "minibatches": 2,
    },
    "critic": {"lr": 1e-3},
}


class Subject:
    """A critic whose head is ``head`` [H], zeros if None. ``actor``: the first layout of the ranks,
    if that is another; its rows are then where returns are computed.
    """

    def __init__(
        self,
        hf: Path,
        layout: Layout,
        head: torch.Tensor | None,
        actor: Layout | None = None,
        **sections: Any,
    ):
        self.config: Config = config_for(hf, **{**PPO, **sections})
        self.spec = read_spec(self.config.critic_hf, for_values=True)
        self.first = init_parallel(
            mesh_of(layout if actor is None else actor), seed=1, timeout_s=60
        )
        parallel = self.first
        if actor is not None:
            parallel = init_beside(self.first, mesh_of(layout), timeout_s=60)
        self.critic: MegatronCritic = build_critic(self.config, self.spec, parallel, 100)
        if head is not None:
            self.set_head(head)

    def set_head(self, head: torch.Tensor) -> None:
        last = unwrap(self.critic.model[-1])
        if last.post_process:
            with torch.no_grad():
                last.output_layer.weight.copy_(head[None])
        self.critic.optimizer.reload_model_params()

    def plan(self, samples: list[Sample]) -> TrainPlan:
        """With values of the critic, returns and weights."""
        own, _ = self.plans(samples)
        return own

    def plans(self, samples: list[Sample]) -> tuple[TrainPlan, TrainPlan]:
        """(the critic's, the one whose advantages were computed, which may be the same)."""
        parallel, first = self.critic.parallel, self.first
        own = make_plan(samples, self.config, parallel.mesh, parallel.at.dp)
        self.critic.values(own)
        plan = own
        if first.mesh != parallel.mesh:
            plan = make_plan(samples, self.config, first.mesh, first.at.dp)
            move("values", samples, (own, parallel), (plan, first))
        controllers = Controllers.of(self.config.algo)
        complete_plan(plan, samples, self.config, controllers, ranks_of(first))
        if plan is not own:
            move("returns", samples, (plan, first), (own, parallel))
        return own, plan

    def whole(self, of: Callable[[torch.nn.Parameter], torch.Tensor]) -> Tensors:
        """``of`` every parameter of this rank's stage under HF names, the head under its own."""
        critic, found = self.critic, {}
        weights = MegatronWeights(critic.model, self.spec, critic.parallel)
        for name, parameter in global_parameters(critic.model, critic.parallel):
            if name == HEAD:
                found[HEAD] = of(parameter).detach().clone()
                continue
            for full, shards in weights.gathered(name, of(parameter).detach()):
                tensors = weights.mapping.to_hf(full, shards)
                found.update({n: t.clone() for n, t in tensors})
        return found

    def weights(self) -> Tensors:
        return self.whole(lambda p: p)

    def steps(self, first: int, last: int) -> list[StepMetrics]:
        """Training steps on rollouts that depend on the step alone."""
        return [
            self.critic.train(self.plan(random_samples(4, 4, seed=k))) for k in range(first, last)
        ]


def first_step(
    rank: int,
    hf: Path,
    layout: Layout,
    samples: list[Sample],
    head: torch.Tensor | None,
    **sections: Any,
) -> dict[str, Any]:
    """The first optimizer step: values and returns of every sample on the rank that speaks for it,
    metrics and gradients. Old values are made other than the current ones by what the samples bring
    as values, so that some are clipped.
    """
    try:
        subject = Subject(hf, layout, head, **sections)
        critic = subject.critic
        recorded = make_plan(samples, subject.config, critic.parallel.mesh, critic.parallel.at.dp)
        plan = subject.plan(samples)
        rows = [row for part in plan.steps for row in part]
        found: dict[str, dict[int, Any]] = {"values": {}, "returns": {}}
        if critic.parallel.speaks_for_rows:
            for name, of in found.items():
                of.update(pair for row in rows for pair in _by_sample(row, getattr(row, name)))
        for row, given in zip(plan.steps[0], recorded.steps[0], strict=True):
            if row.returns is not None:
                row.values = row.values + given.values
        metrics, nonfinite = critic.forward_backward(plan.steps[0], plan.trained_tokens[0])
        gradients = subject.whole(lambda p: p.main_grad)
        metrics += critic.update()
        return {**found, "metrics": [metrics], "gradients": gradients, "nonfinite": nonfinite}
    finally:
        parallel_state.destroy_model_parallel()


def at_the_start(rank: int, hf: Path, samples: list[Sample]) -> dict[str, Any]:
    """A critic that has not learnt; its values, and what it is after bad and empty steps."""
    try:
        subject = Subject(hf, {}, None)
        subject.critic.keep_in = hf.parent / "nonfinite"
        plan = subject.plan(samples)
        values = torch.cat([row.values for rows in plan.steps for row in rows])
        before = subject.weights()
        spoilt = next(row for row in plan.steps[0] if row.mask.any())
        t = int(spoilt.mask.nonzero()[0])
        spoilt.returns[t] = torch.nan
        plan.trained_tokens[1] = 0
        metrics = subject.critic.train(plan)
        after = subject.weights()
        object.__setattr__(subject.critic, "on_nonfinite", "raise")
        error = ""
        try:
            subject.critic.train(plan)
        except FloatingPointError as e:
            error = str(e)
        victim = next(i for i, start, n in spoilt.segments() if start <= t < start + n)
        same = all(torch.equal(before[n], after[n]) for n in before)
        named = samples[victim].name in error
        return {"values": values, "metrics": metrics, "same": same, "error": error, "named": named}
    finally:
        parallel_state.destroy_model_parallel()


def trained_on(
    rank: int, hf: Path, layout: Layout, path: Path, load: bool, **sections: Any
) -> dict[str, Any]:
    """Weights after two steps and after a third. ``load``: the first two are those of ``path``;
    else they are trained, and left there. ``sections`` may hold ``actor``, as ``Subject`` takes it.
    """
    _write_here()
    try:
        subject = Subject(hf, layout, None, **sections)
        if load:
            with torch.no_grad():
                for chunk in subject.critic.model:
                    for parameter in chunk.parameters():
                        parameter.add_(0.25)
            load_trained(subject.critic, path)
        else:
            subject.steps(0, 2)
            _folder(rank, path)
            save_trained(subject.critic, path)
        before = subject.weights()
        (metrics,) = subject.steps(2, 3)
        return {"before": before, "after": subject.weights(), "metrics": metrics}
    finally:
        parallel_state.destroy_model_parallel()


def from_a_policy(
    rank: int, hf: Path, layout: Layout, path: Path, head: torch.Tensor
) -> tuple[Tensors, Tensors]:
    """(weights of a policy, of a critic with ``head`` that had other weights and was given the
    policy's checkpoint).
    """
    _write_here()
    try:
        subject = Subject(hf, layout, head)
        actor = build_actor(subject.config, subject.spec, subject.critic.parallel, 100)
        with torch.no_grad():
            for chunk in actor.model:
                for parameter in chunk.parameters():
                    parameter.add_(0.25)
        _folder(rank, path)
        save_model(actor.model, actor.parallel, path)
        load_model(subject.critic.model, actor.parallel, path, but=HEAD)
        return {n: t.clone() for n, t in actor.weights().tensors()}, subject.weights()
    finally:
        parallel_state.destroy_model_parallel()


def started(
    rank: int, hf: Path, layout: Layout, path: Path, head: torch.Tensor
) -> dict[str, Tensors]:
    """Weights of a critic and of a policy that were saved, and of fresh critics that start from the
    checkpoint of both (``critic``) and of the policy alone (``policy``), whose head is 2 ``head``;
    and what a step of the optimizer with a tiny learning rate leaves of the former.
    """
    _write_here()
    try:
        subject = Subject(hf, layout, head)
        subject.steps(0, 1)
        actor = build_actor(subject.config, subject.spec, subject.critic.parallel, 100)
        for folder in ("both/critic", "both/megatron", "alone/megatron"):
            _folder(rank, path / folder)
        save_trained(subject.critic, path / "both/critic")
        save_trained(actor, path / "both/megatron")
        save_model(actor.model, actor.parallel, path / "alone/megatron")
        found = {
            "saved": subject.weights(),
            "of the policy": {n: t.clone() for n, t in actor.weights().tensors()},
        }
        parallel_state.destroy_model_parallel()
        for name in ("both", "alone"):
            fresh = Subject(hf, layout, 2 * head, critic={"lr": 1e-9, "load": str(path / name)})
            assert fresh.config.critic_load is not None
            load_start(fresh.critic, fresh.config.critic_load)
            found[name] = fresh.weights()
            fresh.steps(0, 1)
            found[f"{name}, a step later"] = fresh.weights()
            parallel_state.destroy_model_parallel()
        return found
    finally:
        parallel_state.destroy_model_parallel()


def _by_sample(row: PackedBatch, values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for i, start, n in row.segments():
        yield i, values[start : start + n].clone()


def _folder(rank: int, path: Path) -> None:
    if rank == 0:
        path.mkdir(parents=True)
    dist.barrier()


def _write_here() -> None:
    """A worker, as a daemon, may not start the helper process of Megatron's writer."""
    filesystem_async._results_queue = queue.Queue()
