"""What workers do with parameters that are kept in FP8."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_float8tensor

from megarl.actor.export import MegatronWeights
from megarl.actor.load import load_hf_weights
from megarl.actor.model import build_model
from megarl.actor.names import global_parameters
from megarl.actor.options import transformer_options
from megarl.actor.reference import HostWeights
from megarl.actor.setup import Parallel, init_parallel
from megarl.models.hf_io import open_checkpoint
from megarl.models.spec import ModelSpec, read_spec
from tests.actor.compare import mesh_of
from tests.actor.work import config_for
from tests.te import rounding

KEPT_IN_FP8 = {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": True}


def model_in_fp8(hf: Path, parallel: Parallel) -> tuple[Any, ModelSpec]:
    """With the weights of ``hf``."""
    rounding.install()
    train = {"transformer_impl": "transformer_engine", "row_tokens": 96}
    config = config_for(hf, train=train, moe={"grouped_gemm": True})
    spec = read_spec(hf)
    options = {**transformer_options(config, spec), **KEPT_IN_FP8}
    model = build_model(spec, parallel, torch.bfloat16, options)
    load_hf_weights(model, open_checkpoint(hf), spec, parallel)
    return model, spec


def read_into_fp8(rank: int, hf: Path) -> dict[str, Any]:
    """By HF name: ``exported``; ``before``, what main parameters will start from; and the Megatron
    names of parameters in ``fp8``.
    """
    parallel = init_parallel(mesh_of({}), seed=1, timeout_s=60)
    try:
        model, spec = model_in_fp8(hf, parallel)
        weights = MegatronWeights(model, spec, parallel)
        before: dict[str, torch.Tensor] = {}
        fp8 = []
        for name, parameter in global_parameters(model, parallel):
            if is_float8tensor(parameter):
                fp8.append(name)
                values = parameter.get_high_precision_init_val()
                before |= dict(weights.mapping.to_hf(name, [values]))
        return {"fp8": fp8, "before": before, "exported": dict(weights.tensors())}
    finally:
        parallel_state.destroy_model_parallel()


def reference_in_fp8(rank: int, hf: Path, other: Path) -> dict[str, dict[str, torch.Tensor]]:
    """What a model is made of: with the weights of ``hf``, with those of ``other``, while those of
    ``hf`` stand in for them as the reference, and afterwards.
    """
    parallel = init_parallel(mesh_of({}), seed=1, timeout_s=60)
    try:
        model, spec = model_in_fp8(hf, parallel)
        found = {"reference": _made_of(model, parallel)}
        reference = HostWeights(model)
        load_hf_weights(model, open_checkpoint(other), spec, parallel)
        found["own"] = _made_of(model, parallel)
        with reference.loaded(model):
            found["inside"] = _made_of(model, parallel)
        found["after"] = _made_of(model, parallel)
        return found
    finally:
        parallel_state.destroy_model_parallel()


def _made_of(model: Any, parallel: Parallel) -> dict[str, torch.Tensor]:
    """Parameters; of one in FP8 its codes and scales, by rows and by columns."""
    found = {}
    for name, parameter in global_parameters(model, parallel):
        if not is_float8tensor(parameter):
            found[name] = parameter.detach().clone()
            continue
        for part, tensor in parameter.get_metadata().items():
            if isinstance(tensor, torch.Tensor):
                found[f"{name}: {part}"] = tensor.clone()
    return found
