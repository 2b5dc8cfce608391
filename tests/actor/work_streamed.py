"""What workers do in ``test_streamed.py``."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories

from megarl.actor.load import load_hf_weights
from megarl.actor.model import build_model
from megarl.actor.names import global_weights
from megarl.actor.setup import Parallel, init_parallel
from megarl.actor.state import _model_state, load_model, save_model
from megarl.models.hf_io import open_checkpoint
from megarl.models.spec import read_spec
from tests.actor.compare import mesh_of

Layout = dict[str, int]
Chunks = dict[tuple[str, tuple[int, ...]], Any]


def model_of(hf: Path, parallel: Parallel) -> Any:
    spec = read_spec(hf)
    return build_model(spec, parallel, getattr(torch, spec.dtype))


def chunks(rank: int, models: dict[str, Path], layout: Layout) -> dict[str, Chunks]:
    """By model: (key, offsets) of every chunk that this rank has of a file, and what Megatron says
    of it: the chunk's sizes, the whole tensor's shape, its dtype.
    """
    parallel = init_parallel(mesh_of(layout), seed=1, timeout_s=60)
    try:
        return {name: _chunks(hf, parallel) for name, hf in models.items()}
    finally:
        parallel_state.destroy_model_parallel()


def _chunks(hf: Path, parallel: Parallel) -> Chunks:
    model = model_of(hf, parallel)
    state = _model_state(model, parallel)
    apply_factories(state)
    found: Chunks = {}
    for tensor in nested_values(state):
        assert isinstance(tensor, ShardedTensor), tensor
        sizes = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
        if len(sizes) < len(tensor.global_shape):  # of an expert's half
            sizes = (1, *sizes)
        dtype = str(tensor.dtype).removeprefix("torch.")
        where = tensor.key, tuple(tensor.global_offset)
        found[where] = sizes, tuple(tensor.global_shape), dtype
    return found


def differences(
    rank: int, models: dict[str, Path], checkpoints: dict[str, Path], layout: Layout
) -> dict[str, list[str]]:
    """By model: weights that a checkpoint gives other bits than ``load_hf_weights``; and how many
    weights there are on this rank, as the last entry.
    """
    parallel = init_parallel(mesh_of(layout), seed=1, timeout_s=60)
    try:
        return {name: _differences(hf, checkpoints[name], parallel) for name, hf in models.items()}
    finally:
        parallel_state.destroy_model_parallel()


def _differences(hf: Path, path: Path, parallel: Parallel) -> list[str]:
    model = model_of(hf, parallel)
    load_hf_weights(model, open_checkpoint(hf), read_spec(hf), parallel)
    expected = {name: weight.clone() for name, weight in global_weights(model, parallel)}
    with torch.no_grad():
        for _, weight in global_weights(model, parallel):
            weight.add_(0.25)
    load_model(model, parallel, path)
    found = dict(global_weights(model, parallel))
    assert found.keys() == expected.keys()
    other = [name for name, weight in found.items() if not torch.equal(weight, expected[name])]
    return [*other, str(len(found))]


def save(rank: int, models: dict[str, Path], paths: dict[str, Path], layout: Layout) -> None:
    """By upstream's writer."""
    parallel = init_parallel(mesh_of(layout), seed=1, timeout_s=60)
    try:
        for name, hf in models.items():
            model = model_of(hf, parallel)
            load_hf_weights(model, open_checkpoint(hf), read_spec(hf), parallel)
            save_model(model, parallel, paths[name])
    finally:
        parallel_state.destroy_model_parallel()
