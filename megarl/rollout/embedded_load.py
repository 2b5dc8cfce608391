"""A transformers causal language model from a local Hugging Face folder, and its weights as the
server holds them. Nothing is downloaded, and no code of the folder is run.

Of a folder in FP8 blocks, codes and scales are kept beside the module (``models/live_weights.py``),
whose parameters are what they stand for in the server's dtype.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from megarl.errors import ConfigError, DataError, Problem
from megarl.models.hf_fp8 import KEY
from megarl.models.hf_io import HfCheckpoint, open_checkpoint
from megarl.models.live_folder import load_weights, open_weights
from megarl.models.live_weights import LiveWeights
from megarl.rollout.embedded_kernels import ROW_ATTENTION
from megarl.rollout.embedded_memory import own_memory

log = logging.getLogger(__name__)

_CLASS_OF = {"kimi_k2": "deepseek_v3"}  # model_type that transformers lacks -> whose class it has


def load_model(
    folder: Path, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, LiveWeights]:
    """The model in a local Hugging Face folder.

    Raises ConfigError when it is no such folder, DataError when weights are missing or do not fit.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError([Problem("model", str(folder), "a Hugging Face folder with config.json")])
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    in_fp8 = open_checkpoint(folder) if values.get(KEY) is not None else None
    try:
        model, report = _built(folder, values, dtype, in_fp8)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{folder}: the model cannot be loaded: {error}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        names = sorted(map(str, report.get(kind, ())))
        if names:
            raise DataError(f"{folder}: {len(names)} {kind.replace('_', ' ')}, first {names[0]}")
    if report.get("unexpected_keys"):
        log.warning("%s: not used: %s", folder, sorted(map(str, report["unexpected_keys"]))[:3])
    model = model.to(device).eval().requires_grad_(False)
    own_memory(model)
    if in_fp8 is None:
        return model, LiveWeights(model)
    weights = LiveWeights(model, blocks=in_fp8.blocks, codes=in_fp8.codes)
    load_weights(open_weights(folder, weights), weights)
    return model, weights


def eos_ids(folder: Path, module: PreTrainedModel) -> frozenset[int]:
    """From generation_config.json where there is one, else from config.json."""
    source: GenerationConfig | AutoConfig = module.config
    if (folder / "generation_config.json").is_file():
        source = GenerationConfig.from_pretrained(folder, local_files_only=True)
    value = source.eos_token_id
    if value is None:
        value = module.config.eos_token_id
    return (
        frozenset() if value is None else frozenset(value if isinstance(value, list) else [value])
    )


def _built(
    folder: Path, values: dict[str, Any], dtype: torch.dtype, in_fp8: HfCheckpoint | None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """With what transformers says of it. For a folder in FP8 it is given zeros of the folder's
    names and shapes, and makes of them what it makes of plain weights, which come afterwards.
    """
    config = _config(folder, values)
    options: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": ROW_ATTENTION,
        "output_loading_info": True,
    }
    if in_fp8 is not None:
        zeros = {n: torch.zeros(in_fp8.shape(n), dtype=dtype) for n in in_fp8.names()}
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, report = kind.from_pretrained(None, state_dict=zeros, **options)
    else:
        options |= {"trust_remote_code": False, "local_files_only": True, "use_safetensors": True}
        model, report = AutoModelForCausalLM.from_pretrained(folder, **options)
    return model, report


def _config(folder: Path, values: dict[str, Any]) -> PreTrainedConfig:
    """Without what it says of FP8: transformers would load it with a quantiser of its own."""
    family = _CLASS_OF.get(values.get("model_type", ""))
    if family is None:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    else:
        others = {key: value for key, value in values.items() if key != "model_type"}
        config = AutoConfig.for_model(family, **others)
    if hasattr(config, KEY):
        delattr(config, KEY)
    found: PreTrainedConfig = config
    return found
