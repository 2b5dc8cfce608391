"""Global names of local parameters: what this rank calls layer 0 or expert 0 may be the model's
layer 24, expert 64.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.actor.setup import Parallel

_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_BUFFERS = (".router.expert_bias",)
_EXPERT = re.compile(
    r"(?<=local_experts\.)\d+"
    r"|(?<=experts\.linear_fc[12]\.weight)\d+$|(?<=experts\.linear_fc[12]\.bias)\d+$"
)


def global_parameters(
    model: Sequence[torch.nn.Module], parallel: Parallel
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name as in a model on one rank, local parameter) of every chunk, in a fixed order; chunks
    may be wrapped.
    """
    for chunk in map(unwrap, model):
        rename = _renaming(chunk, parallel)
        for name, parameter in chunk.named_parameters():
            yield rename(name), parameter


def global_weights(
    model: Sequence[torch.nn.Module], parallel: Parallel
) -> Iterator[tuple[str, torch.Tensor]]:
    """``global_parameters``, and the buffers that are weights: the routers' expert biases."""
    yield from global_parameters(model, parallel)
    for chunk in map(unwrap, model):
        rename = _renaming(chunk, parallel)
        for name, buffer in chunk.named_buffers():
            if name.endswith(_BUFFERS):
                yield rename(name), buffer


def global_modules(
    model: Sequence[torch.nn.Module], parallel: Parallel
) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name as in a model on one rank, module) of every chunk."""
    for chunk in map(unwrap, model):
        rename = _renaming(chunk, parallel)
        for name, module in chunk.named_modules():
            yield rename(name), module


def _renaming(chunk: Any, parallel: Parallel) -> Callable[[str], str]:
    """Names in the chunk -> names in a model on one rank."""
    config: Any = chunk.config
    first = get_transformer_layer_offset(config, chunk.vp_stage, parallel.at.pp)
    expert_offset = parallel.at.ep * ((config.num_moe_experts or 0) // parallel.mesh.ep)
    return lambda name: shift_expert(_shift_layer(name, first), expert_offset)


def _shift_layer(name: str, offset: int) -> str:
    return _LAYER.sub(lambda m: str(int(m[0]) + offset), name)


def shift_expert(name: str, offset: int) -> str:
    """The name of the expert ``offset`` further on; names without an expert stay."""
    return _EXPERT.sub(lambda m: str(int(m[0]) + offset), name)


def unwrap(model: Any) -> Any:
    """The GPTModel inside DDP and Float16Module."""
    while hasattr(model, "module"):
        model = model.module
    return model
