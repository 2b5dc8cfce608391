"""The form in which servers hold weights, as settings and config.json decide it.

Servers hold what the folder is that they are started from: ``rollout.model``, or ``model.hf``.
Weights are sent in that form; ``models/served.py`` says it tensor by tensor.
"""

from collections.abc import Mapping
from typing import Any

from megarl.config.files import read_hf_config
from megarl.config.schema import Config

QUANTISED = "quantization_config"
STORED_SCALES = {"float": "f32", "ue8m0": "power_of_two"}  # scale_fmt of config.json -> settings'
STORED_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


def served_scales(config: Config, hf: Mapping[str, Any]) -> str | None:
    """How the scales of the weights that servers hold are rounded; None where these are plain.
    ``hf``: config.json of the servers' folder.
    """
    value = hf.get(QUANTISED)
    if not value:
        return None
    chosen = "f32" if config.sync.fp8 == "auto" else config.sync.fp8
    return STORED_SCALES.get(value.get("scale_fmt"), chosen)


def served_dtype(config: Config) -> str:
    """fp32 or bf16: of what servers hold that is not in FP8, in a valid configuration."""
    folder = config.rollout.model
    if folder is None:
        return config.precision.dtype
    return STORED_DTYPES[stored_dtype(read_hf_config(folder) or {})]


def stored_dtype(hf: Mapping[str, Any]) -> Any:
    return hf.get("dtype") or hf.get("torch_dtype") or "float32"
