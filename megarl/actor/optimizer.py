"""Megatron's optimizer and the schedules of learning rate and weight decay."""

import logging
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.actor.options import optimizer_options, schedule_options
from megarl.config.schema import Config, OptimSection

log = logging.getLogger(__name__)


def build_optimizer(config: Config, dtype: torch.dtype, models: list[torch.nn.Module]) -> Any:
    """With fp32 main parameters unless the configuration says otherwise. Rank 0 logs what updates
    them.
    """
    settings = OptimizerConfig(**optimizer_options(config, dtype))
    optimizer = get_megatron_optimizer(settings, models)
    # Where all of a kind (experts, the others) is frozen, upstream makes an optimizer of nothing,
    # which its saving does not expect.
    optimizer.chained_optimizers = [
        part for part in optimizer.chained_optimizers if not part.is_stub_optimizer
    ]
    if torch.distributed.get_rank() == 0:
        log.info("optimizer: %s", ", ".join(implementations(optimizer)))
    return optimizer


def implementations(optimizer: Any) -> list[str]:
    """The classes that update parameters, such as ``torch.optim.adamw.AdamW``."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    kinds = (type(part.optimizer) for part in parts if part.optimizer is not None)
    return list(dict.fromkeys(f"{kind.__module__}.{kind.__name__}" for kind in kinds))


def build_schedule(
    optim: OptimSection, optimizer: Any, total_steps: int
) -> OptimizerParamScheduler:
    """Learning rate and weight decay by optimizer step, of ``total_steps``."""
    return OptimizerParamScheduler(
        optimizer,
        **schedule_options(optim, total_steps),
        # a checkpoint brings the position; the shape is this run's configuration, whose steps may
        # be more now
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
