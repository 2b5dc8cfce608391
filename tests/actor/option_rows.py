"""Every setting that Megatron is built with: a value other than the default, what it needs besides,
and where the built object has it. Imports nothing of Megatron.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """``key``: set to ``value``. ``expect``: "object.attribute" -> value, dtypes by name. ``also``:
    further settings it has an effect with. ``refusal``: what Megatron says to it where Transformer
    Engine is absent, which shows as well that it was told. ``dense``: the model has no experts.
    """

    key: str
    value: Any
    expect: dict[str, Any]
    also: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, int] = field(default_factory=dict)
    refusal: str = ""
    dense: bool = False


def _schedule(name: str, **also: Any) -> dict[str, Any]:
    return {"optim.schedule.lr": name, **also}


OFFLOAD = {"optim.cpu_offload.fraction": 1.0, "optim.distributed": True}
MUON = {"optim.name": "muon", "optim.distributed": False}
DP2 = {"dp": 2}
BF16 = {"precision.dtype": "bf16", "precision.fp8.backend": "te"}
DELAYED = {**BF16, "precision.fp8.recipe": "delayed"}


def _fp8(name: str, value: Any, expect: dict[str, Any], **more: Any) -> Row:
    """Of a dense model: with experts Megatron refuses FP8 where Transformer Engine is absent."""
    return Row(f"precision.fp8.{name}", value, expect, **{"also": BF16, "dense": True, **more})


ROWS = (
    Row("precision.dtype", "bf16", {"model.params_dtype": "bfloat16", "model.bf16": True}),
    Row(
        *("precision.grad_reduce_dtype", "bf16", {"ddp.grad_reduce_in_fp32": False}),
        also={"precision.dtype": "bf16"},
    ),
    _fp8("backend", "te", {"model.fp8": "e4m3", "model.fp8_wgrad": True}),
    Row("precision.fp8.recipe", "delayed", {"model.fp8_recipe": "delayed"}, also=BF16,
        refusal="Only transformer-engine"),
    _fp8("recipe", "mxfp8", {"model.fp8_recipe": "mxfp8", "optimizer.fp8_recipe": "mxfp8"}),
    _fp8("format", "hybrid", {"model.fp8": "hybrid"}),
    _fp8("param_gather", True, {"model.fp8_param": True, "ddp.fp8_param_gather": True,
        "ddp.reuse_grad_buf_for_mxfp8_param_ag": False}),
    _fp8("param_gather", True, {"ddp.reuse_grad_buf_for_mxfp8_param_ag": True,
        "optimizer.reuse_grad_buf_for_mxfp8_param_ag": True},
        also={**BF16, "precision.fp8.recipe": "mxfp8"}),
    _fp8("first_layers_bf16", 2, {"model.first_last_layers_bf16": True,
        "model.num_layers_at_start_in_bf16": 2, "model.num_layers_at_end_in_bf16": 0}),
    _fp8("last_layers_bf16", 3, {"model.first_last_layers_bf16": True,
        "model.num_layers_at_start_in_bf16": 0, "model.num_layers_at_end_in_bf16": 3}),
    _fp8("amax_history", 7, {"model.fp8_amax_history_len": 7}, also=DELAYED),
    _fp8("amax_algo", "most_recent", {"model.fp8_amax_compute_algo": "most_recent"},
        also=DELAYED),
    _fp8("margin", 2, {"model.fp8_margin": 2}, also=DELAYED),
    Row("optim.lr", 0.5, {"optimizer.lr": 0.5, "schedule.max_lr": 0.5}),
    Row("optim.betas", [0.3, 0.4], {"optimizer.adam_beta1": 0.3, "optimizer.adam_beta2": 0.4}),
    Row("optim.eps", 1e-3, {"optimizer.adam_eps": 1e-3}),
    Row("optim.weight_decay", 0.3, {"optimizer.weight_decay": 0.3, "schedule.start_wd": 0.3}),
    Row("optim.clip_grad", 3.0, {"optimizer.clip_grad": 3.0}),
    Row("optim.warmup_steps", 3, {"schedule.lr_warmup_steps": 3}),
    Row("optim.decay_fraction", 0.5, {"schedule.wsd_decay_steps": 50}),
    Row(
        *("optim.min_lr_ratio", 0.25, {"optimizer.min_lr": 0.25e-3, "schedule.min_lr": 0.25e-3}),
        also={"optim.decay_fraction": 0.5},
    ),
    Row("optim.schedule.lr", "cosine", {"schedule.lr_decay_style": "cosine"}),
    Row("optim.schedule.lr", "inverse_square_root",
        {"schedule.lr_decay_style": "inverse-square-root"}),
    Row(
        *("optim.schedule.wsd_decay", "minus_sqrt", {"schedule.lr_wsd_decay_style": "minus_sqrt"}),
        also={"optim.decay_fraction": 0.5},
    ),
    Row(
        *("optim.schedule.weight_decay", "cosine", {"schedule.wd_incr_style": "cosine"}),
        also={"optim.schedule.end_weight_decay": 0.7},
    ),
    Row(
        *("optim.schedule.end_weight_decay", 0.7, {"schedule.end_wd": 0.7}),
        also={"optim.schedule.weight_decay": "linear"},
    ),
    Row(
        *("optim.distributed", True),
        {"optimizer.use_distributed_optimizer": True, "ddp.use_distributed_optimizer": True},
    ),
    Row("optim.name", "muon", {"optimizer.optimizer": "muon"}, also=MUON),
    Row("optim.muon.momentum", 0.5, {"optimizer.muon_momentum": 0.5}, also=MUON),
    Row("optim.muon.nesterov", True, {"optimizer.muon_nesterov": True}, also=MUON),
    Row("optim.muon.num_ns_steps", 7, {"optimizer.muon_num_ns_steps": 7}, also=MUON),
    Row("optim.muon.scale_mode", "unit_rms_norm",
        {"optimizer.muon_scale_mode": "unit_rms_norm"}, also=MUON),
    Row("optim.muon.extra_scale_factor", 0.2,
        {"optimizer.muon_extra_scale_factor": 0.2}, also=MUON),
    Row("optim.muon.tp_mode", "distributed", {"optimizer.muon_tp_mode": "distributed"}, also=MUON),
    Row(
        *("optim.precision_aware.main_params_dtype", "fp16"),
        {"optimizer.main_params_dtype": "float16", "optimizer.use_precision_aware_optimizer": True},
        also=OFFLOAD,
    ),
    Row("optim.precision_aware.exp_avg_dtype", "bf16",
        {"optimizer.exp_avg_dtype": "bfloat16"}, also=OFFLOAD),
    Row("optim.precision_aware.exp_avg_sq_dtype", "fp8",
        {"optimizer.exp_avg_sq_dtype": "uint8"}, also=OFFLOAD),
    Row(
        *("optim.cpu_offload.fraction", 0.5),
        {"optimizer.optimizer_offload_fraction": 0.5, "optimizer.optimizer_cpu_offload": True},
        also=OFFLOAD,
    ),
    Row("optim.cpu_offload.overlap", False,
        {"optimizer.overlap_cpu_optimizer_d2h_h2d": False}, also=OFFLOAD),
    Row("recompute.granularity", "full",
        {"model.recompute_granularity": "full", "model.recompute_method": "uniform"}),
    Row(
        *("recompute.modules", ["moe", "layernorm"]),
        {"model.recompute_modules": ["moe", "layernorm"]},
        also={"recompute.granularity": "selective"},
    ),
    Row("recompute.method", "block", {"model.recompute_method": "block"},
        also={"recompute.granularity": "full"}),
    Row("recompute.num_layers", 2, {"model.recompute_num_layers": 2},
        also={"recompute.granularity": "full"}),
    Row("overlap.grad_reduce", True, {"ddp.overlap_grad_reduce": True}, layout=DP2),
    Row(
        *("overlap.param_gather", True),
        {"ddp.overlap_param_gather": True, "optimizer.overlap_param_gather": True},
        also={"overlap.grad_reduce": True, "optim.distributed": True},
        layout=DP2,
    ),
    Row("overlap.moe_shared_expert", True, {"model.moe_shared_expert_overlap": True}),
    Row("moe.token_dispatcher", "allgather", {"model.moe_token_dispatcher_type": "allgather"}),
    Row("moe.flex_backend", "hybridep", {"model.moe_flex_dispatcher_backend": "hybridep"},
        also={"moe.token_dispatcher": "flex"}),
    Row("moe.permute_fusion", True, {"model.moe_permute_fusion": True},
        refusal="fused permutation is not available"),
    Row("moe.router_fusion", True, {"model.moe_router_fusion": True}),
    Row("moe.grouped_gemm", True, {"model.moe_grouped_gemm": True}),
    Row("moe.router_dtype", "fp64", {"model.moe_router_dtype": "fp64"}),
    Row(
        *("moe.aux_loss_coeff", 0.125),
        {"model.moe_aux_loss_coeff": 0.125, "model.moe_router_load_balancing_type": "aux_loss"},
    ),
    Row("moe.z_loss_coeff", 0.01, {"model.moe_z_loss_coeff": 0.01}),
    Row("moe.router_bias_update_rate", 0.01, {"model.moe_router_bias_update_rate": 0.01}),
    Row("train.gradient_accumulation_fusion", "always",
        {"model.gradient_accumulation_fusion": True}),
)  # fmt: skip


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        at = out
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return out
