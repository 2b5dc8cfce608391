"""Megarl's optimizer settings -> Megatron's optimizer and learning-rate schedule."""

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.config.schema import OptimSection


def build_optimizer(
    settings: OptimSection, dtype: torch.dtype, models: list[torch.nn.Module]
) -> Any:
    """AdamW with fp32 main parameters; fused where TE or apex is installed, torch's elsewhere."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.lr * settings.min_lr_ratio,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            weight_decay=settings.weight_decay,
            clip_grad=settings.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=settings.distributed,
        ),
        models,
    )
    # Where all of a kind (experts, the others) is frozen, upstream makes an optimizer of nothing,
    # which its saving does not expect.
    optimizer.chained_optimizers = [
        part for part in optimizer.chained_optimizers if not part.is_stub_optimizer
    ]
    return optimizer


def build_schedule(
    settings: OptimSection, optimizer: Any, total_steps: int
) -> OptimizerParamScheduler:
    """Warm-up from 0, constant, and a linear fall over the last ``decay_fraction`` of
    ``total_steps``.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.lr * settings.min_lr_ratio,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(total_steps, settings.warmup_steps + 1),
        lr_decay_style="WSD",
        wsd_decay_steps=round(settings.decay_fraction * total_steps),
        lr_wsd_decay_style="linear",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
        # a checkpoint brings the position; the shape is this run's configuration, whose steps may
        # be more now
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
