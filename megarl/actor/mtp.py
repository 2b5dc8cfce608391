"""Multi-token prediction layers: kept with the model, neither computed nor trained.

RL trains the next-token policy alone, but servers draft with these layers, and a checkpoint without
them is another model. They are upstream's modules under its names on the last stage's last chunk,
split over its ranks like every layer, so loading, export and checkpoints treat them like the rest.
The model does not know of them: its forward pass is that of a model without. They are frozen, so
neither gradient buffers nor the optimizer hold anything for them. The embedding and the head that
they share with the model are the model's (``models/mapping.py``, ``copies``). Nothing of them runs,
so they are Megatron's own modules in every model.
"""

import copy
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from megarl.actor.attention_packed import RMSNorm
from megarl.actor.layers import layer_spec
from megarl.actor.modules import modules_for
from megarl.models.spec import ModelSpec


def attach_mtp(chunk: GPTModel, spec: ModelSpec) -> None:
    """Give the chunk that ends the model its ``mtp_layers``."""
    config: Any = copy.copy(chunk.config)
    config.mtp_num_layers = spec.mtp_layers
    config.transformer_impl = "local"
    modules = modules_for(config, spec)
    layer = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=RMSNorm,
            hnorm=RMSNorm,
            eh_proj=ColumnParallelLinear,
            mtp_model_layer=layer_spec(spec, modules, moe=spec.experts > 0),
            layer_norm=RMSNorm,
        ),
    )
    layers = MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * spec.mtp_layers)
    chunk.mtp = MultiTokenPredictionBlock(
        config, layers, vp_stage=chunk.vp_stage, pg_collection=chunk.pg_collection
    )
    chunk.mtp.requires_grad_(False)
