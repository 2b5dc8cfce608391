"""Neutral dimensions and layout -> Megatron's TransformerConfig, field by field."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.mesh import Mesh
from megarl.models.spec import ModelSpec


def transformer_config(
    spec: ModelSpec, mesh: Mesh, dtype: torch.dtype, options: Mapping[str, Any]
) -> TransformerConfig:
    """Every field that decides what is computed is set here, from ``spec`` or for a reason given
    here, or is one of the settings that ``options`` holds (``options.py``).
    """
    return TransformerConfig(
        # architecture
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn,
        layernorm_epsilon=spec.norm_eps,
        qk_layernorm=spec.qk_norm,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # experts
        num_moe_experts=spec.experts or None,
        moe_ffn_hidden_size=spec.moe_ffn or None,
        moe_layer_freq=[int(moe) for moe in spec.moe_layers],
        moe_router_topk=spec.topk or 2,
        moe_router_pre_softmax=not spec.norm_topk_prob,  # softmax over the chosen = renormalised
        # layout
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        virtual_pipeline_model_parallel_size=virtual_stages(mesh),
        context_parallel_size=mesh.cp,
        expert_model_parallel_size=mesh.ep,
        expert_tensor_parallel_size=mesh.etp,
        sequence_parallel=mesh.sequence_parallel,
        # Interleaved, a stage exchanges activations and gradients with both neighbours at once.
        # With pp = 2 these are one rank, and a batch of sends and receives, which pair up by their
        # order alone, would take the ones for the others without an error.
        overlap_p2p_comm=mesh.vpp > 1,
        batch_p2p_comm=mesh.vpp == 1,
        # precision and kernels
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        transformer_impl="local",
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        calculate_per_token_loss=False,  # step.py derives the loss scale for this setting
        use_cpu_initialization=True,
        perform_initialization=False,  # weights always come from a checkpoint
        **options,
    )


def virtual_stages(mesh: Mesh) -> int | None:
    """``mesh.vpp`` as Megatron wants it: a number, even 1, asks for the interleaved schedule."""
    return mesh.vpp if mesh.vpp > 1 else None
