"""What workers do in ``test_fp8_settings.py``: models of Transformer Engine's modules, asked what
they compute in.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.extensions import transformer_engine as extension
from megatron.core.fp8_utils import is_float8tensor
from transformer_engine.pytorch import quantization, utils

from megarl.actor.actor import build_actor
from megarl.actor.fp8_active import examine, fp8_problems, require_fp8
from megarl.actor.model import build_model, wrap_ddp
from megarl.actor.names import unwrap
from megarl.actor.options import ddp_options, plain_options, transformer_options
from megarl.actor.setup import Parallel, init_parallel
from megarl.config.schema import Config
from megarl.errors import MegarlError
from megarl.models.spec import read_spec
from tests.actor.compare import mesh_of
from tests.actor.option_rows import Row
from tests.actor.work import config_for
from tests.actor.work_options import read_back
from tests.te import rounding

Layout = dict[str, int]


def reports(
    rank: int, cases: Sequence[tuple[Path, Layout, dict[str, Any], dict[str, Any]]]
) -> list[Any]:
    """By (model, layout, settings of FP8, what else): the report, or what is said instead."""
    found: list[Any] = []
    for hf, layout, settings, also in cases:
        config = _config(hf, settings)
        parallel = init_parallel(mesh_of(layout), seed=1, timeout_s=60)
        try:
            model = _built(config, hf, parallel, also)
            section = config.precision.fp8
            try:
                report = require_fp8({"megatron": model}, section, parallel.host)
                found.append(report and report["megatron"])
            except MegarlError as e:
                found.append(str(e))
        finally:
            parallel_state.destroy_model_parallel()
    return found


def _config(hf: Path, settings: dict[str, Any]) -> Config:
    precision = {"dtype": "bf16", "fp8": settings}
    train = {"transformer_impl": "transformer_engine", "row_tokens": 96}
    moe = {"grouped_gemm": True}
    return config_for(hf, precision=precision, train=train, moe=moe)


def _built(config: Config, hf: Path, parallel: Parallel, also: dict[str, Any]) -> Any:
    """``also``: options of Megatron over those of the settings; ``capability``: of the GPU;
    ``own``: modules that have a recipe of their own.
    """
    spec, also = read_spec(hf), dict(also)
    capability = also.pop("capability", (9, 0))
    utils._get_device_compute_capability = lambda device: capability
    for name in ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT"):
        setattr(quantization, name, None)
    own = also.pop("own", None)
    options = {**transformer_options(config, spec), **also}
    model = build_model(spec, parallel, torch.bfloat16, options)
    for name, module in model[0].named_modules() if own else ():
        if name.endswith(own):
            bf16 = extension.TEQuantizationRecipe()
            module.te_quant_params = extension.TEQuantizationParams(bf16, None)
    return model


def local_layers(rank: int, hf: Path, settings: dict[str, Any]) -> list[str]:
    """What is wrong with Megarl's local layers in a Megatron that is told to compute in FP8."""
    from megarl.actor.fp8 import fp8_options

    config = _config(hf, settings)
    section = config.precision.fp8
    assert section is not None
    parallel = init_parallel(mesh_of({}), seed=1, timeout_s=60)
    try:
        options = {**plain_options(), **fp8_options(section)}
        model = build_model(read_spec(hf), parallel, torch.bfloat16, options)
        layers = model[0].config.num_layers
        return [str(p) for p in fp8_problems(examine(model, section), section, layers)]
    finally:
        parallel_state.destroy_model_parallel()


def stored(rank: int, hf: Path, layout: Layout, settings: dict[str, Any]) -> dict[str, Any]:
    """With ``param_gather``: the report, how parameters are stored, and their buffers."""
    rounding.install()
    config = _config(hf, {**settings, "param_gather": True})
    parallel = init_parallel(mesh_of(layout), seed=1, timeout_s=60)
    try:
        spec = read_spec(hf)
        model = build_model(spec, parallel, torch.bfloat16, transformer_options(config, spec))
        report = require_fp8({"megatron": model}, config.precision.fp8, parallel.host)
        config = config.model_copy(
            update={"optim": config.optim.model_copy(update={"distributed": True})}
        )
        wrapped = wrap_ddp(model, torch.bfloat16, ddp_options(config))
        settings_of = wrapped[0].ddp_config
        assert isinstance(settings_of, DistributedDataParallelConfig)
        buffers = [*wrapped[0].buffers, *wrapped[0].expert_parallel_buffers]
        return {
            "report": report and report["megatron"],
            "stored": {
                name: type(parameter.data if not is_float8tensor(parameter) else parameter).__name__
                for name, parameter in unwrap(wrapped[0]).named_parameters()
            },
            "buffers": sorted({str(b.param_data.dtype) for b in buffers}),
            "ddp": settings_of.fp8_param_gather,
        }
    finally:
        parallel_state.destroy_model_parallel()


def options(rank: int, hf: Path, rows: list[Row]) -> list[dict[str, Any]]:
    return read_back(rank, hf, rows)


def experts(rank: int, hf: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """How tokens of experts are padded."""
    config = _config(hf, settings)
    parallel = init_parallel(mesh_of({}), seed=1, timeout_s=60)
    try:
        spec = read_spec(hf)
        (chunk,) = build_model(spec, parallel, torch.bfloat16, transformer_options(config, spec))
        grouped = [m for m in chunk.modules() if type(m).__name__ == "TEGroupedMLP"]
        return {
            "by": {type(m.quantization_padding).__name__ for m in grouped},
            "router": chunk.config.moe_router_padding_for_quantization,
        }
    finally:
        parallel_state.destroy_model_parallel()


def of_an_actor(rank: int, hf: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Of a whole actor, as a run builds it: what its objects hold."""
    config = _config(hf, settings)
    parallel = init_parallel(mesh_of({}), seed=1, timeout_s=60)
    try:
        actor = build_actor(config, read_spec(hf), parallel, optimizer_steps=10)
        megatron = unwrap(actor.model[0]).config
        report = require_fp8({"megatron": actor.model}, config.precision.fp8, parallel.host)
        return {
            "report": report and report["megatron"],
            "model": (megatron.fp8, str(megatron.fp8_recipe), megatron.fp8_param),
            "optimizer": actor.optimizer.config.fp8_recipe,
        }
    finally:
        parallel_state.destroy_model_parallel()
