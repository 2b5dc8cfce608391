"""The actor: the policy in training, in any layout. What it does is in ``step.py``, what it shares
with a critic in ``trained.py``.
"""

from dataclasses import dataclass

from megarl.actor.export import MegatronWeights
from megarl.actor.load import load_hf_weights
from megarl.actor.model import build_model, dtype_of
from megarl.actor.options import transformer_options
from megarl.actor.reference import HostWeights
from megarl.actor.setup import Parallel
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
from megarl.models.hf_io import open_checkpoint
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

    area = "optim"
    whose = "policy"

    def logprobs(self, plan: TrainPlan) -> None:
        """Fill every row's ``old_logprobs`` and ``old_entropy`` from the current weights, where
        wanted, and ``ref_logprobs`` from those of the reference, where they are not recorded.
        """
        if self.recompute_old:
            for rows in plan.steps:
                self.record(rows, self._of_logprobs(record_old(self.parallel)))
        if self.reference is None or plan.steps[0][0].ref_logprobs is not None:
            return
        with self.reference.loaded([chunk.module for chunk in self.model]):
            for rows in plan.steps:
                self.record(rows, self._of_logprobs(record_reference(self.parallel)))

    def keep_reference(self) -> None:
        """The weights of this moment are the reference policy."""
        self.reference = HostWeights([chunk.module for chunk in self.model])

    def train(self, plan: TrainPlan) -> StepMetrics:
        """Every optimizer step of the plan; one without a trained token is left out."""
        return self.take_steps(
            plan, lambda rows, tokens: self.forward_backward(rows, plan.coefficients)
        )

    def forward_backward(
        self, rows: list[PackedBatch], coefficients: Coefficients = ONLY_POLICY
    ) -> tuple[StepMetrics, list[Fault]]:
        """``gradients`` of the objective."""
        loss = policy_loss(self.objective, coefficients, self.parallel, len(rows))
        return self.gradients(rows, self._of_logprobs(loss))

    def weights(self) -> MegatronWeights:
        return MegatronWeights(self.model, self.spec, self.parallel)

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
    core = build_model(spec, parallel, dtype, transformer_options(config, spec))
    if config.model.load is None:
        load_hf_weights(core, open_checkpoint(config.model.hf), spec, parallel)
    return MegatronActor(
        parallel=parallel,
        **in_training(core, dtype, config, optimizer_steps),
        spec=spec,
        objective=Objective.of(config.algo),
        temperature=config.rollout.temperature if config.run.mode != "sft" else 1.0,
        recompute_old=config.algo.old_logprobs == "recompute" and config.run.mode != "sft",
        reference=None,
    )
