"""Models whose servers are compared with the actor, and one whose weights differ a little."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.families import save_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Rows of an expert's matrices are whole multiples of 16 bytes, which embedded kernels want in bf16.
ROUTED = {"tie_word_embeddings": False, "moe_intermediate_size": 24}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "routed": ("qwen3_moe tied", ROUTED),  # but for one layer
    # the only kind of Qwen3-MoE that SGLang computes (config/rollout_rules.py refuses others)
    "routed throughout": ("qwen3_moe tied", {**ROUTED, "mlp_only_layers": []}),
}


def save(kind: str, dtype: str, folder: Path) -> Path:
    name, options = KINDS[kind]
    return save_model(name, folder, DTYPES[dtype], **options)


def perturbed(model: Path, folder: Path, weight: str, factor: float = 1.01) -> Path:
    """``model`` with one weight multiplied."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[weight] = tensors[weight] * factor
    save_file(tensors, file, metadata={"format": "pt"})
    return folder
