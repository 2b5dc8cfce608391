"""What every Megatron model in training has, actor or critic: chunks in DDP, an optimizer, a
learning-rate schedule, and the rule for numbers that are not finite.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config

from megarl.actor.expert_bias import forget_routed, move_expert_bias
from megarl.actor.fp8_delayed import new_step
from megarl.actor.model import wrap_ddp
from megarl.actor.optimizer import build_optimizer, build_schedule
from megarl.actor.options import ddp_options
from megarl.actor.replay import RoutedPass
from megarl.actor.residence import PARTS, Evicted, evict
from megarl.actor.setup import Parallel
from megarl.actor.step import OnOutput, run_schedule, samples_at
from megarl.config.schema import Config
from megarl.data.kept_rows import Fault, kept_rows, write_rows
from megarl.hostcomm import gather_and_share
from megarl.rundir import RunDir
from megarl.types import Max, Metric, PackedBatch, StepMetrics, Sum, TrainPlan

log = logging.getLogger(__name__)

# (rows of an optimizer step, trained tokens of all ranks in it) -> (metrics, rows of this rank with
# numbers that are not finite), with the gradients ready
ForwardBackward = Callable[[list[PackedBatch], int], tuple[StepMetrics, list[Fault]]]


@dataclass
class TrainedModel:
    """``model`` holds the stage's chunks; every method is collective."""

    parallel: Parallel
    model: list[Any]  # DistributedDataParallel, by chunk
    optimizer: Any
    schedule: Any
    on_nonfinite: str
    keep_in: Path  # where rows with numbers that are not finite are kept
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

    def record(
        self, rows: list[PackedBatch], finish: OnOutput, routing: RoutedPass | None = None
    ) -> None:
        """Forward passes alone; ``finish`` keeps what is wanted of them."""
        for chunk in self.model:
            chunk.eval()
        with torch.no_grad():
            self._run(rows, finish, routing, forward_only=True)

    def gradients(
        self, rows: list[PackedBatch], loss: OnOutput, routing: RoutedPass | None = None
    ) -> tuple[StepMetrics, list[Fault]]:
        """Gradients of the plain weighted sum over all ranks and rows (``step.py``), reduced and
        ready. (Metrics, rows with numbers that are not finite on this rank.) ``routing``: whose
        choices of experts, where not the routers' own.
        """
        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
        forget_routed(self.model)
        new_step(self.model)
        self.optimizer.zero_grad()
        found = self._run(rows, loss, routing, forward_only=False)
        of_routing = [] if routing is None else routing.metrics()
        return (
            [*(metric for result in found for metric in result.metrics), *of_routing],
            [
                Fault(r, samples_at(rows[r], result.bad.nonzero()[:, 0]), result.bad, result.output)
                for r, result in enumerate(found)
                if result.bad is not None
            ],
        )

    def _run(
        self,
        rows: list[PackedBatch],
        finish: OnOutput,
        routing: RoutedPass | None,
        *,
        forward_only: bool,
    ) -> list[Any]:
        with self.parallel.active(), routing or nullcontext():
            return run_schedule(
                *(self.model, rows, self.parallel),
                forward_only=forward_only,
                finish=finish,
                forward=None if routing is None else routing.forward,
            )

    def take_steps(self, plan: TrainPlan, forward_backward: ForwardBackward) -> StepMetrics:
        """Every optimizer step of the plan; one without a trained token is left out."""
        metrics: StepMetrics = []
        with self.resident():
            steps = zip(plan.steps, plan.trained_tokens, strict=True)
            for index, (rows, tokens) in enumerate(steps):
                skipped = True
                if tokens:
                    found, faults = forward_backward(rows, tokens)
                    metrics += found
                    skipped = self._must_skip(plan, index, faults)
                metrics += self.update(skip=skipped)
            self.gather_parameters()
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
            rate = get_model_config(self.model[0]).moe_router_bias_update_rate
            move_expert_bias(self.model, rate, self.parallel.stage)
            metrics += [Metric(f"{self.area}/grad_norm", Max(float(grad_norm)))]
        decay = float(self.schedule.get_wd())
        return [
            *metrics,
            Metric(f"{self.area}/lr", Max(lr)),
            Metric(f"{self.area}/weight_decay", Max(decay)),
        ]

    def gather_parameters(self) -> None:
        """Where the next training pass would gather them: forward passes before it and exports
        need them now.
        """
        with torch.no_grad():
            for chunk in self.model:
                if chunk.ddp_config.overlap_param_gather:
                    chunk.start_param_sync(force_sync=True)

    def _must_skip(self, plan: TrainPlan, index: int, faults: list[Fault]) -> bool:
        """Whether this optimizer step is not to be taken: the same answer on every rank.

        Raises FloatingPointError where ``train.on_nonfinite`` says so. The rows are kept either
        way.
        """
        bad_gradient = not all(
            _all_finite(buffer.grad_data)
            for chunk in self.model
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        )
        mine = sorted({i for fault in faults for i in fault.samples})
        reports = gather_and_share([mine, bad_gradient], self.parallel.host)
        samples = sorted({plan.names[i] for indices, _ in reports for i in indices})
        gradient = any(bad for _, bad in reports)
        if not samples and not gradient:
            return False
        found = f"{self.whose}: numbers that are not finite"
        if samples:
            more = f" and {len(samples) - 5} more" if len(samples) > 5 else ""
            found += f" at trained tokens of the samples {', '.join(samples[:5])}{more}"
        if gradient:
            found += " in the gradient" if not samples else ", and in the gradient"
        if self.parallel.speaks_for_tokens and (faults or not samples):
            self._keep(plan, index, faults, found)
        if self.on_nonfinite == "raise" or (self.on_nonfinite == "drop" and gradient):
            raise FloatingPointError(
                f"{found}; train.on_nonfinite={self.on_nonfinite} "
                f"(skip leaves such optimizer steps out); rows kept in {self.keep_in}"
            )
        if self.parallel.rank == 0:
            what = "left out" if self.on_nonfinite == "drop" else "optimizer step skipped"
            log.error("%s: %s (train.on_nonfinite=%s)", found, what, self.on_nonfinite)
        return self.on_nonfinite == "skip"

    def _keep(self, plan: TrainPlan, index: int, faults: list[Fault], found: str) -> None:
        """Ranks that found something keep their rows; of a gradient nobody knows whose row it was.
        A disk that is full or gone must not hide what was found.
        """
        about = {"whose": self.whose, "step": plan.step, "index": index, "found": found}
        kept = kept_rows(plan.steps[index], faults, plan.names, rank=self.parallel.rank, **about)
        try:
            log.error("rows of step %d kept in %s", plan.step, write_rows(self.keep_in, kept))
        except OSError as e:
            log.error("rows of step %d could not be kept in %s: %s", plan.step, self.keep_in, e)


def _all_finite(values: torch.Tensor) -> bool:
    """By the extremes, which are NaN where anything is: a pass of its own over every element and
    nothing kept, where isfinite would write a flag for each.
    """
    return bool(torch.stack(torch.aminmax(values)).isfinite().all())


def in_training(
    core: list[Any], dtype: torch.dtype, config: Config, optimizer_steps: int
) -> dict[str, Any]:
    """The chunks in DDP, their optimizer and its schedule, by the names of ``TrainedModel``."""
    model = wrap_ddp(core, dtype, ddp_options(config))
    optimizer = build_optimizer(config, dtype, model)
    megatron = core[0].config
    if torch.distributed.get_rank() == 0:
        log.info("layers: %s", megatron.transformer_impl)
    megatron.finalize_model_grads_func = finalize_model_grads
    if config.overlap.grad_reduce:  # only in the last backward pass of an optimizer step
        contexts = [chunk.no_sync for chunk in model]
        megatron.no_sync_func = contexts if len(model) > 1 else contexts[0]
    schedule = build_schedule(config.optim, optimizer, optimizer_steps)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "on_nonfinite": config.train.on_nonfinite,
        "keep_in": RunDir(config.run.dir).nonfinite,
        "away": {},
    }
