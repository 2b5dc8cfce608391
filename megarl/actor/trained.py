"""What every Megatron model in training has, actor or critic: chunks in DDP, an optimizer, a
learning-rate schedule, and the rule for numbers that are not finite.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from megatron.core.distributed import finalize_model_grads

from megarl.actor.model import wrap_ddp
from megarl.actor.optimizer import build_optimizer, build_schedule
from megarl.actor.residence import PARTS, Evicted, evict
from megarl.actor.setup import Parallel
from megarl.actor.step import OnOutput, run_schedule
from megarl.config.schema import OptimSection
from megarl.hostcomm import gather_and_share
from megarl.types import Max, Metric, PackedBatch, StepMetrics, Sum, TrainPlan

log = logging.getLogger(__name__)

# (rows of an optimizer step, trained tokens of all ranks in it) -> (metrics, samples of this rank
# with numbers that are not finite), with the gradients ready
ForwardBackward = Callable[[list[PackedBatch], int], tuple[StepMetrics, list[int]]]


@dataclass
class TrainedModel:
    """``model`` holds the stage's chunks; every method is collective."""

    parallel: Parallel
    model: list[Any]  # DistributedDataParallel, by chunk
    optimizer: Any
    schedule: Any
    on_nonfinite: str
    away: dict[str, Evicted]  # what lies in host memory, by part

    area: ClassVar[str]  # of its metrics
    whose: ClassVar[str]  # in messages

    def offload(self, *parts: str) -> None:
        """``parts`` to host memory, by default all; their device memory is free for others."""
        for part in parts or PARTS:
            if part not in self.away:
                self.away[part] = evict(part, self.model, self.optimizer, self.parallel.device)
        if self.parallel.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, *parts: str) -> None:
        """``parts`` back to the device, bit for bit (gradients as zeros); by default all."""
        for part in parts or PARTS:
            if part in self.away:
                self.away.pop(part).restore()

    @property
    def sharded_optimizer(self) -> bool:
        return bool(self.model[0].ddp_config.use_distributed_optimizer)

    @contextmanager
    def resident(self, *parts: str) -> Iterator[None]:
        """Inside, ``parts`` are on the device (by default all); afterwards as before."""
        moved = [part for part in parts or PARTS if part in self.away]
        self.onload(*parts)
        try:
            yield
        finally:
            if moved:
                self.offload(*moved)

    def record(self, rows: list[PackedBatch], finish: OnOutput) -> None:
        """Forward passes alone; ``finish`` keeps what is wanted of them."""
        for chunk in self.model:
            chunk.eval()
        with torch.no_grad(), self.parallel.active():
            run_schedule(self.model, rows, self.parallel, forward_only=True, finish=finish)

    def gradients(self, rows: list[PackedBatch], loss: OnOutput) -> tuple[StepMetrics, list[int]]:
        """Gradients of the plain weighted sum over all ranks and rows (``step.py``), reduced and
        ready. (Metrics, samples with numbers that are not finite on this rank.)
        """
        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self.parallel.active():
            found = run_schedule(self.model, rows, self.parallel, forward_only=False, finish=loss)
        return (
            [metric for result in found for metric in result.metrics],
            [sample for result in found for sample in result.nonfinite],
        )

    def take_steps(self, plan: TrainPlan, forward_backward: ForwardBackward) -> StepMetrics:
        """Every optimizer step of the plan; one without a trained token is left out."""
        metrics: StepMetrics = []
        with self.resident():
            for rows, tokens in zip(plan.steps, plan.trained_tokens, strict=True):
                skipped = True
                if tokens:
                    found, nonfinite = forward_backward(rows, tokens)
                    metrics += found
                    skipped = self._must_skip(nonfinite, plan.names)
                metrics += self.update(skip=skipped)
        return metrics

    def update(self, *, skip: bool = False) -> StepMetrics:
        """One optimizer step, unless it is to be skipped, and one of the learning-rate schedule."""
        self.schedule.step(increment=1)
        lr = float(self.schedule.get_lr(self.optimizer.param_groups[0]))
        metrics = [Metric(f"{self.area}/skipped", Sum(float(skip and self.parallel.rank == 0)))]
        if not skip:
            with self.parallel.active():
                ok, grad_norm, _ = self.optimizer.step()
            assert ok, "gradients are finite: checked before"
            metrics += [Metric(f"{self.area}/grad_norm", Max(float(grad_norm)))]
        return [*metrics, Metric(f"{self.area}/lr", Max(lr))]

    def _must_skip(self, nonfinite: list[int], names: list[str]) -> bool:
        """Whether this optimizer step is not to be taken: the same answer on every rank.

        Raises FloatingPointError where ``train.on_nonfinite`` says so.
        """
        bad_gradient = not all(
            bool(torch.isfinite(buffer.grad_data).all())
            for chunk in self.model
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        )
        reports = gather_and_share([nonfinite, bad_gradient], self.parallel.host)
        samples = sorted({names[i] for indices, _ in reports for i in indices})
        gradient = any(bad for _, bad in reports)
        if not samples and not gradient:
            return False
        found = f"{self.whose}: numbers that are not finite"
        if samples:
            more = f" and {len(samples) - 5} more" if len(samples) > 5 else ""
            found += f" at trained tokens of the samples {', '.join(samples[:5])}{more}"
        if gradient:
            found += " in the gradient" if not samples else ", and in the gradient"
        if self.on_nonfinite == "raise" or (self.on_nonfinite == "drop" and gradient):
            raise FloatingPointError(
                f"{found}; train.on_nonfinite={self.on_nonfinite} "
                "(skip leaves such optimizer steps out)"
            )
        if self.parallel.rank == 0:
            what = "left out" if self.on_nonfinite == "drop" else "optimizer step skipped"
            log.error("%s: %s (train.on_nonfinite=%s)", found, what, self.on_nonfinite)
        return self.on_nonfinite == "skip"


def in_training(
    core: list[Any], dtype: torch.dtype, settings: OptimSection, optimizer_steps: int
) -> dict[str, Any]:
    """The chunks in DDP, their optimizer and its schedule, by the names of ``TrainedModel``."""
    model = wrap_ddp(core, dtype, distributed_optimizer=settings.distributed)
    optimizer = build_optimizer(settings, dtype, model)
    core[0].config.finalize_model_grads_func = finalize_model_grads
    schedule = build_schedule(settings, optimizer, optimizer_steps)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "away": {}}
