"""The actor: a Megatron model in training, in any layout. What it does is in ``step.py``; this file
owns the parts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads

from megarl.actor.attention_packed import local_index
from megarl.actor.export import MegatronWeights
from megarl.actor.load import load_hf_weights
from megarl.actor.model import build_model, wrap_ddp
from megarl.actor.optimizer import build_optimizer, build_schedule
from megarl.actor.setup import Parallel
from megarl.actor.step import policy_loss, record_logprobs, run_schedule
from megarl.algos.objective import Objective
from megarl.algos.ratio import LOG_RATIO_LIMIT
from megarl.config.schema import Config
from megarl.models.hf_io import open_checkpoint
from megarl.models.spec import ModelSpec
from megarl.types import Max, Mean, Metric, PackedBatch, StepMetrics, TrainPlan


@dataclass
class MegatronActor:
    """Implements ``protocols.Actor``. ``model`` holds the stage's chunks in DDP; every method is
    collective."""

    spec: ModelSpec
    parallel: Parallel
    model: list[Any]  # DistributedDataParallel, by chunk
    optimizer: Any
    schedule: Any
    objective: Objective
    temperature: float
    recompute_old: bool

    def logprobs(self, plan: TrainPlan) -> StepMetrics:
        """Fill ``old_logprobs`` where the objective wants them recomputed; compare with the
        rollout's.
        """
        if not self.recompute_old:
            return []
        metrics: StepMetrics = []
        for chunk in self.model:
            chunk.eval()
        with torch.no_grad():
            for rows in plan.steps:
                self._run(rows, record_logprobs, forward_only=True)
                for row in rows:
                    metrics += self._mismatch(row)
        return metrics

    def train(self, plan: TrainPlan) -> StepMetrics:
        """Every optimizer step of the plan."""
        metrics: StepMetrics = []
        for rows in plan.steps:
            metrics += self.forward_backward(rows)
            metrics += self.update()
        return metrics

    def forward_backward(self, rows: list[PackedBatch]) -> StepMetrics:
        """Gradients of the plain weighted sum over all ranks and rows (``step.py``), reduced and
        ready.
        """
        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        per_row = self._run(
            rows, policy_loss(self.objective, self.parallel, len(rows)), forward_only=False
        )
        return [metric for row_metrics in per_row for metric in row_metrics]

    def update(self) -> StepMetrics:
        """One optimizer step, then one step of the learning-rate schedule."""
        self.schedule.step(increment=1)
        lr = float(self.schedule.get_lr(self.optimizer.param_groups[0]))
        ok, grad_norm, _ = self.optimizer.step()
        norm = float(grad_norm)
        if not ok or norm != norm or norm == float("inf"):
            raise FloatingPointError(f"gradient norm {norm}: the optimizer step was not taken")
        return [Metric("optim/grad_norm", Max(norm)), Metric("optim/lr", Max(lr))]

    def weights(self) -> MegatronWeights:
        return MegatronWeights(self.model, self.spec, self.parallel)

    def _run(self, rows: list[PackedBatch], finish: Any, *, forward_only: bool) -> list[Any]:
        return run_schedule(
            self.model,
            rows,
            self.parallel,
            forward_only=forward_only,
            temperature=self.temperature,
            vocab_size=self.spec.vocab,
            finish=finish,
        )

    def _mismatch(self, row: PackedBatch) -> StepMetrics:
        """Trainer against rollout log-probs of the same tokens and, ideally, the same weights."""
        if row.old_logprobs is None or not self.parallel.speaks_for_tokens:
            return []
        bounds = tuple(row.cu_seqlens.tolist())
        index = local_index(bounds, self.parallel.mesh.cp, self.parallel.at.cp)
        mask = row.mask[index]
        lo, lr = row.old_logprobs.cpu()[mask].double(), row.rollout_logprobs[index][mask].double()
        if not len(lo):
            return []
        log_rho = (lo - lr).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return [
            Metric("mismatch/abs_logprob_diff", Mean(float((lo - lr).abs().sum()), len(lo))),
            Metric("mismatch/max_logprob_diff", Max(float((lo - lr).abs().max()))),
            Metric("mismatch/kl_k3", Mean(float((torch.expm1(log_rho) - log_rho).sum()), len(lo))),
        ]


def build_actor(
    config: Config, spec: ModelSpec, parallel: Parallel, optimizer_steps: int
) -> MegatronActor:
    """Model, optimizer and schedule for ``config``. Initial weights are those of ``model.hf``
    unless a checkpoint is loaded afterwards (``actor/state.py``). Collective."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.precision.dtype]
    core = build_model(spec, parallel, dtype)
    if config.model.load is None:
        load_hf_weights(core, open_checkpoint(config.model.hf), spec, parallel)
    model = wrap_ddp(core, dtype, distributed_optimizer=config.optim.distributed)
    optimizer = build_optimizer(config.optim, dtype, model)
    core[0].config.finalize_model_grads_func = finalize_model_grads
    return MegatronActor(
        spec=spec,
        parallel=parallel,
        model=model,
        optimizer=optimizer,
        schedule=build_schedule(config.optim, optimizer, optimizer_steps),
        objective=Objective(config.algo.policy),
        temperature=config.rollout.temperature if config.run.mode != "sft" else 1.0,
        recompute_old=config.algo.old_logprobs == "recompute" and config.run.mode != "sft",
    )
