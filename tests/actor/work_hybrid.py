"""A HybridModel beside the GPTModel that it would take the place of, with the same weights."""

import re
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megarl.actor.arguments import transformer_config, virtual_stages
from megarl.actor.attention_packed import RMSNorm
from megarl.actor.layers import layer_spec
from megarl.actor.load import load_hf_weights
from megarl.actor.model import build_model, padded_vocab
from megarl.actor.modules import modules_for
from megarl.actor.options import plain_options
from megarl.actor.rotary import PackedRotaryEmbedding
from megarl.actor.setup import Parallel, init_parallel
from megarl.actor.state import _metadata
from megarl.actor.step import on_logprobs, run_schedule
from megarl.experience import make_plan
from megarl.models.hf_io import open_checkpoint
from megarl.models.spec import ModelSpec, read_spec
from tests.actor.compare import mesh_of
from tests.actor.work import config_for
from tests.helpers.samples import random_samples


class LocalStack(HybridStack):
    """Upstream's stack with our final norm, where upstream has Transformer Engine's built in."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **{**kwargs, "post_layer_norm": False})
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)


def compare(rank: int, hf: Path, layout: dict[str, int]) -> dict[str, Any]:
    """Log-probs and gradients of both models by the same rows, and how they call their parts."""
    spec = read_spec(hf)
    parallel = init_parallel(mesh_of(layout), seed=1, timeout_s=60)
    try:
        gpt: list[Any] = build_model(spec, parallel, torch.float32)
        load_hf_weights(gpt, open_checkpoint(hf), spec, parallel)
        hybrid = build_hybrid(spec, parallel, LocalStack)
        with torch.no_grad():
            for ours, theirs in zip(hybrid, gpt, strict=True):
                given = theirs.state_dict()
                for name, tensor in ours.state_dict(keep_vars=True).items():
                    value = given.pop(as_gpt(name))
                    if value is not None:  # modules' extra state
                        tensor.copy_(value)
                assert not given
        return {
            "gpt": evaluate(gpt, spec, parallel),
            "hybrid": evaluate(hybrid, spec, parallel),
            "names": [name for chunk in hybrid for name, _ in chunk.named_parameters()],
        }
    finally:
        parallel_state.destroy_model_parallel()


def without_a_norm_of_its_own(rank: int, hf: Path) -> None:
    parallel = init_parallel(mesh_of({}), seed=1, timeout_s=60)
    try:
        build_hybrid(read_spec(hf), parallel, HybridStack)
    finally:
        parallel_state.destroy_model_parallel()


def build_hybrid(spec: ModelSpec, parallel: Parallel, stack: type[HybridStack]) -> list[Any]:
    """One model a chunk, as ``build_model`` has them; weights uninitialised."""
    mesh = parallel.mesh
    config = transformer_config(spec, mesh, torch.float32, plain_options())
    config.num_layers = 2 * spec.layers  # attention and feed-forward parts count as layers
    config.moe_layer_freq = [int(m) for moe in spec.moe_layers for m in (False, moe)]
    if spec.windows:
        config.window_attn_skip_freq = [int(w > 0) for w in spec.windows for _ in range(2)]
    return [
        _build_chunk(config, spec, stack, k if virtual_stages(mesh) else None, mesh.pp * mesh.vpp)
        for k in range(mesh.vpp)
    ]


def _build_chunk(
    config: Any, spec: ModelSpec, stack: type[HybridStack], k: int | None, parts: int
) -> HybridModel:
    chunk = {"ignore_virtual": False, "vp_stage": k or 0}
    model = HybridModel(
        config,
        ModuleSpec(stack, submodules=_submodules(config, spec)),
        vocab_size=padded_vocab(spec),
        max_sequence_length=spec.max_positions,
        hybrid_layer_pattern=layer_pattern(spec, parts),
        pre_process=parallel_state.is_pipeline_first_stage(**chunk),
        post_process=parallel_state.is_pipeline_last_stage(**chunk),
        share_embeddings_and_output_weights=spec.tie_embeddings,
        position_embedding_type="rope",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        vp_stage=k,
    )
    if not spec.mla:
        model.rotary_pos_emb = PackedRotaryEmbedding(spec)
    if config.sequence_parallel and model.pre_process:
        model.register_forward_pre_hook(_cut_mask, with_kwargs=True)
    return model


def _cut_mask(model: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Routers see a rank's tokens alone. GPTModel cuts the mask for them, HybridModel does not."""
    rank, size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    mask = given["padding_mask"]
    return args, {**given, "padding_mask": mask if mask is None else mask.chunk(size, 1)[rank]}


def _submodules(config: Any, spec: ModelSpec) -> HybridStackSubmodules:
    """Halves of our layers."""
    modules = modules_for(config, spec)
    moe, dense = (
        layer_spec(spec, modules, moe=moe).submodules for moe in (bool(spec.experts), False)
    )
    attention = ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=dense.self_attention,
            self_attn_bda=get_bias_dropout_add,
        ),
    )

    def feed_forward(mlp: Any) -> TransformerLayerSubmodules:
        return TransformerLayerSubmodules(
            pre_mlp_layernorm=RMSNorm, mlp=mlp, mlp_bda=get_bias_dropout_add
        )

    return HybridStackSubmodules(
        attention_layer=attention,
        mla_layer=attention,
        mlp_layer=ModuleSpec(MLPLayer, submodules=feed_forward(dense.mlp)),
        moe_layer=ModuleSpec(MoETransformerLayer, submodules=feed_forward(moe.mlp)),
    )


def layer_pattern(spec: ModelSpec, parts: int) -> str:
    """``*`` or ``+`` (latent) attention, then ``E`` experts or ``-``; ``|`` between the stages."""
    attention = "+" if spec.mla else "*"
    layers = [attention + ("E" if moe else "-") for moe in spec.moe_layers]
    size = len(layers) // parts
    return "|".join("".join(layers[i * size : (i + 1) * size]) for i in range(parts))


def as_gpt(name: str) -> str:
    """The name in a GPTModel: layers 2L and 2L + 1 are its layer L."""
    name = re.sub(r"(?<=layers\.)\d+", lambda m: str(int(m[0]) // 2), name)
    return name.replace("final_norm", "final_layernorm")


def evaluate(model: list[Any], spec: ModelSpec, parallel: Parallel) -> dict[str, Any]:
    """Log-probs of every row, the gradients of a weighted sum of them by GPTModel's names, and the
    keys of a checkpoint.
    """
    config = config_for(Path("unused"), algo={"minibatches": 1})
    plan = make_plan(random_samples(4, 4, seed=3), config, parallel.mesh, parallel.at.dp)

    def finish(row: Any, index: Any, logprobs: torch.Tensor, entropy: Any) -> Any:
        weights = torch.linspace(0.5, 1.5, len(logprobs))
        return (logprobs * weights).sum(), logprobs.detach().clone()

    found = run_schedule(
        model,
        plan.steps[0],
        parallel,
        forward_only=False,
        finish=on_logprobs(finish, parallel, temperature=1.0, vocab_size=spec.vocab),
    )
    doubled = isinstance(model[0], HybridModel)
    gradients = {
        (k, as_gpt(name) if doubled else name): parameter.grad
        for k, chunk in enumerate(model)
        for name, parameter in chunk.named_parameters()
    }
    return {
        "logprobs": found,
        "gradients": gradients,
        "keys": checkpoint_keys(model, parallel),
    }


def checkpoint_keys(model: list[Any], parallel: Parallel) -> list[str]:
    states = [chunk.sharded_state_dict(metadata=_metadata(parallel)) for chunk in model]
    keys = {getattr(value, "key", name) for state in states for name, value in state.items()}
    return sorted(key for key in keys if not key.endswith("_extra_state"))
