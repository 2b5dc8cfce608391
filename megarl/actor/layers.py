"""Layer specs by what a ModelSpec says: which attention, which feed-forward part, which norms.

Megatron builds a layer from a spec, a tree of modules. Here is the only place that puts one
together; which modules are at hand is in ``modules.py``, what a module computes with is in its
configuration (``arguments.py``).

Checkpoint keys are those of Transformer Engine's spec, where norms belong to the projections behind
them (``models/sharded.py``), so that models of either kind, on CPU and on GPU, read each other's
files.
"""

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megarl.actor.modules import Modules
from megarl.actor.router import Router
from megarl.models.sharded import norm_keys
from megarl.models.spec import ModelSpec


def layer_spec(
    spec: ModelSpec, modules: Modules, *, moe: bool, grouped_gemm: bool = False
) -> ModuleSpec:
    """One transformer layer, with experts or without. ``grouped_gemm``: a rank's experts are one
    module of Transformer Engine.
    """
    # Latent attention takes what the norm gives twice, a MoE layer three times.
    norm, qkv = (modules.norm, None) if spec.mla else modules.norm_and_column
    mlp_norm, fc1 = (modules.norm, None) if moe else modules.norm_and_column
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=_latent_attention(spec, modules)
            if spec.mla
            else _attention(spec, modules, qkv),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=mlp_norm,
            mlp=_experts(modules, grouped_gemm) if moe else _dense_mlp(modules, fc1),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={} if modules.fused else norm_keys(spec, moe=moe),
        ),
    )


def _attention(spec: ModelSpec, modules: Modules, qkv: Any) -> ModuleSpec:
    """Grouped-query attention."""
    norm = modules.norm if spec.qk_norm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=qkv,
            core_attention=modules.attention,
            linear_proj=partial(_biased, spec.out_bias, modules.row),
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _biased(wanted: bool, linear: Any, /, *sizes: int, bias: bool, **arguments: Any) -> Any:
    """``linear`` with a bias or without, whatever ``bias``, upstream's switch for all of them."""
    return linear(*sizes, bias=wanted, **arguments)


def _latent_attention(spec: ModelSpec, modules: Modules) -> ModuleSpec:
    norm, up_proj = modules.norm_and_column
    return ModuleSpec(
        module=modules.latent_attention,
        params={"attn_mask_type": AttnMaskType.causal, "spec": spec},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=modules.column,
            linear_q_down_proj=modules.whole,
            linear_q_up_proj=up_proj,
            linear_kv_down_proj=modules.whole,
            linear_kv_up_proj=up_proj,
            core_attention=modules.attention,
            linear_proj=modules.row,
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )


def _dense_mlp(modules: Modules, fc1: Any) -> Any:
    submodules = MLPSubmodules(linear_fc1=fc1, linear_fc2=modules.row)
    return partial(MLP.as_mlp_submodule, submodules=submodules)


def _experts(modules: Modules, grouped_gemm: bool) -> Any:
    """Routed experts, with the shared ones if the configuration has them."""
    one = MLPSubmodules(linear_fc1=modules.column, linear_fc2=modules.row)
    submodules = MoESubmodules(
        router=Router,
        experts=modules.experts(grouped_gemm),
        shared_experts=partial(SharedExpertMLP, submodules=one),
    )
    return partial(MoELayer, submodules=submodules)
