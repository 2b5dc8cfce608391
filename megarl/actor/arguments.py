"""Neutral dimensions and layout -> Megatron's TransformerConfig, field by field."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.mesh import Mesh
from megarl.models.parts import Mla, Yarn
from megarl.models.spec import ModelSpec


def transformer_config(
    spec: ModelSpec, mesh: Mesh, dtype: torch.dtype, options: Mapping[str, Any]
) -> TransformerConfig:
    """Every field that decides what is computed is set in this file, from ``spec`` or for a reason
    given here, or is one of the settings that ``options`` holds (``options.py``).
    """
    fields = {
        **_architecture(spec),
        **_experts(spec),
        **_layout(mesh),
        **_precision(dtype),
        **options,
    }
    config: Any
    if spec.mla:
        config = MLATransformerConfig(**fields, **_latent_attention(spec.mla, spec.yarn))
    else:
        config = TransformerConfig(**fields)
        if spec.yarn:  # attention looks these up, though they are no fields
            config.yarn_rotary_scaling_factor = spec.yarn.factor
            config.yarn_mscale = spec.yarn.mscale
            config.yarn_mscale_all_dim = spec.yarn.mscale_all_dim
    config.renormalise_gates = spec.norm_topk_prob  # for ``router.py``
    return config


def _architecture(spec: ModelSpec) -> dict[str, Any]:
    assert spec.mlp_bias == spec.router_bias, "upstream has one switch for them"
    return {
        "num_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_query_groups": spec.kv_heads,
        "kv_channels": spec.head_dim,
        "ffn_hidden_size": spec.ffn,
        "layernorm_epsilon": spec.norm_eps,
        "qk_layernorm": spec.qk_norm or spec.mla is not None,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        **_activation(spec),
        "add_bias_linear": spec.mlp_bias,  # of the router, too
        "add_qkv_bias": spec.qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "softmax_type": "learnable" if spec.sinks else "vanilla",
        **_windows(spec),
    }


def _activation(spec: ModelSpec) -> dict[str, Any]:
    """Of the gate: SwiGLU's, or the clamped one, which has ``up + 1`` for ``up``."""
    assert spec.glu_alpha in (0.0, 1.702), spec.glu_alpha
    if not spec.glu_alpha:
        return {"activation_func": F.silu}
    return {
        "activation_func": quick_gelu,  # x * sigmoid(1.702 x)
        "activation_func_clamp_value": spec.glu_limit,
        "glu_linear_offset": 1.0,
    }


def _windows(spec: ModelSpec) -> dict[str, Any]:
    """Megarl counts the keys that a query sees, upstream those before it."""
    widths = {width for width in spec.windows if width}
    if not widths:
        return {}
    (width,) = widths
    return {
        "window_size": (width - 1, 0),
        "window_attn_skip_freq": [int(w > 0) for w in spec.windows],  # 1: within the window
    }


def _latent_attention(mla: Mla, yarn: Yarn | None) -> dict[str, Any]:
    """Angles are ``rotary.py``'s; of YaRN's fields only those that scale the scores count."""
    return {
        "q_lora_rank": mla.q_rank or None,
        "kv_lora_rank": mla.kv_rank,
        "qk_head_dim": mla.nope_dim,
        "qk_pos_emb_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        "rope_type": "yarn" if yarn else "rope",
        "rotary_scaling_factor": yarn.factor if yarn else 1.0,
        "mscale_all_dim": yarn.mscale_all_dim if yarn else 0.0,
    }


def _experts(spec: ModelSpec) -> dict[str, Any]:
    grouped = spec.router_topk_groups < spec.router_groups
    return {
        "num_moe_experts": spec.experts or None,
        "moe_ffn_hidden_size": spec.moe_ffn or None,
        "moe_layer_freq": [int(moe) for moe in spec.moe_layers],
        "moe_router_topk": spec.topk or 2,
        "moe_router_score_function": spec.router_score,
        # softmax over the chosen = renormalised
        "moe_router_pre_softmax": spec.router_score == "softmax" and not spec.norm_topk_prob,
        "moe_router_topk_scaling_factor": spec.routed_scale if spec.routed_scale != 1 else None,
        "moe_router_num_groups": spec.router_groups if grouped else None,
        "moe_router_group_topk": spec.router_topk_groups if grouped else None,
        "moe_router_enable_expert_bias": spec.expert_bias,
        "moe_shared_expert_intermediate_size": spec.shared_ffn or None,
        "moe_shared_expert_gate": spec.shared_gate,
    }


def _layout(mesh: Mesh) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "virtual_pipeline_model_parallel_size": virtual_stages(mesh),
        "num_layers_in_first_pipeline_stage": mesh.first_layers,
        "num_layers_in_last_pipeline_stage": mesh.last_layers,
        "context_parallel_size": mesh.cp,
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
        "sequence_parallel": mesh.sequence_parallel,
        # Interleaved, a stage exchanges activations and gradients with both neighbours at once.
        # With pp = 2 these are one rank, and a batch of sends and receives, which pair up by their
        # order alone, would take the ones for the others without an error.
        "overlap_p2p_comm": mesh.vpp > 1,
        "batch_p2p_comm": mesh.vpp == 1,
    }


def _precision(dtype: torch.dtype) -> dict[str, Any]:
    """And the kernels."""
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "calculate_per_token_loss": False,  # step.py derives the loss scale for this setting
        "perform_initialization": False,  # weights always come from a checkpoint
    }


def virtual_stages(mesh: Mesh) -> int | None:
    """``mesh.vpp`` as Megatron wants it: a number, even 1, asks for the interleaved schedule."""
    return mesh.vpp if mesh.vpp > 1 else None
