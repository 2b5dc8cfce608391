"""Settings -> the keyword arguments of what Megatron builds: a row a setting, nothing else decides.

``transformer_options`` goes into TransformerConfig beside what the model and the layout say
(``arguments.py``), ``ddp_options`` into DistributedDataParallelConfig (``model.py``),
``optimizer_options`` into OptimizerConfig and ``schedule_options`` into OptimizerParamScheduler
(``optimizer.py``).
"""

from typing import Any

import torch

from megarl.actor.fp8 import fp8_ddp_options, fp8_optimizer_options, fp8_options
from megarl.config.megatron import MoeSection, MuonSection, OverlapSection, RecomputeSection
from megarl.config.schema import Config, OptimSection, TrainSection
from megarl.config.training import FP8_LAYERS
from megarl.errors import ConfigError, Problem
from megarl.installed import TE_NEEDED, installed
from megarl.models.spec import ModelSpec

_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,  # what TE's FusedAdam calls its scaled bytes
}
_LR_STYLES = {"wsd": "WSD", "inverse_square_root": "inverse-square-root"}


def transformer_options(config: Config, spec: ModelSpec) -> dict[str, Any]:
    """Raises ConfigError for what only the built model can tell to be without effect."""
    rate = "router_bias_update_rate"
    if rate in config.moe.model_fields_set and not spec.expert_bias:
        found = f"{config.moe.router_bias_update_rate:g}, which has no effect"
        reason = f"leave it out: the router of {spec.family} has no bias per expert"
        raise ConfigError([Problem(f"moe.{rate}", found, reason)])
    return {
        **_implementation(transformer_impl(config)),
        **_recompute(config.recompute),
        **_overlap(config.overlap),
        **_experts(config.moe),
        **fp8_options(config.precision.fp8),
        "gradient_accumulation_fusion": fuses_gradients(config.train),
    }


def plain_options() -> dict[str, Any]:
    """Of a model that is built to be converted."""
    return {
        **_implementation("local"),
        **_recompute(RecomputeSection()),
        **_overlap(OverlapSection()),
        **_experts(MoeSection()),
    }


def _implementation(name: str) -> dict[str, Any]:
    """Transformer Engine's modules are made on the device that they compute on: what it makes on
    the CPU first it fills by way of the whole matrix, also where nothing is to be filled in.
    """
    return {"transformer_impl": name, "use_cpu_initialization": name == "local"}


def transformer_impl(config: Config) -> str:
    """What layers are made of: ``train.transformer_impl``, decided."""
    if config.train.transformer_impl != "auto":
        return config.train.transformer_impl
    fp8 = config.precision.fp8
    usable = torch.cuda.is_available() and installed().transformer_engine >= TE_NEEDED
    return FP8_LAYERS["te" if fp8 is None else fp8.backend] if usable else "local"


def _recompute(section: RecomputeSection) -> dict[str, Any]:
    if section.granularity == "none":
        return {"recompute_granularity": None}
    if section.granularity == "selective":
        modules = list(section.modules)
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {
        "recompute_granularity": "full",
        "recompute_method": section.method,
        "recompute_num_layers": section.num_layers,
    }


def _overlap(section: OverlapSection) -> dict[str, Any]:
    return {
        "moe_shared_expert_overlap": section.moe_shared_expert,
    }


def _experts(section: MoeSection) -> dict[str, Any]:
    balanced = section.aux_loss_coeff > 0
    return {
        "moe_token_dispatcher_type": section.token_dispatcher,
        "moe_flex_dispatcher_backend": section.flex_backend,
        "moe_permute_fusion": section.permute_fusion,
        "moe_router_fusion": section.router_fusion,
        "moe_grouped_gemm": section.grouped_gemm,
        "moe_router_dtype": section.router_dtype,
        "moe_router_load_balancing_type": "aux_loss" if balanced else "none",
        "moe_aux_loss_coeff": section.aux_loss_coeff,
        "moe_z_loss_coeff": section.z_loss_coeff or None,
        "moe_router_bias_update_rate": section.router_bias_update_rate,
    }


def fuses_gradients(section: TrainSection) -> bool:
    if section.gradient_accumulation_fusion != "auto":
        return section.gradient_accumulation_fusion == "always"
    return torch.cuda.is_available() and installed().fused_wgrad


def ddp_options(config: Config) -> dict[str, Any]:
    return {
        "grad_reduce_in_fp32": config.precision.grad_reduce_dtype == "fp32",
        "use_distributed_optimizer": config.optim.distributed,
        "overlap_grad_reduce": config.overlap.grad_reduce,
        "overlap_param_gather": config.overlap.param_gather,
        **fp8_ddp_options(config.precision.fp8),
    }


def optimizer_options(config: Config, dtype: torch.dtype) -> dict[str, Any]:
    optim = config.optim
    options: dict[str, Any] = {
        "optimizer": optim.name,
        "lr": optim.lr,
        "min_lr": optim.lr * optim.min_lr_ratio,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_eps": optim.eps,
        "weight_decay": optim.weight_decay,
        "clip_grad": optim.clip_grad,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": optim.distributed,
        "overlap_param_gather": config.overlap.param_gather,
        **fp8_optimizer_options(config.precision.fp8),
    }
    if optim.name == "muon":
        options |= _muon(optim.muon)
    if optim.precision_aware is not None or optim.cpu_offload is not None:
        options |= _state(config)
    return options


def _muon(section: MuonSection) -> dict[str, Any]:
    return {
        "muon_momentum": section.momentum,
        "muon_nesterov": section.nesterov,
        "muon_num_ns_steps": section.num_ns_steps,
        "muon_scale_mode": section.scale_mode,
        "muon_extra_scale_factor": section.extra_scale_factor,
        "muon_tp_mode": section.tp_mode,
    }


def _state(config: Config) -> dict[str, Any]:
    """Upstream's offloading lives in the path of the precision-aware optimizer."""
    aware, offload = config.optim.precision_aware, config.optim.cpu_offload
    options: dict[str, Any] = {
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": _DTYPES[config.precision.grad_reduce_dtype],
    }
    if aware is not None:
        options |= {
            "main_params_dtype": _DTYPES[aware.main_params_dtype],
            "exp_avg_dtype": _DTYPES[aware.exp_avg_dtype],
            "exp_avg_sq_dtype": _DTYPES[aware.exp_avg_sq_dtype],
        }
    if offload is not None:
        options |= {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": offload.fraction,
            "overlap_cpu_optimizer_d2h_h2d": offload.overlap,
        }
    return options


def schedule_options(optim: OptimSection, total_steps: int) -> dict[str, Any]:
    """Of ``total_steps`` optimizer steps. Upstream's equations: config/megatron.py."""
    schedule = optim.schedule
    falls = optim.decay_fraction if schedule.lr == "wsd" else 0.0
    start = optim.weight_decay
    constant = schedule.weight_decay == "constant" or schedule.end_weight_decay is None
    return {
        "init_lr": 0.0,
        "max_lr": optim.lr,
        "min_lr": optim.lr * optim.min_lr_ratio,
        "lr_warmup_steps": optim.warmup_steps,
        "lr_decay_steps": max(total_steps, optim.warmup_steps + 1),
        "lr_decay_style": _LR_STYLES.get(schedule.lr, schedule.lr),
        "wsd_decay_steps": round(falls * total_steps),
        "lr_wsd_decay_style": schedule.wsd_decay,
        "start_wd": start,
        "end_wd": start if constant else schedule.end_weight_decay,
        "wd_incr_steps": total_steps,
        "wd_incr_style": schedule.weight_decay,
    }
