"""Models whose servers are compared with the actor, and one whose weights differ a little."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.families import save_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The routed one has a dense layer among those with experts; in bf16 blocks of its experts' widths
# are whole multiples of 16 bytes.
KINDS = {
    "dense": ("qwen3", {}),
    "routed": ("qwen3_moe tied", {"tie_word_embeddings": False, "moe_intermediate_size": 24}),
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
