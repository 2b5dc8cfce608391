"""ModelSpec + layout -> Megatron's GPTModels on this rank, one for each chunk of its stage."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.actor.arguments import transformer_config
from megarl.actor.layers import layer_spec
from megarl.actor.modules import modules_for
from megarl.actor.mtp import attach_mtp
from megarl.actor.options import plain_options
from megarl.actor.rotary import PackedRotaryEmbedding
from megarl.actor.setup import Parallel
from megarl.config.schema import PrecisionSection
from megarl.models.mapping import VOCAB_MULTIPLE, padded_vocab_size
from megarl.models.spec import ModelSpec


def padded_vocab(spec: ModelSpec) -> int:
    """Rows of Megarl's embedding; those beyond ``spec.vocab`` are never part of a softmax
    (``ops/logprob_entropy.py``).
    """
    return padded_vocab_size(spec.vocab, VOCAB_MULTIPLE)


def dtype_of(settings: PrecisionSection) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[settings.dtype]


def build_model(
    spec: ModelSpec,
    parallel: Parallel,
    dtype: torch.dtype,
    options: Mapping[str, Any] | None = None,
) -> list[GPTModel]:
    """This rank's part of the model, chunk by chunk, weights uninitialised. The chunks share one
    configuration. ``options``: of ``transformer_options``; None: of a model that is not trained.
    """
    options = plain_options() if options is None else options
    config = transformer_config(spec, parallel.mesh, dtype, options)
    return [_build_chunk(config, spec, parallel, k) for k in range(parallel.mesh.vpp)]


def _build_chunk(config: Any, spec: ModelSpec, parallel: Parallel, k: int) -> GPTModel:
    first = get_transformer_layer_offset(config, vp_stage=k, pp_rank=parallel.at.pp)
    modules = modules_for(config, spec)
    mine = spec.moe_layers[first : first + get_num_layers_to_build(config, vp_stage=k)]
    model = GPTModel(
        config,
        TransformerBlockSubmodules(
            layer_specs=[
                layer_spec(spec, modules, moe=moe, grouped_gemm=config.moe_grouped_gemm)
                for moe in mine
            ],
            layer_norm=modules.norm,
        ),
        vocab_size=padded_vocab(spec),
        max_sequence_length=spec.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=k),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=k),
        share_embeddings_and_output_weights=spec.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,
        vp_stage=k,
    )
    if not spec.mla:  # whose attention has its own
        model.rotary_pos_emb = PackedRotaryEmbedding(spec)
    if spec.mtp_layers and model.post_process:
        attach_mtp(model, spec)
    if model.pre_process and config.recompute_granularity is not None:
        model.embedding.register_forward_hook(_require_gradient)
    return model.to(parallel.device)


def _require_gradient(
    module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor
) -> torch.Tensor:
    """Upstream computes again only what has an input with a gradient: behind frozen embeddings
    (``train.frozen``) nothing would be trained, without a word.
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()
    return output


def wrap_ddp(
    model: list[GPTModel], dtype: torch.dtype, options: Mapping[str, Any]
) -> list[DistributedDataParallel]:
    """Every chunk with gradient buffers, averaged over dp * cp (``step.py`` scales the loss to
    match). ``options``: of ``ddp_options``.
    """
    settings = DistributedDataParallelConfig(
        check_for_nan_in_grad=False,  # the optimizer step refuses a non-finite norm and names it
        **options,
    )
    wrapped: list[Any] = [
        Float16Module(chunk.config, chunk) if dtype == torch.bfloat16 else chunk for chunk in model
    ]
    return [DistributedDataParallel(chunk.config, settings, chunk) for chunk in wrapped]
