"""The actor: the policy in training, in any layout. What it does is in ``step.py``, what it shares
with a critic in ``trained.py``.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.actor.expert_bias import routers_of
from megarl.actor.export import MegatronWeights
from megarl.actor.fp8 import install_fp8
from megarl.actor.load import load_hf_weights
from megarl.actor.model import build_model, dtype_of
from megarl.actor.names import global_modules, global_parameters, unwrap
from megarl.actor.options import transformer_options
from megarl.actor.reference import HostWeights
from megarl.actor.replay import RoutedPass, RoutingReplay
from megarl.actor.residence import WEIGHTS
from megarl.actor.router import Router
from megarl.actor.router_metrics import router_metrics
from megarl.actor.setup import Parallel
from megarl.actor.state import load_model, save_model
from megarl.actor.step import (
    OnLogprobs,
    OnOutput,
    on_logprobs,
    policy_loss,
    record_old,
    record_reference,
)
from megarl.actor.trained import TrainedModel, in_training
from megarl.algos.objective import Objective
from megarl.config.schema import Config
from megarl.data.kept_rows import Fault
from megarl.models.frozen import frozen_parameters
from megarl.models.hf_complete import open_model
from megarl.models.spec import ModelSpec
from megarl.types import ONLY_POLICY, Coefficients, PackedBatch, StepMetrics, TrainPlan


@dataclass
class MegatronActor(TrainedModel):
    """Implements ``protocols.Actor``."""

    spec: ModelSpec
    objective: Objective
    temperature: float
    recompute_old: bool
    reference: HostWeights | None
    replay: RoutingReplay | None
    balanced: bool  # by the experts' balancing loss
    metrics_by_layer: bool  # of routers

    area = "optim"
    whose = "policy"

    def logprobs(self, plan: TrainPlan) -> None:
        """Fill every row's ``old_logprobs`` and ``old_entropy`` from the current weights, where
        wanted, and ``ref_logprobs`` from those of the reference, where they are not recorded.
        """
        with self.resident(WEIGHTS):
            if self.recompute_old:
                for rows in plan.steps:
                    routing = self._old_routing(rows)
                    self.record(rows, self._of_logprobs(record_old(self.parallel)), routing)
            if self.reference is None or plan.steps[0][0].ref_logprobs is not None:
                return
            with self.reference.loaded(self._chunks):
                for rows in plan.steps:
                    self.record(rows, self._of_logprobs(record_reference(self.parallel)))

    def keep_reference(self) -> None:
        """The weights of this moment are the reference policy."""
        with self.resident(WEIGHTS):
            self.reference = HostWeights(self._chunks)

    def save_reference(self, path: Path) -> None:
        """Its weights as ``state.save_model`` does. Collective; ``path`` is an empty folder."""
        assert self.reference is not None
        with self.resident(WEIGHTS), self.reference.loaded(self._chunks):
            save_model(self.model, self.parallel, path)

    def load_reference(self, path: Path) -> None:
        """The inverse of ``save_reference``; the policy's own weights stay. Collective."""
        with self.resident(WEIGHTS):
            own = HostWeights(self._chunks)
            load_model(self.model, self.parallel, path)
            self.reference = HostWeights(self._chunks)
            own.put(self._chunks)

    @property
    def _chunks(self) -> list[torch.nn.Module]:
        return [chunk.module for chunk in self.model]

    def train(self, plan: TrainPlan) -> StepMetrics:
        """Every optimizer step of the plan; one without a trained token is left out."""
        return self.take_steps(
            plan, lambda rows, tokens: self.forward_backward(rows, plan.coefficients)
        )

    def forward_backward(
        self, rows: list[PackedBatch], coefficients: Coefficients = ONLY_POLICY
    ) -> tuple[StepMetrics, list[Fault]]:
        """``gradients`` of the objective, with what the routers did."""
        loss = policy_loss(self.objective, coefficients, self.parallel, len(rows))
        routing = None
        if self.replay is not None:
            routing = self.replay.training_pass(self.model, rows)
        metrics, faults = self.gradients(rows, self._of_logprobs(loss), routing)
        return metrics + self._of_routers(len(rows)), faults

    def _of_routers(self, rows: int) -> StepMetrics:
        """Of the passes since gradients were begun, ``rows`` of them."""
        decoders = [unwrap(chunk).decoder for chunk in self.model]
        return router_metrics(
            {router.layer_number - 1: router.record for router in routers_of(decoders)},
            self.parallel,
            topk=self.spec.topk,
            rows=rows,
            aux_loss=self.balanced,
            by_layer=self.metrics_by_layer,
        )

    def weights(self, senders: int = 1) -> MegatronWeights:
        """``senders`` of every pipeline stage."""
        return MegatronWeights(self.model, self.spec, self.parallel, senders)

    def _old_routing(self, rows: list[PackedBatch]) -> RoutedPass | None:
        return None if self.replay is None else self.replay.old_pass(self.model, rows)

    def _of_logprobs(self, finish: OnLogprobs) -> OnOutput:
        return on_logprobs(
            finish, self.parallel, temperature=self.temperature, vocab_size=self.spec.vocab
        )


def build_actor(
    config: Config, spec: ModelSpec, parallel: Parallel, optimizer_steps: int
) -> MegatronActor:
    """Model, optimizer and schedule for ``config``. Initial weights are those of ``model.hf``
    unless a checkpoint is loaded afterwards (``actor/state.py``). Collective."""
    dtype = dtype_of(config.precision)
    source = open_model(config.model.hf, spec) if config.model.load is None else None
    core = build_model(spec, parallel, dtype, transformer_options(config, spec))
    install_fp8(core, parallel, config.precision.fp8)
    if source is not None:
        load_hf_weights(core, source, spec, parallel)
    frozen = frozen_parameters(config.train.frozen, spec)
    for name, parameter in global_parameters(core, parallel):
        if frozen.is_frozen(name):
            parameter.requires_grad_(False)
    for name, module in global_modules(core, parallel):
        if isinstance(module, Router) and module.expert_bias is not None:
            module.keeps_bias = frozen.is_frozen(f"{name}.expert_bias")
    actor = MegatronActor(
        parallel=parallel,
        **in_training(core, dtype, config, optimizer_steps),
        spec=spec,
        objective=Objective.of(config.algo),
        temperature=config.rollout.temperature if config.run.mode != "sft" else 1.0,
        recompute_old=config.algo.old_logprobs == "recompute" and config.run.mode != "sft",
        reference=None,
        replay=RoutingReplay.of(config.moe.routing_replay, spec, parallel),
        balanced=config.moe.aux_loss_coeff > 0,
        metrics_by_layer=config.monitor.moe_layers,
    )
    if config.memory.offload == "idle":
        actor.offload()
    return actor
