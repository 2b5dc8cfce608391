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
from megarl.actor.setup import init_parallel
from megarl.models.hf_io import open_checkpoint
from megarl.models.spec import read_spec
from tests.actor.compare import mesh_of
from tests.actor.work import config_for
from tests.te import rounding

KEPT_IN_FP8 = {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": True}


def read_into_fp8(rank: int, hf: Path) -> dict[str, Any]:
    """By HF name: ``exported``; ``before``, what main parameters will start from; and the Megatron
    names of parameters in ``fp8``.
    """
    rounding.install()
    train = {"transformer_impl": "transformer_engine", "row_tokens": 96}
    config = config_for(hf, train=train, moe={"grouped_gemm": True})
    spec, parallel = read_spec(hf), init_parallel(mesh_of({}), seed=1, timeout_s=60)
    try:
        options = {**transformer_options(config, spec), **KEPT_IN_FP8}
        model = build_model(spec, parallel, torch.bfloat16, options)
        load_hf_weights(model, open_checkpoint(hf), spec, parallel)
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
