"""Layer specs by what a ModelSpec says: which attention, which feed-forward part, which norms.

Megatron builds a layer from a spec, a tree of modules. Here is the only place that chooses them;
what a module computes with is in its configuration (``arguments.py``).

Checkpoint keys are those of Transformer Engine's spec, where norms belong to the projections behind
them, so that CPU and GPU runs read each other's files.
"""

import dataclasses
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megarl.actor.attention_packed import PackedAttention, RMSNorm
from megarl.actor.experts import ExpertOutput
from megarl.actor.latent_attention import LatentAttention
from megarl.actor.router import Router
from megarl.models.spec import ModelSpec


def layer_spec(spec: ModelSpec, *, moe: bool, grouped_gemm: bool = False) -> ModuleSpec:
    """One transformer layer, with experts or without. ``grouped_gemm``: a rank's experts are one
    module of Transformer Engine.
    """
    attention, keys = _latent_attention(spec) if spec.mla else _attention(spec)
    if not moe:
        keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_experts(spec, grouped_gemm) if moe else _dense_mlp(),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )


def _attention(spec: ModelSpec) -> tuple[ModuleSpec, dict[str, str]]:
    """Grouped-query attention, and the checkpoint keys of its norms."""
    norm = RMSNorm if spec.qk_norm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )
    return attention, {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}


def _latent_attention(spec: ModelSpec) -> tuple[ModuleSpec, dict[str, str]]:
    attention = ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal, "spec": spec},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            kv_layernorm=RMSNorm,
        ),
    )
    norms = {
        f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_"
        for x in ("q", "kv")
    }
    return attention, norms


def _dense_mlp() -> Any:
    return get_mlp_module_spec_for_backend(LocalSpecProvider())


def _experts(spec: ModelSpec, grouped_gemm: bool) -> Any:
    """Routed experts, with the shared ones if the configuration has them."""
    upstream: Any = get_mlp_module_spec_for_backend(
        LocalSpecProvider(), num_experts=spec.experts, moe_grouped_gemm=False
    )
    submodules = dataclasses.replace(
        upstream.keywords["submodules"],
        router=Router,
        experts=_grouped_experts() if grouped_gemm else _experts_one_by_one(),
    )
    return partial(MoELayer, submodules=submodules)


def _experts_one_by_one() -> Any:
    one = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertOutput)
    return partial(SequentialMLP, submodules=one)


def _grouped_experts() -> Any:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider().grouped_mlp_modules(True)
