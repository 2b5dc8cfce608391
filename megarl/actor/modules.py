"""What layers are made of: Megatron's own modules, or Transformer Engine's.

A table by ``train.transformer_impl``; ``layers.py`` puts them together and knows no names. With
Transformer Engine a norm and the projection behind it are one module, which has the norm's weight
as ``layer_norm_weight``, and a rank's experts may be one module, with weights ``weight0``,
``weight1``, ... (docs/transformer-engine.md; ``models/mapping.py`` knows both spellings).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

from megarl.actor.attention_packed import PackedAttention, RMSNorm
from megarl.actor.experts import ExpertOutput
from megarl.actor.latent_attention import LatentAttention, LocalLatentAttention
from megarl.models.spec import ModelSpec


@dataclass(frozen=True)
class Modules:
    norm: Any
    column: Any  # projections that tensor parallelism splits by outputs
    row: Any  # by inputs
    whole: Any  # not at all: the down-projections of latent attention
    normed_column: Any | None  # a norm and ``column`` in one, where there is such a module
    attention: Any  # core attention over packed rows
    latent_attention: type[LatentAttention]
    experts: Callable[[bool], Any]  # (grouped or one by one) -> the experts of a rank

    @property
    def norm_and_column(self) -> tuple[Any, Any]:
        """A norm, and the projection that takes what it gives."""
        if self.normed_column is None:
            return self.norm, self.column
        return IdentityOp, self.normed_column

    @property
    def fused(self) -> bool:
        return self.normed_column is not None


def modules_for(config: Any, spec: ModelSpec) -> Modules:
    """By ``transformer_impl`` of ``config``, a TransformerConfig."""
    return _TABLE[config.transformer_impl](config, spec)


def _local(config: Any, spec: ModelSpec) -> Modules:
    return Modules(
        norm=RMSNorm,
        column=ColumnParallelLinear,
        row=RowParallelLinear,
        whole=ColumnParallelLinear,  # upstream takes no other; ``LocalLatentAttention`` replaces it
        normed_column=None,
        attention=PackedAttention,
        latent_attention=LocalLatentAttention,
        experts=_local_experts,
    )


def _transformer_engine(config: Any, spec: ModelSpec) -> Modules:
    """Where Transformer Engine's attention has no fast kernel, it stays ours: in fp32, and in
    models with sinks, which it has for packed rows only with cuDNN 9.18, and not with the exchange
    of keys and values that context parallelism uses.
    """
    te = TESpecProvider()
    ours = spec.sinks or config.params_dtype == torch.float32
    return Modules(
        norm=te.layer_norm(rms_norm=True),
        column=te.column_parallel_linear(),
        row=te.row_parallel_linear(),
        whole=te.linear(),
        normed_column=te.column_parallel_layer_norm_linear(),
        attention=PackedAttention if ours else te.core_attention(),
        latent_attention=LatentAttention,
        experts=te.grouped_mlp_modules,
    )


def _local_experts(grouped: bool) -> Any:
    """Grouped products are Transformer Engine's, also between local layers."""
    if grouped:
        return TESpecProvider().grouped_mlp_modules(True)
    one = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertOutput)
    return partial(SequentialMLP, submodules=one)


_TABLE: dict[str, Callable[[Any, ModelSpec], Modules]] = {
    "local": _local,
    "transformer_engine": _transformer_engine,
}
