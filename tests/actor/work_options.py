"""Worker side of test_options.py: what Megatron's objects hold once they are built."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.actor.arguments import transformer_config
from megarl.actor.model import dtype_of
from megarl.actor.names import unwrap
from megarl.actor.options import (
    ddp_options,
    optimizer_options,
    schedule_options,
    transformer_options,
)
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.models.spec import read_spec
from tests.actor.compare import mesh_of
from tests.actor.option_rows import Row, nested
from tests.actor.work import config_for, make_actor


class _Groups:
    param_groups: tuple[dict[str, Any], ...] = ()


def read_back(rank: int, hf: Path, rows: list[Row]) -> list[dict[str, Any]]:
    """For every row, what the objects that it names hold with its settings, and by default."""
    return [{"set": _read(hf, row, row.value), "default": _read(hf, row, None)} for row in rows]


def _read(hf: Path, row: Row, value: Any) -> dict[str, Any]:
    sections = nested({**row.also, **({} if value is None else {row.key: value})})
    config = config_for(hf, **sections)
    spec = replace(read_spec(hf), expert_bias=True, router_score="sigmoid", shared_ffn=32)
    if row.dense:
        flags = {"moe_layers": (False,) * spec.layers, "expert_bias": False}
        spec = replace(spec, experts=0, shared_ffn=0, ffn=64, **flags)
    dtype = dtype_of(config.precision)
    # what the model is: the settings' part of it is what is read back
    objects = {
        "model": lambda: transformer_config(
            spec, mesh_of(row.layout), dtype, transformer_options(config, spec)
        ),
        "ddp": lambda: DistributedDataParallelConfig(**ddp_options(config)),
        "optimizer": lambda: OptimizerConfig(**optimizer_options(config, dtype)),
        "schedule": lambda: OptimizerParamScheduler(
            _Groups(), **schedule_options(config.optim, 100)
        ),
    }
    return _values(objects, row.expect)


def _values(objects: dict[str, Any], names: Any) -> dict[str, Any]:
    found = {}
    for name in names:
        part, attribute = name.split(".")
        try:
            found[name] = _plain(getattr(objects[part](), attribute))
        except ValueError as e:
            found[name] = str(e)
    return found


def _plain(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def of_a_built_actor(
    rank: int, hf: Path, layout: dict[str, int], sections: dict[str, Any], names: list[str]
) -> dict[str, Any]:
    """The same of an actor: what the model, its wrapper and its optimizer were built with."""
    from megatron.core import parallel_state

    actor = make_actor(config_for(hf, **sections), layout)
    try:
        objects = {
            "model": lambda: unwrap(actor.model[0]).config,
            "ddp": lambda: actor.model[0].ddp_config,
            "optimizer": lambda: actor.optimizer.config,
            "schedule": lambda: actor.schedule,
        }
        return _values(objects, names)
    finally:
        parallel_state.destroy_model_parallel()


def refused(rank: int, hf: Path, sections: dict[str, Any]) -> str:
    """What is said of settings that the model has no use for."""
    config: Config = config_for(hf, **sections)
    try:
        transformer_options(config, read_spec(hf))
    except ConfigError as e:
        return str(e)
    return ""
